"""Where slime starts its engines (slime/ray/rollout.py): each with ports of its own, also across models; and those that
no publication will ever reach are routed at once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from slime_backend.import_hooks import ModuleFunction


class PortCursor:
    """The next free port, carried from one model of a `--sglang-config` to the next.

    slime starts counting at the same port for each model, and looks whether ports are in use before the engines of the
    model before have begun to listen.
    """

    def __init__(self) -> None:
        self._highest: int | None = None  # None while no servers are being started

    def __enter__(self) -> None:
        self._highest = 0

    def __exit__(self, *exception: object) -> None:
        self._highest = None

    def carry(self, cursors: Mapping[int, int] | None) -> dict[int, int]:
        """Cursors (node -> next port) to start a group with: none lower than what other groups were given."""
        known = dict(cursors or {})
        if self._highest:
            known = {node: max(port, self._highest) for node, port in known.items()} or {0: self._highest}
        return known

    def note(self, cursors: Mapping[int, int]) -> None:
        if self._highest is not None:
            self._highest = max([self._highest, *cursors.values()])


def frozen(servers: Mapping[str, Any]) -> list[Any]:
    """The servers that no publication reaches: all but the first one with `update_weights`, as slime chooses it."""
    updatable = next((server for server in servers.values() if server.update_weights), None)
    return [server for server in servers.values() if server is not updatable]


def _servers(module: Any) -> None:
    cursor = PortCursor()
    group_class: Any = module.ServerGroup
    start_engines, start_servers = group_class.start_engines, module.start_rollout_servers

    @functools.wraps(start_engines)
    def start(self: Any, port_cursors: dict[int, int] | None = None) -> Any:
        handles, cursors = start_engines(self, cursor.carry(port_cursors))
        cursor.note(cursors)
        return handles, cursors

    @functools.wraps(start_servers)
    def start_rollout_servers(args: Any, pg: Any) -> Any:
        with cursor:
            servers, handles = start_servers(args, pg)
        never_published = servers.values() if args.debug_rollout_only else frozen(servers)
        # Behind `init` in each actor's queue.
        handles += [e.reef_route.remote() for server in never_published for e in server.all_engines if e is not None]
        return servers, handles

    group_class.start_engines = start
    module.start_rollout_servers = start_rollout_servers


PATCHES: tuple[tuple[str, ModuleFunction], ...] = (("slime.ray.rollout", _servers),)
