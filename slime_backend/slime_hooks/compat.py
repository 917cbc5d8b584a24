"""What lets slime 0.3.1 run with newer versions of what it builds on, GPU or not; each looks first if it is needed.

slime's assumption                       broken by         change
ServerArgs is a dataclass                SGLang 0.5.23     its fields are read through msgspec
numpy is 1.x                             numpy 2           the assertion sees another version string
weights arrive without a session         SGLang 0.5.23     a session is opened and closed around them
/get_weight_version                      SGLang 0.5.23     /model_info says it
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

from slime_backend.import_hooks import on_import

CONTROL_S = 10.0


def install() -> None:
    on_import("slime.backends.sglang_utils.sglang_engine", read_msgspec_fields)
    on_import("slime.backends.sglang_utils.sglang_engine", open_weight_sessions)
    on_import("slime.backends.megatron_utils.initialize", pass_numpy_assertion)


def read_msgspec_fields(module: Any) -> None:
    """Let `dataclasses.fields(ServerArgs)` in slime's engine actor read a msgspec.Struct (SGLang 0.5.23)."""
    if dataclasses.is_dataclass(module.ServerArgs):
        return
    import msgspec

    module.dataclasses = SimpleNamespace(fields=msgspec.structs.fields)


class _Numpy(ModuleType):
    """numpy, but for its version string."""

    __version__ = "1.26.0 (numpy 2 behind it)"

    def __getattr__(self, name: str) -> Any:
        import numpy

        return getattr(numpy, name)


def pass_numpy_assertion(module: Any) -> None:
    """slime asserts numpy 1.x for Megatron-core of before 0.10; 0.19.2 works with numpy 2."""
    if module.np.__version__.startswith("1.") or "np.__version__" not in inspect.getsource(module.init):
        return
    module.np = _Numpy("numpy")


def open_weight_sessions(module: Any) -> None:
    """SGLang 0.5.23 refuses weights outside begin_weight_update .. end_weight_update (weight_updater.py:192,234)."""
    engine: Any = module.SGLangEngine

    def opened(update: Any) -> Any:
        @functools.wraps(update)
        def with_session(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not getattr(self, "_weight_session", False):
                self._make_request("begin_weight_update")
                self._weight_session = True
            return update(self, *args, **kwargs)

        return with_session

    engine.update_weights_from_distributed = opened(engine.update_weights_from_distributed)
    engine.update_weights_from_tensor = opened(engine.update_weights_from_tensor)
    continue_generation = engine.continue_generation

    @functools.wraps(continue_generation)
    def close_and_continue(self: Any) -> Any:
        if getattr(self, "_weight_session", False):
            self._make_request("end_weight_update")
            self._weight_session = False
        return continue_generation(self)

    engine.continue_generation = close_and_continue

    def get_weight_version(self: Any) -> str:
        import requests

        # /server_info keeps the label that the engine was started with.
        answer = requests.get(f"http://{self.server_host}:{self.server_port}/model_info", timeout=CONTROL_S)
        answer.raise_for_status()
        return str(answer.json()["weight_version"])

    engine.get_weight_version = get_weight_version
