#!/usr/bin/env bash
# Make or reuse an environment with DeepSpeed, for trainer=deepspeed on a CPU and for its tests.
#   scripts/make_deepspeed_env.sh DIR BASE      DIR (24 MB) on top of BASE, an environment made by make_env.sh
# Then: DIR/bin/reef-slime train configs/cpu_tiny_deepspeed.yaml
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
env=${1:?usage: make_deepspeed_env.sh DIR BASE}
base=${2:?usage: make_deepspeed_env.sh DIR BASE}
lock=$here/requirements/deepspeed.lock
stamp=$env/.reef-slime-deepspeed-lock
want=$(sha256sum "$lock" | cut -c1-16)

# shellcheck source=scripts/env_common.sh
source "$here/scripts/env_common.sh"
layer_env "$env" "$base"
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$want" ]; then
    echo "make_deepspeed_env: installing DeepSpeed into $env"
    # DS_BUILD_OPS=0: nothing is compiled.
    DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "${pip[@]}" install --quiet --no-deps --requirement "$lock"
    echo "$want" > "$stamp"
fi
# The command itself, which BASE has in its own bin.
printf '#!%s\nimport sys\nfrom slime_backend.cli import main\nsys.exit(main())\n' "$env/bin/python" > "$env/bin/reef-slime"
chmod +x "$env/bin/reef-slime"
