"""Engines with the hook `scope`: both trees, both tree cores, both page sizes, with and without overlap.

Every engine runs under SGLang's strict memory checks, which end the scheduler on the first leaked or doubled slot.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from slime_backend.engine_process import DEFAULT_HOOKS
from tests.engine_plugin.checks import TOLERANCE, logprobs
from tests.engine_plugin.engine_api import Api
from tests.engine_plugin.tiny_models import Reference

HOOKS = (*DEFAULT_HOOKS, "scope")
RUNNING = 6  # --max-running-requests: further ones wait in the scheduler
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}


@dataclass(frozen=True)
class Kind:
    hybrid: bool
    core: str
    page: int
    overlap: bool
    tensor_ranks: int = 1

    def __str__(self) -> str:
        model, schedule = "hybrid" if self.hybrid else "dense", "overlap" if self.overlap else "plain"
        return f"{model}-{self.core}-page{self.page}-{schedule}" + (f"-tp{self.tensor_ranks}" * (self.tensor_ranks > 1))


DENSE = Kind(False, "rust", 1, False)
KINDS = [Kind(True, "rust", 16, True)]
if os.environ.get("REEF_ALL_KINDS"):  # an engine each; for a release
    KINDS += [DENSE, Kind(False, "python", 16, True), Kind(True, "python", 1, False)]
    KINDS += [Kind(True, "rust", 16, True, tensor_ranks=2)]


@dataclass(frozen=True)
class Scoped:
    """A running engine, the checkpoints it may load, and what answers are compared with."""

    kind: Kind
    api: Api
    paths: dict[str, str]
    reference: Reference

    def publish(self, version: str, name: str | None = None) -> None:
        self.api.publish(self.paths[version], name or version, "in_place")

    def whole(self, length: int) -> int:
        """Tokens of a prompt that a later request can reuse: all but the last, in whole pages."""
        return (length - 1) // self.kind.page * self.kind.page

    def check_first_and_second(self, ids: list[int], version: str, **options: Any) -> None:
        """The first computes everything, the second shares, both greedy by `version` alone."""
        for cached in (0, self.whole(len(ids))):
            answer = self.api.generate(ids, 8, sampling={"temperature": 0.0}, **options)
            assert answer["meta_info"]["cached_tokens"] == cached
            assert [p["cached"] for p in answer["meta_info"]["prefills"]] == [cached]
            rows = self.reference.rows(version, ids + answer["output_ids"])[len(ids) - 1 :]
            assert answer["output_ids"] == rows.argmax(-1).tolist()
            expected = rows.max(-1).values.tolist()
            assert max(abs(a - b) for a, b in zip(logprobs(answer), expected, strict=True)) < TOLERANCE

    def check_nothing_is_left(self) -> None:
        """Once its last request has ended, an engine keeps nothing of an older epoch, and has lost no slot."""
        self.api.until(lambda report: report.kv.is_empty, "empty")
