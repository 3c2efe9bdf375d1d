#!/usr/bin/env bash
# On a fresh machine: installs the project, trains a small GPT, kills it three times at random instants, starts it
# again with the same command each time, and compares it with a run that was never killed: `bash examples/demo.sh`.
# Exit code 0 only when both are the same, bit for bit. Arguments go to prove.py: `bash examples/demo.sh --ranks 2`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# shellcheck source=tests/env.sh
. tests/env.sh

out="runs/demo-$(date +%Y%m%d-%H%M%S)"
exec "$PY" examples/lightning_gpt/prove.py "$out" "$@"
