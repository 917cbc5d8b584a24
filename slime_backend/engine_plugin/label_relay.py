"""Tells the schedulers the version label, where SGLang keeps it in the HTTP process.

Needed up to 0.5.18. In 0.5.15.post1 and 0.5.16 /update_weight_version assigns `server_args.weight_version` of the
tokenizer manager (0.5.15.post1, entrypoints/http_server.py:1338), and so do the update calls that bear a version
(tokenizer_control_mixin.py:872); in 0.5.17 and 0.5.18 both call its `record_config_updates`. The schedulers, which know
what sampled a token and when, never hear of it. From 0.5.19 it is a message of its own.

In the process that owns the tokenizer manager, each call is listened to, or the label's attribute becomes a descriptor.
A label is sent on as a message that SGLang already broadcasts to every data-parallel rank, an `AbortReq` for a request
id that nobody has, on the socket that the later resume takes too: a label that was set before the resume is known
before the next token. No type of our own, because the receiver decodes the types of `io_struct.py` only.

Not a hook by itself: epoch.py attaches it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime_backend.engine_plugin import generation, guard, registry
from slime_backend.engine_plugin.names import Need, Sglang

FIELD = "weight_version"
LABEL_ID = "reef-slime: weight label"
MANAGER_CLASS = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
MANAGER = f"{MANAGER_CLASS}.__init__"
RECORD = f"{MANAGER_CLASS}.record_config_updates"
MESSAGE = "sglang.srt.managers.scheduler.Scheduler.abort_request"
ABORT = "sglang.srt.managers.io_struct.AbortReq"
USES: tuple[Need, ...] = (f"{MANAGER_CLASS}._dispatch_to_scheduler", f"{ABORT}.rid", f"{ABORT}.abort_message")


def functions(sglang: Sglang, receive: Callable[..., Any]) -> tuple[registry.HookFunction, ...]:
    """What to attach, where a release's schedulers don't learn labels; `receive`: of `around_message`."""
    if sglang.has(RECORD):
        sender: registry.HookFunction = (RECORD, "after", after_record)
    else:
        sender = (MANAGER, "after", after_manager)
    return sender, (MESSAGE, "around", receive)


def uses(sglang: Sglang) -> tuple[Need, ...]:
    return USES if sglang.has(RECORD) else (*USES, f"{MANAGER_CLASS}.server_args")


class AnnouncedField:
    """An instance attribute of a class of arguments; assignments to it are announced as (arguments, value)."""

    def __init__(self, default: Any, announce: Callable[[Any, Any], None]) -> None:
        self._default = default
        self._announce = announce

    def __get__(self, arguments: Any, owner: type | None = None) -> Any:
        # Kept in the instance's own dictionary, where pickling and `vars` look for it.
        return self._default if arguments is None else vars(arguments).get(FIELD, self._default)

    def __set__(self, arguments: Any, value: Any) -> None:
        vars(arguments)[FIELD] = value
        guard.attempt(self._announce, arguments, value, report=_report, otherwise=None)


def _report(error: Exception) -> None:
    """SGLang's assignment of a label goes on; the hooks that name weights by it can't be believed any more."""
    registry.report_fault(("kv_spans", "sampled_spans"), MANAGER, error)


def after_manager(result: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER TokenizerManager.__init__: from now on its label's assignments reach the schedulers."""
    owned = manager.server_args

    def announce(arguments: Any, label: Any) -> None:
        if arguments is owned and label is not None:
            _send(manager, label)

    kind = type(owned)
    setattr(kind, FIELD, AnnouncedField(vars(kind).get(FIELD), announce))


def after_record(result: Any, manager: Any, source: str, **fields: Any) -> None:
    """AFTER TokenizerManager.record_config_updates: a label that is among the updates goes on to the schedulers."""
    if fields.get(FIELD) is not None:
        _send(manager, fields[FIELD])


def _send(manager: Any, label: Any) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    manager._dispatch_to_scheduler(AbortReq(rid=LABEL_ID, abort_message=str(label)))


def around_message(on_label: Callable[[Any], None]) -> Callable[..., Any]:
    """AROUND Scheduler.abort_request: take our message out; `on_label(scheduler)` runs while the old label stands."""

    def receive(original: Any, scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
        if recv_req.rid != LABEL_ID:
            return original(scheduler, recv_req, *args, **kwargs)
        on_label(scheduler)
        generation.serve_version(recv_req.abort_message)
        return None

    return receive
