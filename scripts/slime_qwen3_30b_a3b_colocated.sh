#!/usr/bin/env bash
# Qwen3-30B-A3B (mixture of experts) on 8 GPUs, colocated: trainer and one engine take turns on the same GPUs. The layout
# alone fixes the policy: retract, radix cache on, flush and verify, whatever --disjoint-prefix-sharing is.
#
#   scripts/slime_qwen3_30b_a3b_colocated.sh          variables: slime_common.sh

source "$(dirname -- "${BASH_SOURCE[0]}")/slime_common.sh"
model_args qwen3-30B-A3B
RUN=$RUNS/qwen3-30b-a3b-colocated

PLACEMENT_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 8
    --colocate # the engine hands its memory back while the trainer works, and gets new weights as tensors
    --rollout-num-gpus-per-engine 8
)

REEF_ARGS=(
    --reef-run-dir "$RUN/reef"
)

CKPT_ARGS=(
    --hf-checkpoint "$MODELS/Qwen3-30B-A3B"
    --ref-load "$MODELS/Qwen3-30B-A3B_torch_dist"
    --load "$RUN"
    --save "$RUN"
    --save-interval 20
)

ROLLOUT_ARGS=(
    --prompt-data "$DATA/dapo-math-17k/dapo-math-17k.jsonl"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rm-type deepscaler
    --num-rollout 3000
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 8192
    --rollout-temperature 1
    --global-batch-size 256
    --balance-data
)

PERF_ARGS=(
    --tensor-model-parallel-size 4
    --sequence-parallel
    --expert-model-parallel-size 8 # 128 experts, 16 per GPU
    --expert-tensor-parallel-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 20480
)

GRPO_ARGS=(
    --advantage-estimator grpo
    --use-kl-loss
    --kl-loss-coef 0.00
    --kl-loss-type low_var_kl
    --entropy-coef 0.00
    --eps-clip 0.2
    --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98
    --optimizer-cpu-offload # Adam's moments of 30B parameters don't fit next to weights and engine
    --overlap-cpu-optimizer-d2h-h2d
    --use-precision-aware-optimizer
)

SGLANG_ARGS=(
    --sglang-mem-fraction-static 0.7 # what the trainer keeps must fit into the rest
    --sglang-config "$REEF_SLIME/configs/slime/colocated_one_engine.yaml"
)

MISC_ARGS=(
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
)

launch train "${PLACEMENT_ARGS[@]}" "${REEF_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "${WANDB_ARGS[@]}" "$@"
