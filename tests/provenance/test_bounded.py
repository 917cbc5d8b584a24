"""What a long run ends with is counted in memory of a fixed size, and exactly where it claims to be exact."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from scripts import measure_long_run as long_run
from slime_backend.report import bounded, hit_rate
from slime_backend.report import run_data as run_files
from slime_backend.report.bounded import Median, ReceiptCounts, Thinned
from slime_backend.report.run_data import read_run
from slime_backend.report.summary import summarise
from slime_backend.report.write import compose


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100, 1001])
def test_thinned_items_are_evenly_spaced_and_have_both_ends(count):
    kept = Thinned(8)
    for item in range(count):
        kept.add(item)
    found = kept.all()
    assert kept.seen == count
    assert len(found) <= 9
    assert found == sorted(set(found))
    if count:
        assert (found[0], found[-1]) == (0, count - 1)
        assert {b - a for a, b in itertools.pairwise(found[:-1])} <= {kept.stride}
    if count <= 8:
        assert found == list(range(count))


def test_a_median_is_exact_up_to_its_room_and_near_above(monkeypatch):
    rng = random.Random(1)
    values = [rng.random() for _ in range(999)]
    median = Median()
    assert median.value is None
    for value in values:
        median.add(value)
    assert median.value == sorted(values)[499]
    monkeypatch.setattr(bounded, "MEDIAN_OF", 1000)
    many = Median()
    for _ in range(50_000):
        many.add(rng.random())
    assert many.value == pytest.approx(0.5, abs=0.06)
    assert len(many._values) == 1000


def test_lost_and_doubled_receipts_are_counted_exactly(monkeypatch):
    monkeypatch.setattr(bounded, "IN_MEMORY", 64)  # parts go to the disk
    with ReceiptCounts() as counts:
        for number in range(3000):
            counts.submitted(f"r{number}")
        for number in [*range(5, 3000), 7, 7, 2999]:
            counts.completed(f"r{number}")
        counts.completed("never sent")
        assert counts.lost_and_doubled() == (5, 3)
        assert (counts.sent, counts.back) == (3000, 2999)


def test_the_figures_of_a_made_run(tmp_path):
    long_run.make_run(tmp_path, 30, 300)
    with (tmp_path / "submitted.jsonl").open("a") as file:
        file.write('{"receipt": "lost"}\n')
    found = summarise(tmp_path)
    assert (found["publications"], found["steps"], found["rollouts_completed"]) == (30, 30, 300)
    assert (found["rollouts_submitted"], found["rollouts_lost"], found["rollouts_doubled"]) == (301, 1, 0)
    assert (found["reward_first3"], found["reward_last3"]) == (pytest.approx(0.1), pytest.approx(0.8))
    assert found["requests_retracted"] == 30 * 2 * 3
    assert found["flushes_verified"] == 60
    assert found["rollouts_retracted"] == found["rollouts_mixed"] == 100


def peak_mib(work, *args):
    tracemalloc.start()
    try:
        work(*args)
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run and one of ten times its length."""
    made = []
    for publications in (60, 600):
        made.append(tmp_path_factory.mktemp("long") / str(publications))
        long_run.make_run(made[-1], publications, 10 * publications)
    return made


def hold_all(run_dir: Path):
    """The control: what the summary did before it went row by row."""
    from slime_backend.ledger.files import read_rollouts
    from slime_backend.provenance.records import RolloutRecord

    return [RolloutRecord.from_json(row) for row in read_rollouts(run_dir)]


def test_memory_does_not_grow_with_the_run(runs, monkeypatch):
    monkeypatch.setattr(run_files, "DRAWN_STEPS", 40)
    monkeypatch.setattr(run_files, "DRAWN_PUBLICATIONS", 40)
    monkeypatch.setattr(hit_rate, "VERSIONS", 40)
    summarise(runs[0])  # imports and caches
    read_run(runs[0])
    for work in (summarise, read_run):
        short, long = (peak_mib(work, run) for run in runs)
        assert long < short + 3, (work.__name__, short, long)
    short, long = (peak_mib(hold_all, run) for run in runs)
    assert long > short + 6, (short, long)


def test_the_page_of_a_long_run_is_bounded_and_names_what_it_draws(runs, monkeypatch):
    monkeypatch.setattr(run_files, "DRAWN_STEPS", 40)
    monkeypatch.setattr(run_files, "DRAWN_PUBLICATIONS", 40)
    monkeypatch.setattr(hit_rate, "VERSIONS", 40)
    short, long = (compose(read_run(run), "") for run in runs)
    assert len(long) < 1.5 * len(short)
    run = read_run(runs[1])
    assert (run.publication_count, run.step_count) == (600, 600)
    assert len(run.publications) <= 40 + 2 + 17
    assert len(run.steps) <= 41
    assert f"drawn are {len(run.steps)} of 600 steps and {len(run.publications)} of 600 publications" in long
    lost = [p["version"] for p in run.publications if not all(e["confirmed"] for e in p["engines"])]
    assert lost == ["v250", "v500"]  # every engine that was lost is drawn
    assert "engine1 was retired at v250" in long


@pytest.mark.soak
def test_memory_of_a_hundred_thousand_publications_and_a_million_rollouts():
    script = Path(long_run.__file__)
    done = subprocess.run([sys.executable, script, "100000", "1000000"], check=True, capture_output=True, text=True)
    tenth, full = (json.loads(line.split("rollouts: ")[1]) for line in done.stdout.splitlines())
    assert full["peak_mib"] < tenth["peak_mib"] + 150, done.stdout
