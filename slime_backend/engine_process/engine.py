"""Starting, watching and stopping one real SGLang engine on this machine's loopback.

    engine = LocalEngine(EngineSettings(model="tiny"), log_path=Path("engine0.log"))
    engine.start()
    engine.wait_ready()             # raises EngineStartError with the engine's own last words
    ...
    engine.stop()

A controller that dies in any way leaves no engine behind: see engine_guard.py.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime_backend.engine_process import guard as engine_guard
from slime_backend.errors import ReefError
from slime_backend.wire import HOOKS_VARIABLE

LOOPBACK = "127.0.0.1"
# Below those that the system gives to connections (Linux: ip_local_port_range, 32768 and up), low enough for SGLang
# 0.5.15.post1, which puts its gRPC port 10000 above the HTTP port (server_args.py:2999).
PORTS = range(20000, 32768)
ORIGINAL_LOGPROB = "SGLANG_RETURN_ORIGINAL_LOGPROB"  # log-probs at temperature 1, whatever was sampled at
CPU_HOOKS = ("cpu_attention",)
DEFAULT_HOOKS = ("cpu_attention", "kv_evidence", "kv_spans")
# What a run asks for: also what one SGLang or one kind of model needs, which reports "not needed" elsewhere.
RUN_HOOKS = (
    *DEFAULT_HOOKS,
    "kv_stamps",
    "paused_sleep",
    "retract_frees",
    "retract_flush",
    "grammar_flush",
    "sampled_spans",
    "swa_anchors",
)


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever http_proxy says


class EngineStartError(ReefError, RuntimeError):
    """The engine did not become ready; the message has its last error line and its log."""


class PortOccupiedError(EngineStartError):
    """Something else listens on the asked port."""


def free_port() -> int:
    """A loopback port that was free a moment ago, out of PORTS unless all that were tried are taken.

    An engine binds its port up to a minute after it was chosen, and the system takes ports of its own range for any
    connection meanwhile.
    """
    for port in [*(PORTS.start + secrets.randbelow(len(PORTS)) for _ in range(100)), 0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return int(probe.getsockname()[1])
    raise EngineStartError(f"no port of {LOOPBACK} can be listened on")


def check_port(port: int) -> None:
    """Raise PortOccupiedError where `port` can't be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise PortOccupiedError(
                f"port {port} on {LOOPBACK} can't be used ({error.strerror}); stop what listens there or choose "
                "another port (0 lets the engine pick a free one)"
            ) from error


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What one engine is started with. Defaults are those of a small model on a CPU."""

    model: str
    port: int = 0  # 0: any free port
    device: str = "cpu"
    dtype: str = "float32"
    radix_cache: bool = True
    weight_version: str = "v0"
    max_total_tokens: int = 65536  # KV slots; bounds the memory of an engine that would else take a share of all RAM
    chunked_prefill_size: int = 2048
    page_size: int = 1
    dp_size: int = 1
    hooks: Sequence[str] = DEFAULT_HOOKS
    threads: int = 1
    skip_tokenizer: bool = True
    overlap_schedule: bool = False  # on a CPU; elsewhere SGLang's default stands
    extra: Sequence[str] = ()  # further flags of sglang.launch_server
    devices: Sequence[str] = ()  # the GPUs that it sees, by their names in CUDA_VISIBLE_DEVICES; none: all, or a CPU
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, port: int, nccl_port: int) -> list[str]:
        flags = {
            "--model-path": self.model,
            "--host": LOOPBACK,
            "--port": str(port),
            "--device": self.device,
            "--dtype": self.dtype,
            "--weight-version": self.weight_version,
            "--max-total-tokens": str(self.max_total_tokens),
            "--chunked-prefill-size": str(self.chunked_prefill_size),
            "--page-size": str(self.page_size),
            "--dp-size": str(self.dp_size),
            "--log-level": "info",
        }
        command = [sys.executable, "-m", "sglang.launch_server", "--skip-server-warmup"]
        if self.dp_size == 1:
            # Two engines that start together would else look for a free port in the same range. With several
            # data-parallel ranks SGLang must choose: it would give this one to each of them.
            command += ["--nccl-port", str(nccl_port)]
        for name, value in flags.items():
            command += [name, value]
        if self.device == "cpu":
            # The Hugging Face model code runs without SGLang's CUDA kernels. The static fraction keeps the start-up
            # estimate positive next to a large prefill chunk (SGLang 0.5.23 fails on a negative one).
            command += ["--attention-backend", "torch_native", "--model-impl", "transformers"]
            command += ["--mem-fraction-static", "0.2"]
            # Without it an idle scheduler spins on a core that the trainer or another engine needs.
            command.append("--sleep-on-idle")
            if not self.overlap_schedule:
                command.append("--disable-overlap-schedule")
        if not self.radix_cache:
            command.append("--disable-radix-cache")
        if self.skip_tokenizer:
            command.append("--skip-tokenizer-init")
        return command + list(self.extra)

    def variables(self) -> dict[str, str]:
        """What its process has in its environment besides the controller's own."""
        on_cpu = self.device == "cpu"
        found = {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            HOOKS_VARIABLE: ",".join(h for h in self.hooks if on_cpu or h not in CPU_HOOKS),
            # Whatever the shell says: trainer and audit divide by the temperature, so log-probs must be the sampler's.
            ORIGINAL_LOGPROB: "false",
        }
        if on_cpu:
            found["OMP_NUM_THREADS"] = str(self.threads)
            found["TORCHDYNAMO_DISABLE"] = "1"  # a 23 s compile of the first step buys nothing on a tiny model
            found["CUDA_VISIBLE_DEVICES"] = ""
        elif self.devices:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices)
        return {**found, **self.environment}


