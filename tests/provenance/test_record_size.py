"""How large a record is without tokens, by the publications that its rollout lived through, and that it stays whole."""

from __future__ import annotations

import dataclasses
import json

import pytest

from slime_backend.engine_plugin.trace import Admission, RequestTrace
from slime_backend.ledger.files import read_rollouts
from slime_backend.ledger.index import Entry
from slime_backend.ledger.writer import Ledger
from slime_backend.provenance.errors import RecordError
from slime_backend.provenance.kv_contexts import restore, shorten
from slime_backend.provenance.records import RolloutRecord
from slime_backend.simulation.made_rollouts import made
from slime_backend.wire import Span
from tests.provenance.examples import SEGMENTS, example

PROMPT, EACH = 1200, 64  # output tokens between two publications
LIMIT = 2048
KEPT, TAKEN = "in_place", "retract"


def crossing(publications: int, mode: str) -> RolloutRecord:
    """A rollout without tokens and with the spans that the engine's own record gives it."""
    trace = RequestTrace(prompt_length=PROMPT)
    trace.admit(Admission(0, 17, 1184, PROMPT), sampled=0)
    for epoch in range(publications):
        sampled = EACH * (epoch + 1)
        trace.publish(epoch, PROMPT + sampled - 1 if mode == KEPT else None, sampled)
        if mode == TAKEN:
            trace.admit(Admission(epoch + 1, 3, 0, PROMPT + sampled), sampled)

    def label(epoch: int) -> str:
        return f"v{1000 + epoch}"

    segments = tuple(trace.kv_segments(publications, EACH * (publications + 1), label))
    assert len(segments) == publications + 1
    return dataclasses.replace(
        made(3),
        segments=segments,
        spans=tuple(Span(s.version, s.start, s.end) for s in segments),
        prefills=tuple(trace.prefills(label)),
        question="x" * 80,
    )


def stored_size(record: RolloutRecord, run_dir) -> int:
    with Ledger(run_dir) as ledger:
        ledger.append(record)
    return (run_dir / "rollouts.jsonl").stat().st_size


@pytest.mark.parametrize(("mode", "most"), [(KEPT, 9), (TAKEN, 6)])
def test_a_record_without_tokens_is_under_two_kib(tmp_path, mode, most):
    """The figures of docs/benchmarks/ledger.md, and where they end."""
    sizes = {n: stored_size(crossing(n, mode), tmp_path / str(n)) for n in (0, 1, 3, most, most + 2)}
    print(mode, sizes)
    assert sizes[most] < LIMIT < sizes[most + 2]
    with_tokens = dataclasses.replace(crossing(0, mode), prompt_ids=(262,) * PROMPT)
    assert stored_size(with_tokens, tmp_path / "tokens") > LIMIT, "the measure can fail"


def test_it_grows_with_the_publications_and_not_with_their_square(tmp_path):
    sizes = [stored_size(crossing(n, KEPT), tmp_path / str(n)) for n in (20, 40, 60)]
    assert abs((sizes[2] - sizes[1]) - (sizes[1] - sizes[0])) < 100
    whole = [len(json.dumps([s.to_json() for s in crossing(n, KEPT).segments])) for n in (20, 40, 60)]
    assert whole[2] - whole[1] > 1.5 * (whole[1] - whole[0]), "written out whole they would"


RECORDS = [*(example(name) for name in SEGMENTS), *(crossing(n, mode) for n in (1, 5, 30) for mode in (KEPT, TAKEN))]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: f"{r.rollout_class}-{len(r.segments)}")
def test_what_is_shortened_is_read_back_whole_and_so_is_a_line_of_an_older_ledger(record):
    short = json.loads(json.dumps(record.to_json()))
    older = {**short, "segments": json.loads(json.dumps([s.to_json() for s in record.segments]))}
    assert restore(short["segments"]) == older["segments"]
    for line in (short, older):
        assert RolloutRecord.from_json(line) == record
        assert Entry.of(line).rollout_class == record.rollout_class


def test_an_older_ledger_goes_on_and_becomes_parquet(tmp_path):
    """Lines with whole contexts, then shortened ones, in one segment; its rows are whole."""
    old, new = RECORDS[: len(RECORDS) // 2], RECORDS[len(RECORDS) // 2 :]
    lines = [{**r.to_json(), "segments": [s.to_json() for s in r.segments]} for r in old]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Ledger(tmp_path) as ledger:
        for record in new:
            ledger.append(record)
        ledger.segment_bytes = 1
        ledger.append(made(1))
    assert (tmp_path / "rollouts" / "000000.parquet").exists()
    rows = list(read_rollouts(tmp_path))[:-1]
    assert [RolloutRecord.from_json(row) for row in rows] == RECORDS
    assert [row["segments"] for row in rows] == [
        json.loads(json.dumps([s.to_json() for s in r.segments])) for r in RECORDS
    ]


def test_a_damaged_line_is_one_clear_error():
    short = shorten(crossing(3, KEPT).segments)
    with pytest.raises(RecordError, match="keeps 3 spans of 0"):
        restore(short[3:])
