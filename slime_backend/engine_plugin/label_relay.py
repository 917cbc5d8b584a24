"""Tells the schedulers the version label, where SGLang keeps it in the HTTP process.

Needed in 0.5.15.post1: /update_weight_version assigns `server_args.weight_version` of the tokenizer manager
(entrypoints/http_server.py:1338), and so do the update calls that bear a version (tokenizer_control_mixin.py:872). The
schedulers, which know what sampled a token and when, never hear of it. From 0.5.23 it is a message of its own.

The label's attribute becomes a descriptor in the process that owns the tokenizer manager. Each assignment is sent on as
a message that SGLang already broadcasts to every data-parallel rank, an `AbortReq` for a request id that nobody has, on
the socket that the later resume takes too: a label that was set before the resume is known before the next token. No
type of our own, because the receiver decodes the types of `io_struct.py` only.

Not a hook by itself: epoch.py attaches it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FIELD = "weight_version"
LABEL_ID = "reef-slime: weight label"
MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__"
MESSAGE = "sglang.srt.managers.scheduler.Scheduler.abort_request"


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
        self._announce(arguments, value)


def after_manager(result: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER TokenizerManager.__init__: from now on its label's assignments reach the schedulers."""
    from sglang.srt.managers.io_struct import AbortReq

    owned = manager.server_args

    def announce(arguments: Any, label: Any) -> None:
        if arguments is owned and label is not None:
            manager._dispatch_to_scheduler(AbortReq(rid=LABEL_ID, abort_message=str(label)))

    kind = type(owned)
    setattr(kind, FIELD, AnnouncedField(vars(kind).get(FIELD), announce))


def around_message(on_label: Callable[[Any], None]) -> Callable[..., Any]:
    """AROUND Scheduler.abort_request: take our message out; `on_label(scheduler)` runs while the old label stands."""

    def receive(original: Any, scheduler: Any, message: Any, *args: Any, **kwargs: Any) -> Any:
        if message.rid != LABEL_ID:
            return original(scheduler, message, *args, **kwargs)
        from sglang.srt.runtime_context import get_server_args

        on_label(scheduler)
        setattr(get_server_args(), FIELD, message.abort_message)
        return None

    return receive
