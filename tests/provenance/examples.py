"""The rollouts that docs/provenance.md draws: one of each class, and a second way to be `recomputed` and `carried`.

24 prompt tokens, 40 output tokens; a publication of v1 after output token 15. Shapes as a real engine reports them
(tests/engine_plugin/test_trace.py); tokens and log-probs stand for nothing.
"""

from __future__ import annotations

from slime_backend.provenance.records import RolloutRecord
from slime_backend.wire import KvSegment, Prefill, Span

PROMPT, OUTPUT, AT = 24, 40, 15
END = PROMPT + OUTPUT - 1
BOUNDARY = PROMPT + AT - 1

FIRST = Prefill(0, 3, "v0", 16, PROMPT)
OLD = KvSegment(0, AT, "v0", (Span("v0", 0, BOUNDARY),))

SEGMENTS: dict[str, tuple[KvSegment, ...]] = {
    "pure": (KvSegment(0, OUTPUT, "v0", (Span("v0", 0, END),)),),
    # Retracted before its first token was sampled: the prompt was computed twice.
    "recomputed": (KvSegment(0, OUTPUT, "v1", (Span("v1", 0, END),)),),
    # Retracted in the middle: v1 computed everything again and went on.
    "mixed": (OLD, KvSegment(AT, OUTPUT, "v1", (Span("v1", 0, END),))),
    # In place or scoped: the KV of v0 was kept.
    "carried": (OLD, KvSegment(AT, OUTPUT, "v1", (Span("v0", 0, BOUNDARY), Span("v1", BOUNDARY, END)))),
    # Paused in the middle of a chunked prefill: one version sampled everything, part of the prompt is older.
    "carried, unmixed": (KvSegment(0, OUTPUT, "v1", (Span("v0", 0, 16), Span("v1", 16, END))),),
}
PREFILLS = {
    "recomputed": (FIRST, Prefill(1, 0, "v1", 0, PROMPT)),
    "mixed": (FIRST, Prefill(1, 0, "v1", 0, PROMPT + AT)),
}


def example(name: str) -> RolloutRecord:
    segments = SEGMENTS[name]
    return RolloutRecord(
        receipt=f"{name.replace(', ', '-')}-0001",
        group="g00001",
        engine="engine0",
        question="q",
        prompt_ids=tuple(range(PROMPT)),
        output_ids=tuple(range(OUTPUT)),
        logprobs=(-1.0,) * OUTPUT,
        temperature=1.0,
        reward=0.5,
        finish_reason="length",
        spans=tuple(Span(s.version, s.start, s.end) for s in segments),
        segments=segments,
        prefills=PREFILLS.get(name, (FIRST,)),
        submitted_at=0.0,
        finished_at=1.0,
        session="g00001",
    )