class LocalEngine:
    """One engine process behind its guard. Not thread-safe."""

    def __init__(self, settings: EngineSettings, *, log_path: Path, name: str = "engine") -> None:
        self.settings = settings
        self.name = name
        self.log_path = log_path
        self.port = 0
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The guard's process id."""
        return None if self._guard is None else self._guard.pid

    def check(self) -> None:
        """Raise what would stop this engine from starting: EngineStartError for a missing model, PortOccupiedError."""
        if not (Path(self.settings.model) / "config.json").is_file():
            raise EngineStartError(
                f"{self.name}: no model at {self.settings.model} (config.json is missing); give a directory with a "
                "Hugging Face checkpoint"
            )
        if self.settings.port:
            check_port(self.settings.port)

    def start(self) -> None:
        """Check, start the process and return at once."""
        self.check()
        self.port = self.settings.port or free_port()
        environment = {**os.environ, **self.settings.variables()}
        command = self.settings.command(self.port, free_port())
        self._guard = engine_guard.start_guarded(command, environment, self.log_path)

    def alive(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    def wait_ready(self, deadline_s: float = 300.0) -> None:
        """Return once /health answers 200. Raises EngineStartError when the process ends first, or at the deadline."""
        until = time.monotonic() + deadline_s
        while time.monotonic() < until:
            if not self.alive():
                raise EngineStartError(f"{self.name}: the engine ended while starting: {self.last_words()}")
            with contextlib.suppress(urllib.error.URLError, OSError), _direct.open(self.url + "/health", timeout=2):
                return
            time.sleep(0.2)
        raise EngineStartError(f"{self.name}: not ready after {deadline_s:g} s: {self.last_words()}")

    def last_words(self) -> str:
        """The last error line of the log, and where the log is."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError as error:
            return f"(no log: {error})"
        filled = [line.strip() for line in lines if line.strip()]
        errors = [line for line in filled if "Error" in line or "error:" in line]
        words = errors[-1] if errors else (filled[-1] if filled else "(it printed nothing)")
        return f"{words[:300]} (log: {self.log_path})"

    def stop(self) -> None:
        """End the engine and all its children; returns when they are gone. May be called again."""
        if self._guard is not None:
            engine_guard.end_guarded(self._guard)
            self._guard = None


@contextlib.contextmanager
def running_engines(engines: Sequence[LocalEngine], *, ready_s: float = 300.0):  # type: ignore[no-untyped-def]
    """Start all engines side by side, yield them once all are ready, and stop every one whatever happens."""
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_ready(ready_s)
        yield engines
    finally:
        for engine in engines:
            engine.stop()
