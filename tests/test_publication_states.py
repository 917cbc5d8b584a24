"""The transaction as a state machine: random faults, deaths, restarts, killed controllers and rival publishers.

Against fake engines over HTTP. What must hold after every step: no living engine is left paused, every routable engine
really has the fleet's weights and its label unless it restarted and nobody has looked since, each answer was sampled
under the weights that it names, which were the fleet's at some moment since it was asked for, and each request comes
back exactly once. `REEF_STATE_STEPS` sets how many steps are tried (120 by default, 20,000 for a release).
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from slime_backend.engine_client import Deadlines, EngineClient, EngineError, EngineUnreachable
from slime_backend.fleet import Fleet, FleetError, admit
from slime_backend.fleet.dispatch import RequestLost, Sent, generate
from slime_backend.policy import decide
from slime_backend.publication import Publication, PublicationError, publish
from slime_backend.simulation.fake_engine import FakeEngine
from slime_backend.simulation.transport import NameTransport
from slime_backend.wire import REPORTS_PATH

STEPS = int(os.environ.get("REEF_STATE_STEPS", "120"))
STEPS_EACH = 40
DEADLINES = Deadlines(pause=1.0, flush=1.0, load=1.0, control=1.0, generate=30.0)
ENGINES = 3
PATHS = (
    "/pause_generation",
    "/flush_cache",
    "/update_weights_from_disk",
    "/update_weight_version",
    "/continue_generation",
    REPORTS_PATH,
    "/model_info",
)
KINDS = ("refuse", "drop_before", "drop_after", "hang_before", "hang_after", "die")
FAULT_LISTS = st.lists(
    st.tuples(
        st.integers(0, ENGINES - 1),
        st.sampled_from(PATHS),
        st.sampled_from(KINDS),
        st.integers(min_value=1, max_value=2),
    ),
    max_size=3,
)


class MortalClient(EngineClient):
    """A client whose controller can be killed: from then on no call leaves the process."""

    killed = False

    async def call(self, method, path, **kwargs):
        if self.killed:
            raise EngineUnreachable(self.name, path, "the controller is dead")
        answer = await super().call(method, path, **kwargs)
        if self.killed:
            raise EngineUnreachable(self.name, path, "the controller is dead")
        return answer


class PublishingFleet(RuleBasedStateMachine):
    @initialize(sharing=st.sampled_from(["off", "retract", "scoped"]))
    def start(self, sharing):
        self.loop = asyncio.new_event_loop()
        self.policy = decide("disjoint", sharing)
        self.version = 0
        self.submitted = self.answered = 0
        self.names: list[str] = ["v0"]  # every version that was the fleet's, or being published, in order
        self.pending: dict[asyncio.Task, tuple] = {}  # request -> what it asks for
        self.run(self._start())

    def run(self, work):
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    async def _start(self):
        self.engines = [FakeEngine(radix_cache=self.policy.radix_cache, token_s=0.001) for _ in range(ENGINES)]
        for engine in self.engines:
            await engine.start()
        await self._new_controller("v0")

    async def _new_controller(self, version):
        self.fleet = Fleet(self.policy, version)
        self.clients = [MortalClient(e.url, name=f"e{i}", deadlines=DEADLINES) for i, e in enumerate(self.engines)]
        for client in self.clients:
            with suppress(EngineError):  # a dead engine is admitted when it is restarted
                await admit(self.fleet, client)

    # ---- what happens ------------------------------------------------------------------------------------------

    @rule(tokens=st.integers(1, 60))
    def submit(self, tokens):
        self.submitted += 1
        body = {"input_ids": [1] * 20, "sampling_params": {"max_new_tokens": tokens}}
        self._ask(body, tokens)
        self.run(asyncio.sleep(0.002))

    def _ask(self, *asked):
        self.pending[self.loop.create_task(self._request(*asked))] = asked

    async def _request(self, body, tokens):
        """One rollout, asked until it is answered."""
        while True:
            # Of a publication that ended, or is under way: at most two publishers queue at a time.
            since = self.names[-3:] if self.fleet.publishing.locked() else [self.fleet.version]
            count = len(self.names)
            try:
                answer = await generate(self.fleet, body)
            except (FleetError, EngineError, RequestLost):
                await asyncio.sleep(0.01)
                continue
            meta = answer.body["meta_info"]
            assert len(answer.body["output_ids"]) == len(meta["output_token_logprobs"]) == tokens
            assert meta["weight_versions"] == meta["truth"], "a token bears a version that didn't sample it"
            named = {span["version"] for span in meta["weight_versions"]}
            lived = {*since, *self.names[count:], self.fleet.version}
            assert named <= lived, f"an answer of {named - lived}, which is another version than the fleet's {lived}"
            self.answered += 1
            return

    def _break(self, faults):
        """Plant faults, each on the next one or two calls of a path."""
        for engine, path, fault, times in faults:
            self.engines[engine].faults[path] = [fault] * times

    @rule(faults=FAULT_LISTS)
    def publish_next(self, faults):
        self._break(faults)
        self.version += 1
        self.run(self._publish(f"v{self.version}"))

    async def _publish(self, version):
        self.names.append(version)
        with suppress(PublicationError):
            report = await publish(self.fleet, NameTransport(), version)
            assert report.state == "resumed"
        await self._readmit()

    @rule(faults=FAULT_LISTS)
    def two_publishers_at_once(self, faults):
        self._break(faults)
        self.version += 2
        self.run(self._two(f"v{self.version - 1}", f"v{self.version}"))

    async def _two(self, first, second):
        await asyncio.gather(self._publish(first), self._publish(second))

    @rule(after_s=st.floats(0, 0.03), faults=FAULT_LISTS)
    def kill_the_controller(self, after_s, faults):
        self._break(faults)
        self.version += 2
        self.run(self._kill(after_s))

    async def _kill(self, after_s):
        self.names.append(f"v{self.version - 1}")
        publication = asyncio.ensure_future(publish(self.fleet, NameTransport(), f"v{self.version - 1}"))
        await asyncio.sleep(after_s)
        for client in self.clients:
            client.killed = True
        with suppress(PublicationError, EngineError):
            await publication
        # Its requests die with it; a resumed run asks again for what was not answered.
        lost = [task for task in self.pending if not task.done()]
        for task in lost:
            task.cancel()
        await asyncio.gather(*lost, return_exceptions=True)
        again = [self.pending.pop(task) for task in lost]
        # A new controller finds the engines as they are: paused, half loaded, labelled or not.
        await self._heal()
        for client in self.clients:
            await client.close()
        self.names.append(f"v{self.version - 2}")
        await self._new_controller(f"v{self.version - 2}")
        for asked in again:
            self._ask(*asked)
        await self._publish(f"v{self.version}")

    @rule(engine=st.integers(0, ENGINES - 1))
    def restart_unnoticed(self, engine):
        """It crashes between two publications and is back at its address, with the weights of its start; requests come
        for all engines before anybody has looked."""
        self.run(self.engines[engine].restart("v0"))
        for _ in range(2 * ENGINES):
            self.submit(tokens=5)

    @rule()
    def restart_the_dead(self):
        self.run(self._readmit(revive=True))

    async def _readmit(self, revive=False):
        """Restart dead engines if asked, and admit every retired one again: its state is read afresh."""
        for engine, client in zip(self.engines, self.clients, strict=True):
            if engine.dead and revive:
                await engine.restart("v0")
            member = self.fleet.members.get(client.name)
            if not engine.dead and (member is None or member.status == "retired"):
                with suppress(EngineError, FleetError):  # a rival publisher may have admitted it meanwhile
                    await admit(self.fleet, client)

    async def _heal(self):
        for engine in self.engines:
            engine.faults.clear()

    # ---- what must hold ----------------------------------------------------------------------------------------

    @invariant()
    def no_living_engine_is_left_paused(self):
        for i, engine in enumerate(self.engines):
            # Three refused resumes in a row would be needed, and no more than two faults are planted on a path.
            assert engine.dead or not engine.paused, f"engine {i} is paused: {self.fleet.retired()}"

    @invariant()
    def routable_engines_have_what_they_are_confirmed_at(self):
        for member in self.fleet.routable():
            engine = self.engines[int(member.name[1:])]
            if not engine.dead and member.instances == {rank.instance_id for rank in engine.ranks}:
                assert engine.loaded == engine.label == self.fleet.version == member.version

    @invariant()
    def requests_have_not_failed(self):
        for task in [t for t in self.pending if t.done()]:
            del self.pending[task]
            task.result()

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        try:
            self.run(self._finish())
            assert self.answered == self.submitted
        finally:
            self.run(self._stop())
            self.loop.close()

    async def _finish(self):
        """Without faults the fleet becomes whole again (a busy machine may miss a deadline now and then)."""
        await self._heal()
        for _ in range(10):
            await self._readmit(revive=True)
            self.version += 1
            await self._publish(f"v{self.version}")
            if len(self.fleet.routable()) == ENGINES:
                break
        assert len(self.fleet.routable()) == ENGINES, self.fleet.retired()
        if self.pending:
            _, late = await asyncio.wait(self.pending, timeout=40)
            assert not late, [(e.port, e.dead, e.paused, [len(r.requests) for r in e.ranks]) for e in self.engines]
        self.requests_have_not_failed()

    async def _stop(self):
        for task in self.pending:
            task.cancel()
        await asyncio.gather(*self.pending, return_exceptions=True)
        for client in self.clients:
            await client.close()
        for engine in self.engines:
            await engine.stop()


TestPublishingFleet = PublishingFleet.TestCase
TestPublishingFleet.settings = settings(
    max_examples=max(1, STEPS // STEPS_EACH),
    stateful_step_count=STEPS_EACH,
    derandomize=True,
    phases=[Phase.generate],  # shrinking repeats waits by the hundred; the failing steps are printed either way
    suppress_health_check=list(HealthCheck),
)


def _steps(monkeypatch, target, name, broken):
    """Run the machine with one protection taken out."""
    monkeypatch.setattr(target, name, broken)
    few = settings(TestPublishingFleet.settings, max_examples=8)
    run_state_machine_as_test(PublishingFleet, settings=few)


async def _never_resume(self):
    return list(self._confirmed)


def _confirm_everyone(self, version, confirmed):
    self.version = version
    for member in self.members.values():
        self.confirm(member, version)


def _trust_every_answer(self, meta):
    return None


@pytest.mark.parametrize(
    ("target", "name", "broken"),
    [
        (Publication, "_resume", _never_resume),
        (Fleet, "move_to", _confirm_everyone),
        (Sent, "check_version", _trust_every_answer),
    ],
    ids=["no resume in finally", "unconfirmed engines are routed", "answers of a restarted engine are returned"],
)
def test_negative_control_the_machine_finds_a_missing_protection(monkeypatch, target, name, broken):
    with pytest.raises((AssertionError, BaseExceptionGroup, Flaky, TimeoutError)):
        _steps(monkeypatch, target, name, broken)
