"""`reef-slime bench modes` from end to end on fake engines: what is sent, counted, judged and kept. Their times mean
nothing, so none is asserted; what a mode prefills is the fakes' own count, as a real engine's is."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from slime_backend.bench import catalog, modes, pages
from slime_backend.bench.mode_load import ModeLoad, Try, requests
from slime_backend.bench.mode_slices import PublicationTiming, run_slice, summarise
from slime_backend.engine_client import EngineClient
from slime_backend.planner import measured as measured_file
from slime_backend.planner.from_bench import speeds_of
from slime_backend.planner.measured import EngineSpeeds, MeasurementError, ModeResults, Shape, Slice
from slime_backend.planner.work import MODES
from slime_backend.simulation.fake_engine import FakeEngine
from slime_backend.simulation.fake_scheduler import FakeRank
from tests.waiting import until

SHAPE = Shape(prompt=40, group=4, answers=(4, 8, 60), in_flight=8, chunk=64)
INTERVAL_S = 0.15  # in which the fakes decode some 60 tokens
BENCH = next(bench for bench in catalog.BENCHES if bench.name == "modes")


@asynccontextmanager
async def engine(*, radix_cache: bool = True, **settings: Any):
    async with FakeEngine(radix_cache=radix_cache, **settings) as fake, EngineClient(fake.url) as client:
        yield fake, client


@pytest.fixture
def checkpoints(tmp_path):
    """Directories that pass for checkpoints."""
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return folders


async def one_slice(client, mode, checkpoints, **changes) -> Slice:
    settings = {"interval_s": INTERVAL_S, "seed": 0, "number": 1, "warm": 1, "counted": 3, **changes}
    return await run_slice(client, mode, SHAPE, checkpoints=checkpoints, **settings)


@pytest.mark.parametrize("mode", MODES)
def test_a_slice_of_each_mode(run_async, checkpoints, mode):
    async def work():
        async with engine(radix_cache=mode != "off") as (fake, client):
            return await one_slice(client, mode, checkpoints), fake

    found, fake = run_async(work())
    assert found.mode == mode
    assert found.publications == 3
    assert found.finished > 0
    assert found.tokens >= 4 * found.finished
    assert found.prefilled > 0
    assert (found.thrown_away > 0) == (mode == "drop")
    assert (found.lag_mean > 0) == (mode != "drop")
    assert (found.mixed_share > 0) == (mode != "drop")
    assert not fake.paused
    assert not any(rank.requests for rank in fake.ranks)
    # By the policy: no other call, and slime's sequence flushes while ours verifies.
    assert fake.loaded in ("a", "b")
    flushes = fake.calls.count("/flush_cache")
    assert flushes == 1 if mode in ("off", "scoped") else flushes > found.publications


@pytest.mark.parametrize("mode", ["requeue", "scoped"])
def test_every_token_that_the_engine_sampled_between_two_publications_is_counted_once(
    run_async, checkpoints, mode, monkeypatch
):
    """Against the fakes' own count of decode steps, in whose every one each request in flight samples a token."""
    steps: dict[str, int] = {}
    step = FakeRank.step

    def counted(rank: FakeRank, label: str, loaded: str) -> None:
        steps[label] = steps.get(label, 0) + len(rank.requests)
        step(rank, label, loaded)

    monkeypatch.setattr(FakeRank, "step", counted)

    async def work():
        async with engine(radix_cache=mode != "off") as (_, client):
            return await one_slice(client, mode, checkpoints)

    assert run_async(work()).tokens == sum(steps[f"1.{number}"] for number in (1, 2, 3))


def test_every_mode_gets_the_same_requests():
    first, second = (list(islice(requests(SHAPE, 3), 40)) for _ in range(2))
    assert [(r.prompt, r.answer) for r in first] == [(r.prompt, r.answer) for r in second]
    assert first[0].prompt == first[3].prompt != first[4].prompt
    assert {r.answer for r in first} == set(SHAPE.answers)
    assert [r.answer for r in islice(requests(SHAPE, 4), 40)] != [r.answer for r in first]


