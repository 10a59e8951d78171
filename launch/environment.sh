# Sourced by the other scripts: makes the environment in .venv (or $VENV) once per set of requirements, and activates it.
# EXTRAS names the package's extras to install, e.g. EXTRAS=test. PYTHON names the interpreter (3.11 or newer).
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=${VENV:-.venv}
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "Python 3.11 or newer is needed; $("$python" --version) was found. Name another with PYTHON=..." >&2
  exit 1
}
"$venv/bin/python" -m pip --version > /dev/null 2>&1 || "$python" -m venv --clear "$venv"
# One note per set of extras, with what was installed for it.
note="$venv/installed-${EXTRAS:-base}"
if ! cmp -s setup.py "$note"; then
  echo "Installing into $venv (about two minutes the first time)"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e ".${EXTRAS:+[$EXTRAS]}"
  cp setup.py "$note"
fi
# shellcheck disable=SC1091
. "$venv/bin/activate"
