#!/usr/bin/env bash
# Makes an environment, installs the package, and trains two tiny unlike policies on each other on this machine.
# Arguments go to the trainer, e.g.  bash launch/demo.sh --config.steps=50 --workdir=runs/short
set -euo pipefail
. "$(dirname "$0")/environment.sh"
exec python -m mutualrl.train --config=configs/demo.py "$@"
