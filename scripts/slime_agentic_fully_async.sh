#!/usr/bin/env bash
# A tool-using agent (slime's examples/retool, Qwen3-4B) on 8 GPUs, fully asynchronous: trajectories stay in flight while
# the trainer steps, over as many publications as they take. slime alone aborts them at each publication and puts them
# back; here they are paused in place, keep their KV, and go on under the new weights.
#
#   scripts/slime_agentic_fully_async.sh          variables: slime_common.sh, and
#   AGENT         directory with the agent's module (default: slime's examples/retool)
#   AGENT_MODULE  its name (default: generate_with_retool); it has generate(args, sample, sampling_params) and reward_func

source "$(dirname -- "${BASH_SOURCE[0]}")/slime_common.sh"
model_args qwen3-4B
AGENT_MODULE=${AGENT_MODULE:-generate_with_retool}
EXTRA_PYTHONPATH=${AGENT:-$SLIME_SRC/examples/retool}
RUN=$RUNS/agentic-fully-async

PLACEMENT_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 4
    --rollout-num-gpus 4
    --rollout-num-gpus-per-engine 1
)

REEF_ARGS=(
    # A turn finds the turns before it in the cache, also those that older weights computed for it; no other trajectory
    # is given them.
    --disjoint-prefix-sharing=scoped
    # Tokens more than 4 publications old are weighed by the trainer's probability, and masked where it left 0.5 .. 5.
    --max-version-lag 4
    --staleness correct # or mask_tokens, or drop
    --reef-run-dir "$RUN/reef"
)

AGENT_ARGS=(
    --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async
    --custom-generate-function-path "$AGENT_MODULE.generate" # must hand SGLang's meta_info to append_response_tokens
    --custom-rm-path "$AGENT_MODULE.reward_func"
    --reward-key score # the agent's reward is a dict
)

CKPT_ARGS=(
    --hf-checkpoint "$MODELS/qwen3-4b-sft" # an agent that was shown the tool's format before
    --ref-load "$MODELS/qwen3-4b-sft_torch_dist"
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
    --num-rollout 3000
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 8192 # all turns together
    --rollout-temperature 1
    --global-batch-size 256
    --balance-data
    --update-weights-interval 1     # publish after every step
    --sglang-server-concurrency 128 # trajectories in flight per engine, rollout boundaries or not
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
)

SGLANG_ARGS=(
    --sglang-mem-fraction-static 0.8
    --router-policy cache_aware # a turn goes to the engine that has the turns before it
)

MISC_ARGS=(
    --rotary-base 5000000 # of this checkpoint, where the model's flags have 1000000
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
)

launch train_async "${PLACEMENT_ARGS[@]}" "${REEF_ARGS[@]}" "${MODEL_ARGS[@]}" "${AGENT_ARGS[@]}" "${CKPT_ARGS[@]}" \
    "${ROLLOUT_ARGS[@]}" "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" \
    "${WANDB_ARGS[@]}" "$@"
