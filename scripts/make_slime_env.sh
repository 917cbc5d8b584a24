#!/usr/bin/env bash
# Make or reuse an environment in which slime runs on a CPU (docs/slime/cpu.md): the versions of requirements/cpu.lock,
# and next to them those of requirements/slime.lock and megatron-core.
#   scripts/make_slime_env.sh DIR           everything in DIR (12 GB)
#   scripts/make_slime_env.sh DIR BASE      DIR (0.4 GB) on top of BASE, an environment made by make_env.sh
# Then: SLIME_SRC=/path/to/slime DIR/bin/python -m pytest -m slime
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
env=${1:?usage: make_slime_env.sh DIR [BASE]}
base=${2:-}
lock=$here/requirements/slime.lock
megatron='megatron-core==0.19.2'
stamp=$env/.reef-slime-slime-lock
want=$({ cat "$lock"; echo "$megatron"; } | sha256sum | cut -c1-16)

if [ -z "$base" ]; then
    bash "$here/scripts/make_env.sh" "$env"
    pip=("$env/bin/python" -m pip)
else
    # shellcheck source=scripts/env_common.sh
    source "$here/scripts/env_common.sh"
    layer_env "$env" "$base"
fi
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$want" ]; then
    echo "make_slime_env: installing ray, sglang-router and $megatron into $env"
    "${pip[@]}" install --quiet --no-deps --requirement "$lock"
    packages=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "${pip[@]}" install --quiet --no-deps --upgrade --python-version 3.12 --only-binary=:all: --target "$packages" "$megatron"
    echo "$want" > "$stamp"
fi
