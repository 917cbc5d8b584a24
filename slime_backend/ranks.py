"""The processes of an engine that compute with its model, as their schedulers report them: each data-parallel rank, and
each tensor rank behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slime_backend.wire import SchedulerReport


def named_ranks(reports: Sequence[SchedulerReport]) -> Iterator[tuple[str, SchedulerReport]]:
    """Every rank that reports, with its name in a reason."""
    for number, report in enumerate(reports):
        for rank in report.ranks:
            yield rank_name(number, report, rank), rank


def rank_name(number: int, report: SchedulerReport, rank: SchedulerReport) -> str:
    return f"rank {number}" + (f", tensor rank {rank.tensor_rank}" if report.tensor_size > 1 else "")


def why_ranks_missing(reports: Sequence[SchedulerReport]) -> list[str]:
    """Every tensor rank that left no report, and why."""
    reasons = []
    for number, report in enumerate(reports):
        reasons += [f"rank {number}, tensor rank {rank}: {why}" for rank, why in report.missing_ranks.items()]
        if not report.missing_ranks and len(report.ranks) != report.tensor_size:
            reasons.append(f"rank {number}: {len(report.ranks)} of {report.tensor_size} tensor ranks report")
    return reasons