@pytest.mark.parametrize("keep_tokens", [True, False])
def test_what_an_abort_ends_goes_on_or_is_thrown_away(run_async, keep_tokens):
    shape = replace(SHAPE, answers=(50,), in_flight=2)

    async def work():
        async with engine() as (fake, client):
            await client.label("1.0")
            async with ModeLoad(client, shape, 0, keep_tokens) as load:
                (rank,) = fake.ranks
                await until(lambda: sum(bool(request.sampled) for request in rank.requests) == 2, "both decode")
                await client.label("1.1")
                await client.abort_all()
                await until(lambda: sum(t.finished for t in load.tries) >= 2, "two have ended")
            return load.tries, fake.bodies

    tries, bodies = run_async(work())
    again = bodies[2:4]
    finished = next(t for t in tries if t.finished)
    assert sum(tokens for _, tokens in finished.request_sampled) == 50
    if keep_tokens:
        assert all(len(body["input_ids"]) > shape.prompt for body in again)
        for body in again:
            assert len(body["input_ids"]) + body["sampling_params"]["max_new_tokens"] == shape.prompt + 50
        assert [number for number, _ in finished.request_sampled] == [0, 1]
    else:
        assert all(len(body["input_ids"]) == shape.prompt for body in again)
        assert finished.request_sampled == ((1, 50),)


def test_only_what_was_done_between_the_first_and_the_last_publication_counts():
    stops = [
        PublicationTiming(1.0, 5.0),
        PublicationTiming(3.0, 7.0),
        PublicationTiming(5.5, 9.0),
    ]  # counted: what was done after the second, before the third
    tries = [
        Try(True, ((0, 40), (1, 2)), ((0, 10),), ((0, 40), (1, 2))),  # ended before it
        Try(True, ((1, 20), (2, 30)), ((1, 10), (2, 7)), ((1, 20), (2, 30))),
        Try(False, ((2, 5),), ((2, 9),)),
        Try(True, ((2, 10),), ((2, 4),), ((2, 10),)),
        Try(True, ((2, 3), (3, 4)), (), ((2, 3), (3, 4))),  # ended behind it
    ]
    found = summarise("scoped", 2.0, 0, 2, tries, stops)
    assert found == Slice("scoped", 2.0, 0, 2.5, 1, 2, 48, 0, 20, 20 / 60, 0.5, 9.0)
    assert found.tokens_per_s == 48 / 2.5
    assert found.prefilled_per_token == 20 / 48
    dropping = summarise("drop", 2.0, 0, 2, tries, stops)
    assert (dropping.tokens, dropping.thrown_away, dropping.prefilled) == (43, 5, 20)


# ---- the complete bench, its page and its rows ----------------------------------------------------------------------


def measured(run_async, checkpoints, interval_s) -> ModeResults:
    results = ModeResults(SHAPE, {"layers": 1})

    async def work():
        async with engine() as (_, sharing), engine(radix_cache=False) as (_, off):
            await modes.measure(
                sharing,
                off,
                results,
                checkpoints,
                lambda text: None,
                interval_s,
                2,
                warm_s=interval_s,
                slice_s=3 * interval_s,
            )

    run_async(work(), 120)
    return results


def keep_run(folder, results: ModeResults, part: str) -> None:
    rows = modes.interval_rows(results, results.intervals()[0])
    pages.write(folder, BENCH, pages.Clock().run(BENCH, part, rows, results.to_json()))


