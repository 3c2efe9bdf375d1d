# Sourced by tests/run.sh and examples/demo.sh: makes the virtual environment and installs the project with the
# tested versions. Sets PY to its interpreter. Where: $SPOT_VENV, by default .venv in the repository.
# Nothing is installed again while pyproject.toml and the constraints are unchanged.

spot_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
spot_venv="${SPOT_VENV:-$spot_root/.venv}"
spot_python="${PYTHON:-python3}"
# The tested torch is installed before everything else: a range in somebody's requirements could bring another one.
spot_torch="$(grep '^torch==' "$spot_root/tests/constraints.txt")"

if ! "$spot_python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "$spot_python is older than 3.10 or is not there. Set PYTHON to a newer one." >&2
    exit 2
fi

if [ ! -x "$spot_venv/bin/python" ]; then
    echo "== making $spot_venv"
    "$spot_python" -m venv "$spot_venv"
fi
PY="$spot_venv/bin/python"

spot_stamp="$spot_venv/.spot-installed"
spot_want="$(cat "$spot_root/pyproject.toml" "$spot_root/tests/constraints.txt" | cksum) $spot_root"
if [ "$(cat "$spot_stamp" 2>/dev/null)" != "$spot_want" ]; then
    echo "== installing into $spot_venv"
    "$PY" -m pip install --quiet --disable-pip-version-check "$spot_torch"
    "$PY" -m pip install --quiet --disable-pip-version-check -e "$spot_root[dev]" -c "$spot_root/tests/constraints.txt"
    echo "$spot_want" >"$spot_stamp"
fi
