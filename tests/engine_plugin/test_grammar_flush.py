"""The hook grammar_flush on SGLang's own grammar manager and idle test, without an engine."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from slime_backend import wire
from slime_backend.engine_plugin import grammar_flush
from slime_backend.engine_plugin.names import IMPORTED

pytestmark = pytest.mark.engine  # needs SGLang, starts nothing

RETRACT, IN_PLACE = SimpleNamespace(mode="retract"), SimpleNamespace(mode="in_place")


class Part(SimpleNamespace):
    """What isn't given is off."""

    def __getattr__(self, name):
        return None


class Backend:
    """Stands for a compiler: SGLang's base class with a cache."""

    def __init__(self):
        from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend

        self.inner = BaseGrammarBackend()
        self.cache = self.inner.cache

    def reset(self):
        self.inner.reset()


class Queue:
    """A scheduler of which only what the idle test looks at exists; test and manager are SGLang's."""

    def __init__(self, *waiting_for_grammar, holds_kv=False):
        from sglang.srt.constrained.grammar_manager import GrammarManager
        from sglang.srt.managers.scheduler import Scheduler

        self.scheduler = Part(
            running_batch=SimpleNamespace(is_empty=lambda: True, reqs=[]),
            chunked_req=None,
            dllm_manager=SimpleNamespace(any_staging_reqs=lambda: False),
            last_batch=None,
            enable_overlap=False,
            _pp_microbatches_drained=lambda: True,
            waiting_queue=[],
            _engine_paused=False,
        )
        manager = GrammarManager.__new__(GrammarManager)
        manager.scheduler, manager.grammar_backend = self.scheduler, Backend()
        record = SimpleNamespace(holds_kv=holds_kv)
        manager.grammar_queue = [SimpleNamespace(grammar=g, kv=record) for g in waiting_for_grammar]
        manager.grammar_backend.cache["old"] = "compiled"
        self.scheduler.grammar_manager = self.manager = manager
        self._idle, self._clear = Scheduler.is_fully_idle, GrammarManager.clear

    def pause(self, request):
        grammar_flush._before_pause(self.scheduler, request)
        self.scheduler._engine_paused = True

    def resume(self):
        grammar_flush._before_continue(self.scheduler)
        self.scheduler._engine_paused = False

    def idle(self, **options):
        return grammar_flush._around_idle(self._idle, self.scheduler, **options)

    def idle_without_the_hook(self, **options):
        return self._idle(self.scheduler, **options)

    def clear(self):
        grammar_flush._around_clear(self._clear, self.manager)


@pytest.fixture(autouse=True)
def running(monkeypatch):
    monkeypatch.setattr(grammar_flush, "_pause_mode", None)


def test_a_flush_passes_while_only_a_grammar_is_waited_for():
    queue = Queue(Future())
    before = list(queue.manager.grammar_queue)
    queue.pause(RETRACT)
    assert not queue.idle_without_the_hook(ignore_waiting=True)  # the control: SGLang alone refuses
    assert queue.idle(ignore_waiting=True)
    assert queue.manager.grammar_queue == before


@pytest.mark.parametrize("pause", [None, IN_PLACE])
def test_it_is_refused_as_before_unless_the_pause_retracts(pause):
    queue = Queue(Future())
    if pause is not None:
        queue.pause(pause)
    assert not queue.idle(ignore_waiting=True)


def test_it_is_refused_again_after_the_resume():
    queue = Queue(Future())
    queue.pause(RETRACT)
    queue.resume()
    assert not queue.idle(ignore_waiting=True)


def test_a_request_in_the_queue_that_holds_kv_is_counted():
    queue = Queue(Future(), holds_kv=True)
    queue.pause(RETRACT)
    assert not queue.idle(ignore_waiting=True)


@pytest.mark.parametrize("busy", ["running", "chunked", "staging", "waiting"])
def test_everything_else_is_still_counted(busy):
    queue = Queue(Future())
    queue.pause(RETRACT)
    scheduler = queue.scheduler
    if busy == "running":
        scheduler.running_batch.is_empty = lambda: False
    elif busy == "chunked":
        scheduler.chunked_req = object()
    elif busy == "staging":
        scheduler.dllm_manager.any_staging_reqs = lambda: True
    else:
        scheduler.waiting_queue = [SimpleNamespace(kv=SimpleNamespace(holds_kv=True))]
    assert not queue.idle(ignore_waiting=True)


def test_a_health_check_is_left_alone():
    queue = Queue(Future())
    queue.pause(RETRACT)
    asked = []

    def original(scheduler, for_health_check=False, **options):
        asked.append(list(scheduler.grammar_manager.grammar_queue))
        return True

    grammar_flush._around_idle(original, queue.scheduler, for_health_check=True)
    assert asked == [queue.manager.grammar_queue]


def test_an_exception_of_the_idle_test_leaves_the_queue_as_it_was():
    queue = Queue(Future())
    before = list(queue.manager.grammar_queue)
    queue.pause(RETRACT)

    def broken(scheduler, *args, **options):
        raise RuntimeError("SGLang's own")

    with pytest.raises(RuntimeError, match="SGLang's own"):
        grammar_flush._around_idle(broken, queue.scheduler)
    assert queue.manager.grammar_queue == before


def test_compiled_grammars_outlive_a_flush_that_requests_wait_behind():
    queue = Queue(Future())
    queue.pause(RETRACT)
    queue.clear()
    assert queue.manager.grammar_backend.cache == {"old": "compiled"}


def test_without_waiting_requests_a_flush_clears_them_as_sglang_does():
    queue = Queue()
    queue.pause(RETRACT)
    queue.clear()
    assert queue.manager.grammar_backend.cache == {}


def test_a_scheduler_of_another_form_is_left_to_sglang():
    """No queue, or requests that say nothing of KV: never an exception into the scheduler."""
    grammar_flush._before_pause(None, SimpleNamespace())
    bare = SimpleNamespace()
    assert grammar_flush._around_idle(lambda scheduler, *_: True, bare)
    queue = Queue(Future())
    queue.pause(RETRACT)
    for req in queue.manager.grammar_queue:
        del req.kv
    assert not queue.idle(ignore_waiting=True)


def test_an_sglang_that_doesn_t_count_grammars_needs_no_hook(monkeypatch):
    from sglang.srt.managers.scheduler import Scheduler

    assert grammar_flush.plan(IMPORTED).instead != wire.NOT_NEEDED
    monkeypatch.setattr(Scheduler, "is_fully_idle", lambda self, for_health_check=False: not self.waiting_queue)
    assert grammar_flush.install() == wire.NOT_NEEDED


def test_xgrammar_compiles_on_while_the_flush_passes():
    """A real compile on its thread; the future ends with a grammar."""
    xgrammar = pytest.importorskip("xgrammar", reason="SGLang was installed without xgrammar")
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([bytes([i]) for i in range(256)]))
    future, begun = Future(), threading.Event()

    def compile_it():
        begun.set()
        future.set_result(compiler.compile_regex("(ab|cd){3,20}" * 20))

    queue = Queue(future)
    queue.manager.grammar_backend.reset = compiler.clear_cache
    threading.Thread(target=compile_it, daemon=True).start()
    assert begun.wait(60)
    queue.pause(RETRACT)
    for _ in range(50):
        assert queue.idle(ignore_waiting=True)
        queue.clear()
    assert isinstance(future.result(60), xgrammar.CompiledGrammar)
