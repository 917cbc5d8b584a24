"""On a CPU, slime trains in float32 unless the job asks for --bf16 or --fp16.

slime 0.3.1 always turns bf16 on (megatron_utils/arguments.py, _set_default_megatron_args). On a CPU it is emulated, and
its rounding (1e-3 in a log-prob) would hide what a wrong prefix or a missed tensor does.
"""

from __future__ import annotations

import functools
from typing import Any

from slime_backend.cpu import source
from slime_backend.import_hooks import on_import


def install() -> None:
    on_import("slime.backends.megatron_utils.arguments", _keep_asked_precision)


def _keep_asked_precision(module: Any) -> None:
    source.require_in(module, ["args = _set_default_megatron_args(args)", "args.bf16 = not args.fp16"])
    set_defaults = module._set_default_megatron_args

    @functools.wraps(set_defaults)
    def keep_asked(args: Any) -> Any:
        asked = args.bf16
        args = set_defaults(args)
        args.bf16 = asked
        return args

    module._set_default_megatron_args = keep_asked
