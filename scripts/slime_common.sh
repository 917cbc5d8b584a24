# shellcheck shell=bash
# Sourced by scripts/slime_*.sh. It gives them
#
#   model_args NAME        MODEL_ARGS, the shape of the model as Megatron-core's flags, from slime's scripts/models/NAME.sh
#   launch LOOP FLAG...    runs slime's train.py or train_async.py with ours around it, as a Ray job on this node
#
# Variables of all scripts:
#
#   SLIME_SRC      the slime checkout (default: slime in the home directory, as in its image)
#   MODELS, DATA   where checkpoints and data sets lie (default: the home directory)
#   RUNS           where checkpoints of the run and its ledger go (default: runs/ here)
#   NUM_GPUS       of this node (default: 8); MASTER_ADDR: its address (default: 127.0.0.1)
#   MEGATRON       Megatron-LM's source for PYTHONPATH (default: Megatron-LM in the home directory)
#   WANDB_PROJECT  log to this W&B project; without it nothing is logged
#   PRINT_ARGS=1   print the flags, one a line, and start nothing
#
# Unlike slime's scripts these stop nobody's processes: a Ray that runs already is used.

set -euo pipefail

SLIME_SRC=${SLIME_SRC:-$HOME/slime}
MODELS=${MODELS:-$HOME}
DATA=${DATA:-$HOME}
RUNS=${RUNS:-$PWD/runs}
NUM_GPUS=${NUM_GPUS:-8}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
MEGATRON=${MEGATRON:-$HOME/Megatron-LM}
REEF_SLIME=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
export SLIME_SRC

# shellcheck disable=SC2034 # for the scripts that source this
WANDB_ARGS=()
if [[ -n ${WANDB_PROJECT:-} ]]; then
    # Our metrics go into the same run, under reef/.
    # shellcheck disable=SC2034
    WANDB_ARGS=(--use-wandb --wandb-project "$WANDB_PROJECT" --wandb-group "$(basename "$0" .sh)")
fi

model_args() {
    local file=$SLIME_SRC/scripts/models/$1.sh
    # shellcheck disable=SC2034
    MODEL_ARGS=()
    if [[ -f $file ]]; then
        # shellcheck source=/dev/null
        source "$file"
    elif [[ -n ${PRINT_ARGS:-} ]]; then
        echo "$0: without the flags of $file, which is not there" >&2
    else
        echo "$0: $file is not there; set SLIME_SRC to a slime checkout" >&2
        return 2
    fi
}

launch() {
    local loop=$1 nvlinks
    shift
    if [[ -n ${PRINT_ARGS:-} ]]; then
        printf '%s\n' "$@"
        return
    fi
    # SGLang finds our hooks by the entry point of an installed package; PYTHONPATH alone would start bare engines.
    if ! (cd / && env -u PYTHONPATH python3 -c 'from slime_backend.engine_process import plugin_entry as p; p.require()' 2>/dev/null); then
        echo "$0: reef-slime isn't installed in $(command -v python3); run: python3 -m pip install $REEF_SLIME (docs/install.md)" >&2
        return 2
    fi
    nvlinks=$(nvidia-smi topo -m 2>/dev/null | grep -c 'NV[0-9]' || true)
    cd "$SLIME_SRC"
    if ! ray status >/dev/null 2>&1; then
        ray start --head --node-ip-address "$MASTER_ADDR" --num-gpus "$NUM_GPUS" --disable-usage-stats
    fi
    # The one line that differs from a launch script of slime's is the last: it has `python3 train.py` there.
    ray job submit --address "http://$MASTER_ADDR:8265" \
        --runtime-env-json "{\"env_vars\": {
            \"PYTHONPATH\": \"$MEGATRON:$REEF_SLIME:${EXTRA_PYTHONPATH:-}\",
            \"CUDA_DEVICE_MAX_CONNECTIONS\": \"1\",
            \"NCCL_NVLS_ENABLE\": \"$((nvlinks > 0))\"}}" \
        -- python3 -m "slime_backend.slime_hooks.$loop" "$@"
}
