"""slime's weight updaters (slime/backends/megatron_utils/update_weight), put behind our transaction.

How the bytes travel stays slime's own: gathering over TP and EP, bucketing, conversion, quantization. slime's
`update_weights` runs as it is, on every rank, as the loading step of the transaction, with stand-ins for the engines:
what it would pause, flush and resume is done by the transaction, and what it sends is sent by us, watched.

    distributed    UpdateWeightFromDistributed.update_weights, update_weights_from_distributed
    tensor         UpdateWeightFromTensor.update_weights: colocated engines, and others next to them by broadcast

Delta updates travel by disk: delta_disk.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from slime_backend.engine_client import EngineClient, EngineError
from slime_backend.import_hooks import ModuleFunction
from slime_backend.slime_hooks.engines.ray_engines import RayEngine, key_of
from slime_backend.slime_hooks.weights.rank_link import CONNECT_S, Link, link_of
from slime_backend.slime_hooks.weights.ranks import publish_together
from slime_backend.slime_hooks.weights.weight_group import FREED_S, Sending, give_up

CONTROLS = ("pause_generation", "flush_cache", "continue_generation")


class _Call:
    """In the place of an actor's method: runs here, and returns something that `ray.get` takes."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        import ray

        self._function(*args, **kwargs)
        return ray.put(None)


class StandIn:
    """One engine, as slime's updaters see it while the transaction loads. `sending` is None where it isn't loaded."""

    def __init__(self, actor: Any, name: str, sending: Sending | None) -> None:
        self.actor, self.name, self.sending = actor, name, sending

    def __getattr__(self, method: str) -> Any:
        if method in CONTROLS:
            return _Call(lambda *args, **kwargs: None)
        if method == "update_weights_from_tensor":
            return _Call(self._take)
        return getattr(self.actor, method)

    def _take(
        self, serialized_named_tensors: Sequence[str], load_format: str | None = None, **flush_and_label: Any
    ) -> None:
        if self.sending is not None:
            self.sending.take_tensors(self.name, serialized_named_tensors, load_format)


def _send(updater: Any, names: Sequence[str], version_before: int, move: Callable[[Any], None]) -> dict[str, str]:
    """One round, on one rank: slime's own update, with stand-ins. Returns the engines that it failed for."""
    link = link_of(updater)
    engines = link.by_name(names)
    missing = dict.fromkeys(set(names) - set(engines), f"its actor doesn't answer rank {link.ranks.rank}")
    clients = {name: link.client(engine) for name, engine in engines.items()}
    sending = Sending(link.loop, clients, link.args.reef_load_timeout, failed=missing)
    _reconnect(updater, link, engines, sending)
    updater.weight_version = version_before  # slime's update counts it up, in each round
    with _stand_ins(updater, engines, sending):
        move(updater)
    if sending.broken:
        _give_up_group(updater, link)
        sending.free()
    return sending.failed


def _give_up_group(updater: Any, link: Link) -> None:
    holder = [updater._model_update_groups]
    link.connected, updater._model_update_groups = frozenset(), None
    give_up(holder)


@contextmanager
def _stand_ins(updater: Any, engines: dict[str, RayEngine], sending: Sending) -> Iterator[None]:
    names = {engine.key: name for name, engine in engines.items()}

    def stand_in(actor: Any) -> StandIn:
        name = names.get(key_of(actor), "")
        return StandIn(actor, name, sending if name else None)

    def of(actors: Sequence[Any]) -> list[StandIn]:
        return [s for s in map(stand_in, actors) if s.sending is not None]

    kept = {name: vars(updater)[name] for name in _HELD if name in vars(updater)}
    for name, value in kept.items():
        if value is not None:
            setattr(updater, name, of(value) if isinstance(value, list | tuple) else stand_in(value))
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(updater, name, value)


# Where slime's updaters hold the engines that they call.
_HELD = ("rollout_engines", "distributed_rollout_engines", "_ipc_engine")


def _broadcasts_to(updater: Any) -> list[Any] | None:
    """The engines that this rank broadcasts to in its own group; None where it doesn't."""
    if hasattr(updater, "use_distribute"):  # tensor
        is_source = updater.use_distribute and updater._is_distributed_src_rank
        return list(updater.distributed_rollout_engines) if is_source else None
    return list(updater.rollout_engines) if updater._is_pp_src_rank else None


