"""What a request carries that no field of ours has: ignored where that changes no answer, refused by name otherwise."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from reef_service.errors import bad_request

# They are about bookkeeping, caching or billing at a provider: the answer is the same with and without them.
HARMLESS = frozenset(
    {
        "betas",
        "cache_control",
        "client_metadata",
        "context_management",
        "inference_geo",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
# Settings at which a parameter that isn't supported asks for what happens anyway.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "modalities": (["text"],),
    "add_generation_prompt": (True,),
    "truncation": ("disabled",),
}
_ASK_FOR_IT = {"modalities", "add_generation_prompt", "truncation"}  # false, [] are no default
REFUSED: Mapping[str, str] = {
    "continue_final_message": "an answer begins a message of its own",
    "add_generation_prompt": "an answer begins a message of its own",
    "modalities": "this gateway takes and gives text only",
    "audio": "this gateway takes text only",
    "web_search_options": "only the client's own tools work here",
    "prediction": "an answer is sampled, not predicted",
}


def check(extra: Mapping[str, Any] | None, refused: Mapping[str, str], known: Iterable[str]) -> None:
    """Raise ApiError 400 for the first parameter that would change the answer and isn't supported.

    `refused`: why, by name, in addition to what no API has; `known`: the names of the API's own fields.
    """
    why = {**REFUSED, **refused}
    for name, value in (extra or {}).items():
        if value is None or name in HARMLESS:
            continue
        if name not in why:
            close = difflib.get_close_matches(name, [*known, *why], n=1)
            hint = f"did you mean {close[0]!r}?" if close else "leave it out"
            raise bad_request(f"there is no parameter {name[:60]!r} here; {hint}", name[:60])
        if value in _NEUTRAL.get(name, ()):
            continue
        if name in _ASK_FOR_IT or value not in (False, 0, "", [], {}):
            raise bad_request(f"{name} is not supported: {why[name]}", name)


def check_last(messages: list[dict[str, Any]]) -> None:
    """Raise ApiError 400 for a trailing assistant message, which other servers go on with and no template here can."""
    if messages[-1]["role"] == "assistant":
        raise bad_request(
            "the last message is the assistant's; an answer can't go on inside of a message: end with a user's or a "
            "tool's",
            "messages",
        )
