"""Full weights by disk, published by slime's driver: on stubs of RayTrainGroup, of the rollout manager and of Ray."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import pytest

from slime_backend.slime_hooks.weights import disk_reload, train_group
from slime_backend.slime_hooks.weights.errors import EngineRejectedUpdate, PublicationFailed
from tests.checkpoint_faults import FAULTS
from tests.slime_hooks.publishing import engines_and_publisher
from tests.slime_hooks.stub_ray import StubActor, StubMethod

pytestmark = pytest.mark.usefixtures("stub_ray")


@pytest.fixture
def job(tmp_path, stub_ray):
    """(group, module, fakes, router): a RayTrainGroup with two engines, changed by us."""

    class RayTrainGroup:
        pass

    module = SimpleNamespace(RayTrainGroup=RayTrainGroup, ray=stub_ray)
    train_group._publish_in_driver(module)
    with engines_and_publisher(tmp_path / "unused") as (_, engines, router):
        actors = [StubActor(engine) for engine in engines]
        group: Any = RayTrainGroup()
        group.noted = []
        group.args = SimpleNamespace(
            disjoint_prefix_sharing="retract",
            reef_run_dir=str(tmp_path / "reef"),
            reef_load_timeout=5.0,
            allow_kv_holder=[],
            verify_weights="auto",
            use_fault_tolerance=False,
            rollout_external=False,
            offload_rollout=False,
            update_weight_local_checkpoint_dir=None,
            update_weight_disk_keep_files=False,
        )
        group._rollout_manager = SimpleNamespace(get_updatable_engines_and_lock=StubMethod(lambda: (actors, None)))
        group._actor_handlers = [SimpleNamespace(reef_note_publication=StubMethod(group.noted.append))]
        yield group, actors, [engine.fake for engine in engines], router
        if hasattr(group, "reef_publisher"):
            group.reef_publisher.close()


def reload(group, tmp_path, version):
    directory = tmp_path / f"weight_v{int(version):06d}"
    directory.mkdir()
    try:
        group._reload_rollout_weights_from_disk(directory, version)
    finally:
        group.left = directory.exists()


def test_engines_load_the_checkpoint_inside_the_transaction(job, tmp_path):
    group, actors, fakes, router = job
    reload(group, tmp_path, "1")
    assert [fake.label for fake in fakes] == ["1", "1"]
    assert [fake.loaded for fake in fakes] == ["weight_v000001"] * 2
    assert all(actor.calls == [] for actor in actors)  # neither paused nor flushed a second time by slime's actor
    assert len(router.workers) == 2
    assert group.noted[0]["reef/publication/flushes_verified"] == 2
    assert not group.left
    reload(group, tmp_path, "2")
    assert [fake.label for fake in fakes] == ["2", "2"]


def test_a_failed_publication_is_raised_in_the_driver(job, tmp_path):
    group, _, fakes, _ = job
    for fake in fakes:
        fake.faults["/update_weights_from_disk"] = ["refuse"]
    with pytest.raises(EngineRejectedUpdate):
        reload(group, tmp_path, "1")
    assert not group.left
    assert not any(fake.paused for fake in fakes)


def test_an_engine_whose_host_lacks_the_weights_fails_alone(job, tmp_path):
    group, actors, fakes, router = job
    group.args.update_weight_local_checkpoint_dir = "local"

    class Pulls(StubActor):
        def __getattr__(self, name):
            if name == "pull_weights":
                return StubMethod(self.pull)
            return super().__getattr__(name)

        def pull(self, version):
            self.calls.append(("pull_weights", version))
            if self.engine.fake is fakes[1]:
                raise RuntimeError("a traceback\ndisk full")

    for i, actor in enumerate(list(actors)):
        actors[i] = Pulls(actor.engine)
    reload(group, tmp_path, "1")
    assert actors[0].calls == [("pull_weights", 1)]
    assert (fakes[0].label, fakes[0].loaded) == ("1", "local")
    assert router.workers == [fakes[0].url]
    assert "disk full" in group.reef_publisher.fleet.members[fakes[1].url.partition("://")[2]].reason


def test_without_engines_the_files_are_removed_and_nothing_else_happens(job, tmp_path):
    group, actors, _, _ = job
    actors.clear()
    reload(group, tmp_path, "1")
    assert not group.left
    assert not hasattr(group, "reef_publisher")


def test_the_last_line_of_an_error_is_what_it_says():
    assert disk_reload._last_line(RuntimeError("Traceback\n  line\nValueError: no")) == "ValueError: no"
    assert disk_reload._last_line(RuntimeError("")) == "RuntimeError"


@pytest.mark.parametrize("name", ["cut_off", "one_missing"])
def test_a_checkpoint_that_isnt_complete_pauses_nobody(name, job, tmp_path, tiny_model):
    group, _, fakes, _ = job
    directory = shutil.copytree(tiny_model, tmp_path / "weight_v000001")
    FAULTS[name][0](directory)
    for fake in fakes:
        fake.info["model_path"] = str(tiny_model)
    with pytest.raises(PublicationFailed, match=str(directory)):
        group._reload_rollout_weights_from_disk(directory, "1")
    assert not any("/pause_generation" in fake.calls for fake in fakes)
