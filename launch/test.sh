#!/usr/bin/env bash
# Makes an environment with the test tools, and runs the tests. Arguments go to pytest, e.g.  bash launch/test.sh tests/models
set -euo pipefail
EXTRAS=test
. "$(dirname "$0")/environment.sh"
export HF_HUB_OFFLINE=1
python -m ruff check .
exec python -m pytest -n "${WORKERS:-2}" --dist loadfile "$@"