def _reconnect(updater: Any, link: Link, engines: dict[str, RayEngine], sending: Sending) -> None:
    """Make the weight-update group hold exactly the engines of this round."""
    held = _broadcasts_to(updater)
    if held is None or sending.over:
        return
    wanted = [actor for actor in held if key_of(actor) in {engine.key for engine in engines.values()}]
    keys = frozenset(map(key_of, wanted))
    if keys == link.connected:
        return
    if link.connected:
        _give_up_group(updater, link)
    _leave(link, engines, updater._group_name)
    if not wanted:
        return
    from slime.backends.megatron_utils.update_weight import update_weight_from_distributed as module

    counts = {key_of(actor): count for actor, count in zip(link.actors, link.gpu_counts, strict=True)}
    try:
        updater._model_update_groups = module.connect_rollout_engines_from_distributed(
            updater.args, updater._group_name, wanted, engine_gpu_counts=[counts[key_of(a)] for a in wanted]
        )
    except Exception as error:  # torch's, Ray's, the engine's answer
        sending.failed |= dict.fromkeys(engines, f"no weight-update group: {type(error).__name__}: {error}")
        return
    link.connected = keys


def _leave(link: Link, engines: dict[str, RayEngine], group: str) -> None:
    """An engine that still has a group of this name would refuse a second one."""

    async def leave(client: EngineClient) -> None:
        with suppress(EngineError):  # it has none
            await client.leave_weight_group(group)

    for future in [link.loop.submit(leave(link.client(engine))) for engine in engines.values()]:
        future.result()


def _put_behind_transaction(updater_class: Any, name: str) -> None:
    """Wrap `connect_rollout_engines` and `update_weights` of one of slime's updaters that send themselves. `name`: of
    the transport."""
    connect, update = updater_class.connect_rollout_engines, updater_class.update_weights

    @functools.wraps(connect)
    def connect_rollout_engines(
        self: Any, rollout_engines: Any, rollout_engine_lock: Any, engine_gpu_counts: Any = None, **rest: Any
    ) -> None:
        link = link_of(self)
        link.actors = list(rollout_engines)
        link.gpu_counts = list(engine_gpu_counts or [self.args.rollout_num_gpus_per_engine] * len(link.actors))
        if not link.connected:
            self._model_update_groups = None  # given up by us; slime would destroy it again
        link.connected = frozenset()
        connect(self, rollout_engines, rollout_engine_lock, engine_gpu_counts=engine_gpu_counts, **rest)
        held = _broadcasts_to(self)
        if held is not None and self._model_update_groups is not None:
            link.connected = frozenset(map(key_of, held))

    @functools.wraps(update)
    def update_weights(self: Any) -> None:
        link, before = link_of(self), self.weight_version
        leader = link.leader(str(before + 1), str(before), lambda engines: link.collective(name))
        figures = publish_together(link.ranks, leader, lambda names: _send(self, names, before, update))
        self.update_weight_metrics.update(figures)

    updater_class.connect_rollout_engines = connect_rollout_engines
    updater_class.update_weights = update_weights


def broadcast(
    group_name: str,
    group: Any,
    weight_version: int,
    rollout_engines: Sequence[StandIn],
    converted_named_tensors: Sequence[tuple[str, Any]],
    load_format: str | None = None,
) -> list[Any]:
    """In the place of slime's `update_weights_from_distributed`. No label: that is the transaction's last step."""
    if rollout_engines:
        sending = rollout_engines[0].sending
        assert sending is not None
        names = [engine.name for engine in rollout_engines]
        sending.broadcast(group_name, group, names, converted_named_tensors, load_format)
    return []


def _bounded_group(module: Any) -> None:
    """Meeting the engines, and each broadcast, has a deadline; torch's own is half an hour."""
    meet, connect = module.init_process_group, module.connect_rollout_engines_from_distributed

    @functools.wraps(meet)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        return meet(*args, **{"timeout": timedelta(seconds=CONNECT_S), **kwargs})

    @functools.wraps(connect)
    def connect_rollout_engines_from_distributed(args: Any, *rest: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        group = connect(args, *rest, **kwargs)
        # Under its older name before torch 2.14.
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        set_timeout(timedelta(seconds=args.reef_load_timeout + FREED_S), group)
        return group

    module.init_process_group = init_process_group
    module.connect_rollout_engines_from_distributed = connect_rollout_engines_from_distributed


def _distributed(module: Any) -> None:
    _bounded_group(module)
    module.update_weights_from_distributed = broadcast
    _put_behind_transaction(module.UpdateWeightFromDistributed, "distributed")


def _tensor(module: Any) -> None:
    """It has imported the functions of the distributed updater by name: after that was changed."""
    _put_behind_transaction(module.UpdateWeightFromTensor, "tensor")


PATCHES: tuple[tuple[str, ModuleFunction], ...] = (
    ("slime.backends.megatron_utils.update_weight.update_weight_from_distributed", _distributed),
    ("slime.backends.megatron_utils.update_weight.update_weight_from_tensor", _tensor),
)
