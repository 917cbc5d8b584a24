"""`start_facts` reads a run's facts from slime's parsed arguments before it starts."""

from __future__ import annotations

from typing import Any

from slime_backend.planner.at_start import StartFacts, installed_sglang
from slime_backend.planner.traffic import CHUNK, Traffic, answers_around

# This rollout function has nothing in flight when weights are published: slime's loops wait for it. For another one it
# isn't known; as much as the engines take is assumed.
WAITED_FOR = "slime.rollout.sglang_rollout.generate_rollout"
PROMPT = 512  # tokens, without --rollout-max-prompt-len
FULL = 0.5  # the mean of answers and prompts over the longest that the flags allow
SPREAD = 0.6
SGLANG = "sglang_"  # slime's prefix of SGLang's names


def start_facts(args: Any) -> StartFacts:
    """Return the facts of slime's `args`, complete or in part; missing ones count as unknown."""
    engines = max(1, int(_get(args, "rollout_num_gpus") or 1) // int(_get(args, "rollout_num_gpus_per_engine") or 1))
    group = int(_get(args, "n_samples_per_prompt") or 1)
    requests = int(_get(args, "rollout_batch_size") or 1) * group / engines
    waited_for = _get(args, "rollout_function_path") in (None, WAITED_FOR)
    in_flight = 0 if waited_for else int(_get(args, "sglang_server_concurrency") or 512)
    elsewhere = ""
    if _get(args, "rollout_external_engine_addrs"):
        elsewhere = "engines were started by somebody else (--rollout-external-engine-addrs)"
    elif _get(args, "sglang_config"):
        elsewhere = "--sglang-config may give an engine other settings"
    info = {key.removeprefix(SGLANG): value for key, value in vars(args).items() if key.startswith(SGLANG)}
    traffic, assumed = None, ""
    if longest := _get(args, "rollout_max_response_len"):
        prompt = FULL * int(_get(args, "rollout_max_prompt_len") or PROMPT / FULL)
        answer = max(1.0, FULL * int(longest))
        assumed = f"assumed: {in_flight} in flight per engine, prompts of {prompt:.0f} tokens, answers of {answer:.0f}"
        traffic = Traffic(
            prompt=prompt,
            shared=0,
            group=max(1.0, group / engines),
            answers=answers_around(answer, SPREAD),
            in_flight=in_flight,
            period_s=1.0,
            chunk=int(info.get("chunked_prefill_size") or CHUNK),
        )
    return StartFacts(
        layout="colocated" if _get(args, "colocate") else "disjoint",
        traffic=traffic,
        requests=requests,
        sglang=installed_sglang(),
        engine_info=info,
        disable_radix_cache=(_get(args, "sglang_overrides") or {}).get("disable_radix_cache"),
        engines_elsewhere=elsewhere,
        assumed=assumed,
    )


def _get(args: Any, name: str) -> Any:
    return getattr(args, name, None)
