#!/usr/bin/env bash
# Make or reuse the virtual environment DIR with the locked versions, and install this checkout into it (editable).
#   scripts/make_env.sh DIR [LOCK]      LOCK defaults to requirements/cpu.lock
# The lock's hash is written last, so an install that was interrupted is done again.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
env=${1:?usage: make_env.sh DIR [LOCK]}
python=${PYTHON:-python3}
lock=${2:-$here/requirements/cpu.lock}
stamp=$env/.reef-slime-lock
want=$(sha256sum "$lock" | cut -c1-16)

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $version in
    3.11) ;;
    3.12) want+=-$version ;; # an environment of another Python is not reused
    *)
        echo "make_env: $("$python" --version) found; the lock is for Python 3.11 and 3.12 (set PYTHON=python3.11)" >&2
        exit 2
        ;;
esac
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$want" ]; then
    free_gb=$(df -Pk "$(dirname "$env")" | awk 'NR == 2 { print int($4 / 1048576) }')
    if [ "$free_gb" -lt 14 ]; then
        echo "make_env: $free_gb GB free next to $env; the environment takes 11 GB and 3 more while it unpacks" >&2
        exit 1
    fi
    echo "make_env: installing the locked versions into $env (11 GB, some minutes)"
    "$python" -m venv --clear "$env"
    # pip as it comes with Python 3.11 can take a CUDA build of torch twice; a current one knows --no-deps resolution.
    "$env/bin/pip" install --quiet --upgrade 'pip==26.3'
    "$env/bin/pip" install --quiet --no-deps --requirement "$lock"
    echo "$want" > "$stamp"
fi
# setuptools warns that an editable install is an editable install.
PYTHONWARNINGS=ignore "$env/bin/pip" install --quiet --no-deps --no-build-isolation --editable "$here" 2>&1 |
    { grep -v -e Warning -e "^ *[*!]" -e "^ *$" -e "Please be careful" -e "name as your package" -e "with strategy" -e "_finalize_license" || true; }
