#!/usr/bin/env bash
# Run slime on this machine's CPU with a tiny model, from nothing to the last publication (docs/slime/cpu.md).
#   scripts/slime_cpu.sh [FLAG...]      more flags of slime, Megatron-core, SGLang (--sglang-*) or ours; the last wins
# Variables:
#   SLIME_SRC   a slime checkout; or run this where `import slime` works
#   PYTHON      of an environment made by scripts/make_slime_env.sh (default: python3)
#   LOOP        train (default) or train_async
#   DIR         where the model, the prompts and the saved rollouts go (default: runs/slime_cpu)
set -euo pipefail
PYTHON=${PYTHON:-python3}
LOOP=${LOOP:-train}
DIR=${DIR:-runs/slime_cpu}

mkdir -p "$DIR"
DIR=$(realpath "$DIR")
# The checkpoint, its tokenizer and prompts, and the flags that describe the model.
model=$("$PYTHON" -m slime_backend.cpu.tiny "$DIR")
mapfile -t MODEL_ARGS <<< "$model"

CLUSTER_ARGS=(
    --actor-num-nodes 1                 # one trainer process
    --actor-num-gpus-per-node 1
    --rollout-num-gpus 1                # one engine; GPUs are logical here: places, not devices
    --rollout-num-gpus-per-engine 1
    --num-gpus-per-node 2
)
ROLLOUT_ARGS=(
    --custom-rm-path slime_backend.cpu.tiny.reward  # the share of digits in the answer
    --num-rollout 3
    --rollout-batch-size 4              # prompts of a rollout
    --n-samples-per-prompt 2
    --rollout-max-response-len 16
    --rollout-temperature 1.0
    --save-debug-rollout-data "$DIR/rollout_{rollout_id}.pt"
)
TRAIN_ARGS=(
    --global-batch-size 8               # prompts x samples: one step per rollout
    --micro-batch-size 1
    --advantage-estimator grpo
    --optimizer adam
    --lr 1e-3
    --lr-decay-style constant
)
SGLANG_ARGS=(
    --sglang-server-concurrency 8
    --sglang-log-level warning
)

export SLIME_ACCELERATOR=cpu
exec "$PYTHON" -m "slime_backend.slime_hooks.$LOOP" \
    "${MODEL_ARGS[@]}" "${CLUSTER_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${TRAIN_ARGS[@]}" "${SGLANG_ARGS[@]}" "$@"
