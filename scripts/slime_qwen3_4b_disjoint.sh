#!/usr/bin/env bash
# Qwen3-4B on 8 GPUs, disjoint: 4 train, 4 serve as two engines. Prompts share their prefix in the radix cache, and each
# publication retracts what is in flight, flushes both engines and verifies it.
#
#   scripts/slime_qwen3_4b_disjoint.sh          variables: slime_common.sh

source "$(dirname -- "${BASH_SOURCE[0]}")/slime_common.sh"
model_args qwen3-4B
RUN=$RUNS/qwen3-4b-disjoint

PLACEMENT_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 4 # these train ...
    --rollout-num-gpus 4        # ... and these serve: without --colocate they are other GPUs
    --rollout-num-gpus-per-engine 2
)

REEF_ARGS=(
    # Requests share prefixes (system prompt, the 8 samples of a prompt). The bare flag means retract: in-flight requests
    # are prefilled again under the new weights. Without it the radix cache is off.
    --disjoint-prefix-sharing
    --reef-run-dir "$RUN/reef" # ledger of rollouts and publications: reef-slime rollouts, report
)

CKPT_ARGS=(
    --hf-checkpoint "$MODELS/Qwen3-4B"       # what the engines start with; shape, tokenizer
    --ref-load "$MODELS/Qwen3-4B_torch_dist" # converted by slime's tools/convert_hf_to_torch_dist.py
    --load "$RUN"                            # goes on from here if a checkpoint is there
    --save "$RUN"
    --save-interval 20
)

ROLLOUT_ARGS=(
    --prompt-data "$DATA/dapo-math-17k/dapo-math-17k.jsonl"
    --input-key prompt
    --label-key label
    --apply-chat-template # its special tokens also show the engines where messages begin
    --rollout-shuffle
    --rm-type deepscaler
    --num-rollout 3000
    --rollout-batch-size 32
    --n-samples-per-prompt 8 # 7 of 8 find the complete prompt in the cache
    --rollout-max-response-len 8192
    --rollout-temperature 1
    --global-batch-size 256 # 32 x 8: one training step, hence one publication, per rollout
    --balance-data
)

PERF_ARGS=(
    --tensor-model-parallel-size 2 # 2 x 2 data parallel
    --sequence-parallel
    --recompute-granularity full # activations of 8k responses would not fit
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216 # one longest response with its prompt
)

GRPO_ARGS=(
    --advantage-estimator grpo
    --use-kl-loss
    --kl-loss-coef 0.00 # measured, not trained on
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
)

SGLANG_ARGS=(
    --sglang-mem-fraction-static 0.8 # the engines have their GPUs to themselves
)

MISC_ARGS=(
    --attention-dropout 0.0 # Megatron-core's default is 0.1
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
)

launch train "${PLACEMENT_ARGS[@]}" "${REEF_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "${WANDB_ARGS[@]}" "$@"
