"""The stamping rule on stand-ins for SGLang's requests: when a key changes, and what is kept out of the tree."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from slime_backend.engine_plugin import scope


class Request:
    """The four attributes that the rule reads or writes."""

    def __init__(self, extra_key: str | None = None) -> None:
        self.extra_key = extra_key
        self.skip_radix_cache_insert = False
        self.kv = SimpleNamespace(holds_kv=False, retraction_backup=None)


def test_a_waiting_request_follows_the_epoch_until_it_holds_kv() -> None:
    req = Request("mine")
    keys = []
    for number in (0, 1, 1, 2):
        scope.stamp(req, number)
        keys.append(req.extra_key)
    assert keys == ["0:mine", "1:mine", "1:mine", "2:mine"]
    req.kv.holds_kv = True
    scope.stamp(req, 3)
    assert req.extra_key == "2:mine"


def test_a_retracted_request_is_stamped_again_and_one_with_a_backup_is_not() -> None:
    req = Request()
    scope.stamp(req, 4)
    req.kv.retraction_backup = object()
    scope.stamp(req, 5)
    assert req.extra_key == "4:"
    req.kv.retraction_backup = None
    scope.stamp(req, 5)
    assert req.extra_key == "5:"


def test_a_request_that_crossed_is_withheld_until_it_is_admitted_again() -> None:
    req = Request()
    scope.stamp(req, 0)
    req.kv.holds_kv = True
    assert not scope.withhold(req, 0)
    assert not req.skip_radix_cache_insert
    assert scope.withhold(req, 1)
    assert req.skip_radix_cache_insert
    req.kv.holds_kv = False
    scope.stamp(req, 1)
    assert not req.skip_radix_cache_insert
    assert not scope.withhold(req, 1)


def test_what_sglang_keeps_out_of_the_tree_stays_out() -> None:
    req = Request()
    scope.stamp(req, 0)
    req.skip_radix_cache_insert = True
    assert scope.withhold(req, 1)
    scope.stamp(req, 1)
    assert req.skip_radix_cache_insert


def test_a_request_that_was_never_stamped_is_left_alone() -> None:
    req: Any = Request("3:mine")
    assert not scope.withhold(req, 7)
    assert (req.extra_key, req.skip_radix_cache_insert) == ("3:mine", False)


def test_no_caller_key_passes_for_another_epoch_or_caller() -> None:
    callers = ["", "a", "1:", "1:a", ":", "0:1:a", "11", "1", "\x00", "lora"]
    pairs = list(itertools.product(range(13), callers))
    assert len({scope.scoped_key(number, caller) for number, caller in pairs}) == len(pairs)
    assert scope.scoped_key(0, None) == scope.scoped_key(0, "")  # one and the same to SGLang
    # SGLang finds a LoRA's public name by the key's last characters (mem_cache/events.py).
    assert scope.scoped_key(12, "a" + "f" * 32).endswith("f" * 32)
