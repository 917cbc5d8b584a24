#!/usr/bin/env bash
# A hybrid model, three sliding-window layers to one that sees everything, disjoint on 8 GPUs. Engines keep one window at
# each message boundary, so that the first prompts after a publication share their system prompt too
# (docs/sliding-window.md).
#
#   MODEL=my-qwen3-hybrid WINDOW=4096 scripts/slime_hybrid_swa_disjoint.sh          variables: slime_common.sh
#
# slime 0.3.1 converts none of the hybrid families that SGLang knows by name (gpt-oss, Gemma 4, MiMo-V2). What it converts
# is Qwen3, so the model is a Qwen3 whose config.json gives layers a window, and says so to SGLang:
#
#   "use_sliding_window": true, "sliding_window": 4096, "layer_types": ["sliding_attention", ..., "full_attention", ...],
#   "is_hybrid_swa": true, "hybrid_layer_pattern": [1, 1, 1, 0, ...]

source "$(dirname -- "${BASH_SOURCE[0]}")/slime_common.sh"
model_args qwen3-4B
MODEL=${MODEL:-Qwen3-4B-hybrid}
WINDOW=${WINDOW:-4096}
RUN=$RUNS/hybrid-swa-disjoint

PLACEMENT_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 4
    --rollout-num-gpus 4
    --rollout-num-gpus-per-engine 1
)

REEF_ARGS=(
    # Cache entries carry the weight epoch: in-flight requests keep their KV over a publication, and no prompt is given KV
    # of older weights.
    --disjoint-prefix-sharing=scoped
    --reef-run-dir "$RUN/reef"
)

WINDOW_ARGS=(
    --window-size "$((WINDOW - 1)),0" # Megatron-core counts the tokens before, the model's config the token itself too
    --window-attn-skip-freq 4         # every fourth layer sees everything
)

CKPT_ARGS=(
    --hf-checkpoint "$MODELS/$MODEL"
    --load "$MODELS/$MODEL" # slime reads Qwen3's own format too
    --save "$RUN"
    --save-interval 20
)

ROLLOUT_ARGS=(
    --prompt-data "$DATA/dapo-math-17k/dapo-math-17k.jsonl"
    --input-key prompt
    --label-key label
    --apply-chat-template # without its special tokens there are no message boundaries, only the grid
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
    --tensor-model-parallel-size 2
    --sequence-parallel
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216
)

GRPO_ARGS=(
    --advantage-estimator grpo
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
    --sglang-mem-fraction-static 0.8
    --sglang-model-impl transformers # SGLang's own Qwen3 code takes no window
    --sglang-config "$REEF_SLIME/configs/slime/hybrid_swa.yaml"
)

MISC_ARGS=(
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
)

launch train "${PLACEMENT_ARGS[@]}" "${REEF_ARGS[@]}" "${MODEL_ARGS[@]}" "${WINDOW_ARGS[@]}" "${CKPT_ARGS[@]}" \
    "${ROLLOUT_ARGS[@]}" "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" \
    "${WANDB_ARGS[@]}" "$@"
