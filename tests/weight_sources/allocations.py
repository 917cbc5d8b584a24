"""How many bytes of tensors a piece of code holds at most, counted by torch's own CPU allocator."""

from __future__ import annotations

from typing import Any

import torch


class Allocations:
    """with Allocations() as seen: ...          then seen.peak_bytes

    Every allocation and release of this thread, from torch's profiler; what was allocated before counts for nothing, so
    releasing it counts as less than nothing.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._profile = torch.autograd.profiler.profile(profile_memory=True)

    def __enter__(self) -> Allocations:
        self._profile.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._profile.__exit__(*exception)
        results: Any = self._profile.kineto_results  # torch's types leave out what it reports of memory
        events = [e for e in results.events() if e.name() == "[memory]"]
        held = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            held += event.nbytes()
            self.peak_bytes = max(self.peak_bytes, held)