def test_every_slice_is_kept_with_the_page(run_async, checkpoints, tmp_path):
    results = measured(run_async, checkpoints, interval_s=0.05)
    assert [len(results.of(mode, 0.05)) for mode in MODES] == [2, 2, 2, 2, 4]
    assert {s.seed for s in results.slices} == {0, 1}
    keep_run(tmp_path, results, "every-6-s")
    read = measured_file.read(tmp_path / "modes.json")
    assert read == results
    assert read.shape.traffic(0.05).in_flight == SHAPE.in_flight
    assert speeds_of(read).standstill_s > 0
    assert len(read.speeds) == len(read.slices)
    assert pages.read(tmp_path, BENCH)[0].details == json.loads(json.dumps(results.to_json()))


def test_the_parts_of_a_page_are_read_together_unless_they_differ(tmp_path):
    first, other = made(**USUAL), made(**USUAL)
    other.slices = [replace(s, interval_s=4.0) for s in other.slices]
    keep_run(tmp_path, first, "every-6-s")
    keep_run(tmp_path, other, "every-4-s")
    read = measured_file.read(tmp_path / "modes.json")
    assert read.intervals() == [2.0, 4.0]
    assert len(read.speeds) == 4
    other.model = {"layers": 7}
    keep_run(tmp_path, other, "every-4-s")
    with pytest.raises(MeasurementError, match="different traffic or models; measure them again"):
        measured_file.read(tmp_path / "modes.json")


@pytest.mark.parametrize("text", ["", "[1]", '{"runs": [{"details": {"shape": {}}}]}'])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    path = tmp_path / "modes.json"
    path.write_text(text)
    with pytest.raises(MeasurementError, match="not what `reef-slime bench modes --write` writes"):
        measured_file.read(path)


def made(**by_mode: tuple[float, float]) -> ModeResults:
    """Results of two rounds; mode -> (tokens per second, prefilled tokens) of each of its slices."""
    results = ModeResults(SHAPE, {}, speeds=[EngineSpeeds(2000, 800, 5)] * 2)
    for seed in range(2):
        for mode in [*MODES, "scoped"]:
            rate, prefilled = by_mode[mode]
            results.slices.append(
                Slice(mode, 2.0, seed, 10.0, 5, 10, int(rate * 10), 0, int(prefilled), 0.5, 0.5, 20.0)
            )
    return results


USUAL = {"drop": (10, 900), "requeue": (50, 900), "retract": (70, 900), "off": (80, 900), "scoped": (100, 100)}


def test_a_loss_in_every_round_is_no_noise_and_one_that_counts_is_none_in_any():
    peer, ours = made(**USUAL).of("off", 2.0), made(**USUAL).of("scoped", 2.0)[::2]
    level = [replace(s, tokens=800 * 100) for s in peer]
    assert modes.throughput_row("off", "", level, [replace(s, tokens=799 * 100) for s in ours]).holds is False
    wandering = [replace(ours[0], tokens=810 * 100), replace(ours[1], tokens=780 * 100)]
    assert modes.throughput_row("off", "", level, wandering).holds is True
    lost = [replace(ours[0], tokens=810 * 100), replace(ours[1], tokens=600 * 100)]
    assert modes.throughput_row("off", "", level, lost).holds is False


def test_the_control_fails_where_noise_could_hide_a_loss():
    slices = made(**USUAL).of("scoped", 2.0)
    assert modes.control_row("", slices[::2], slices[1::2]).holds
    slower = [replace(s, tokens=900) for s in slices[1::2]]
    assert not modes.control_row("", slices[::2], slower).holds


def test_the_goals_and_which_of_them_a_faster_mode_misses():
    rows = modes.interval_rows(made(**USUAL), 2.0)
    assert all(row.holds for row in rows)
    first = next(row for row in rows if "scoped beside off" in row.case)
    assert (first.peer, first.ours, first.ratio) == (80.0, 100.0, 1.25)
    faster = modes.interval_rows(made(**{**USUAL, "retract": (110, 900)}), 2.0)
    assert [row.case.partition(";")[0] for row in faster if not row.holds] == [
        "tokens per second, a publication every 2 s: scoped beside retract"
    ]
    assert all(len(pages.plots.points(plot, rows)) == 1 for plot in modes.PLOTS)
