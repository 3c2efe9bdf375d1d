#!/usr/bin/env bash
# Installs the project on a fresh machine and runs its checks and its fast tests: `bash tests/run.sh`.
#   --slow   adds the slow lane (an hour or so on two cores)
# Everything else goes to pytest: `bash tests/run.sh tests/kill -k ddp`.
# The first check that fails ends the run; its name is the last line.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

slow=0
pytest_args=()
for arg in "$@"; do
    if [ "$arg" = --slow ]; then slow=1; else pytest_args+=("$arg"); fi
done

# shellcheck source=tests/env.sh
. tests/env.sh

check() {
    local name="$1" code=0
    shift
    echo "== $name"
    "$@" || code=$?
    if [ "$code" -ne 0 ]; then
        echo "== FAILED: $name (exit $code): $*" >&2
        exit "$code"
    fi
}

bin="$(dirname "$PY")"
# Tests start real processes; with two of them at once on a small machine, one thread each is the fastest.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

check "ruff" "$bin/ruff" check .
check "mypy" "$bin/mypy"
check "import rules" "$bin/lint-imports"
check "fast tests" "$PY" -m pytest -n 2 --dist loadfile "${pytest_args[@]}"
if [ "$slow" = 1 ]; then
    export SPOT_TEST_SLURM=1 # installs a Slurm of its own where there is none
    # Heavy: one at a time, so that a machine of two cores is not asked for four ranks at once.
    check "slow tests" "$PY" -m pytest -m "slow and not gpu and not bench" -o faulthandler_timeout=0 "${pytest_args[@]}"
fi
