"""JSON that a model wrote or a client handed back: of any depth, with halves of characters in it."""

from __future__ import annotations

import json
from typing import Any

MOST_DEPTH = 64


def loads(text: str) -> Any:
    """Raises ValueError also for what is too deep to be worked on, and for what no text can be written from."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if _too_deep(value):
        raise ValueError(f"nested more than {MOST_DEPTH} deep")
    return value


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for held in level
            if isinstance(held, dict | list)
            for inner in (held.values() if isinstance(held, dict) else held)
        ]
        if not level:
            return False
    return True
