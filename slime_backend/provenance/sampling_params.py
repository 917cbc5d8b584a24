"""What a request's sampling parameters make of the log-probs that SGLang returns. Pure.

    returned log-prob = log_softmax(logits / temperature), of the logits after everything that changes them

An audit or a trainer that has the weights alone can compute log_softmax(logits / temperature) of the plain logits. So

    temperature                    is recomputed: the logits are divided by the record's
    greedy (temperature 0, top_k 1)  SGLang returns log-probs at temperature 1: auditable, but no sample of them: an
                                   importance weight has nothing to be the ratio to
    top_p, top_k, min_p            cut the distribution after the log-probs were taken: auditable. The ratio of a token
                                   is that of the two distributions before the cut
    penalties, biases, grammars    change the logits first: another distribution than the weights' own

Source: SGLang 0.5.23, layers/sampler.py:158-330 (log-probs), sampling/sampling_batch_info.py (what changes the logits),
sampling/sampling_params.py:215 (greedy).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GREEDY_BELOW = 1e-6  # SGLang's _SAMPLING_EPS
WHOLE_VOCABULARY = (-1, 0, 1 << 30)  # values of top_k

# Parameter -> the value at which it does nothing, besides None and what is empty.
_CHANGE_LOGITS: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_new_tokens": 0,
    "logit_bias": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "custom_logit_processor": None,
    "watermark": None,
    "beam_width": 1,
}


def transforming(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of `sampling` (SGLang's names) under which a token's probability isn't softmax(logits /
    temperature): those that change the logits, and those that cut the distribution."""
    found = {name: sampling[name] for name, neutral in _CHANGE_LOGITS.items() if _acts(sampling.get(name), neutral)}
    if _acts(sampling.get("top_p"), 1):
        found["top_p"] = sampling["top_p"]
    if sampling.get("top_k") is not None and sampling["top_k"] not in WHOLE_VOCABULARY:
        found["top_k"] = sampling["top_k"]
    if _acts(sampling.get("min_p"), 0):
        found["min_p"] = sampling["min_p"]
    return found


def scored_temperature(temperature: float) -> float:
    """The temperature that the returned log-probs are at."""
    return temperature if temperature >= GREEDY_BELOW else 1.0


def not_auditable(sampling: Mapping[str, Any]) -> str:
    """Names of the parameters that make the log-probs those of another distribution than the weights'; "" for none."""
    return ", ".join(name for name, neutral in _CHANGE_LOGITS.items() if _acts(sampling.get(name), neutral))


def not_trainable(temperature: float, sampling: Mapping[str, Any]) -> str:
    """Why tokens sampled so have no importance weight; "" where they have one."""
    if temperature < GREEDY_BELOW or sampling.get("top_k") == 1:
        return "greedy"
    return not_auditable(sampling)


def _acts(value: Any, neutral: Any) -> bool:
    return value is not None and value not in ("", {}, []) and value != neutral
