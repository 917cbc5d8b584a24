"""One pass over a source for several engines: in step, made once, and whoever fails leaves the others going."""

from __future__ import annotations

import asyncio

import pytest

from slime_backend.transports.one_pass import OnePass, PassBegun
from tests.waiting import until


class Items:
    """Counts what was made."""

    def __init__(self, count: int = 5, breaks_at: int | None = None) -> None:
        self.count, self.breaks_at, self.made = count, breaks_at, 0

    def __iter__(self):
        for i in range(self.count):
            if i == self.breaks_at:
                raise ConnectionError("rank 1 is gone")
            self.made += 1
            yield i


async def read(one_pass, items, ahead, name="", *, slow=0, leaves_after=None):
    """All items of one reader; `ahead` collects how many had been made when each was in hand."""
    got = []
    async with one_pass.reader(name) as stream:
        async for item in stream:
            got.append(item)
            for _ in range(slow):
                await asyncio.sleep(0.001)
            ahead.append(items.made - len(got))
            if len(got) == leaves_after:
                raise KeyError("this engine failed")
    return got


def test_all_readers_get_everything_made_once_and_nobody_is_ahead(run_async):
    items, ahead = Items(), []

    async def scenario():
        one_pass = OnePass(iter(items))
        return await asyncio.gather(*(read(one_pass, items, ahead, slow=i) for i in range(4)))

    assert run_async(scenario()) == [[0, 1, 2, 3, 4]] * 4
    assert items.made == 5
    assert set(ahead) == {0}


def test_a_reader_that_fails_or_is_cancelled_leaves_the_others_going(run_async):
    items, ahead = Items(), []

    async def scenario():
        one_pass = OnePass(iter(items))
        tasks = [
            asyncio.create_task(read(one_pass, items, ahead)),
            asyncio.create_task(read(one_pass, items, ahead, leaves_after=2)),
            asyncio.create_task(read(one_pass, items, ahead, slow=50)),
        ]
        await until(lambda: ahead, "a reader has the first item")
        tasks[2].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    got, failed, cancelled = run_async(scenario())
    assert got == [0, 1, 2, 3, 4]
    assert isinstance(failed, KeyError)
    assert isinstance(cancelled, asyncio.CancelledError)


def test_an_error_of_the_source_reaches_every_reader(run_async):
    items = Items(breaks_at=2)

    async def scenario():
        one_pass = OnePass(iter(items))
        return await asyncio.gather(*(read(one_pass, items, []) for _ in range(3)), return_exceptions=True)

    found = run_async(scenario())
    assert [str(error) for error in found] == ["rank 1 is gone"] * 3


def test_a_reader_that_comes_late_is_waited_for(run_async):
    """However long it takes: the other one has asked for the first item by then."""
    items = Items()

    async def scenario():
        one_pass = OnePass(iter(items), readers=["a", "b"])
        first = asyncio.create_task(read(one_pass, items, [], "a"))
        await until(lambda: one_pass._waiting, "the first reader wants an item")
        begun = one_pass.begun
        return begun, await asyncio.gather(first, read(one_pass, items, [], "b"))

    assert run_async(scenario()) == (False, [[0, 1, 2, 3, 4]] * 2)
    assert items.made == 5


def test_a_reader_that_fails_as_soon_as_it_has_entered_is_not_waited_for(run_async):
    items = Items()

    async def fails(one_pass):
        async with one_pass.reader("b"):
            raise KeyError("its session can't be opened")

    async def scenario():
        one_pass = OnePass(iter(items), readers=["a", "b"])
        first = asyncio.create_task(read(one_pass, items, [], "a"))
        await until(lambda: one_pass._waiting, "the first reader wants an item")
        with pytest.raises(KeyError):
            await fails(one_pass)
        return await first

    assert run_async(scenario()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("names", [["a", "b"], []], ids=["it never comes", "control: nobody said that it would"])
def test_who_comes_after_the_first_item_gets_none_instead_of_some(run_async, names):
    items = Items()

    async def scenario():
        one_pass = OnePass(iter(items), readers=names, late_s=0.05)
        got = await asyncio.wait_for(read(one_pass, items, [], "a"), 30)
        with pytest.raises(PassBegun, match="b came after the pass over the weights had begun"):
            await read(one_pass, items, [], "b")
        return got

    assert run_async(scenario()) == [0, 1, 2, 3, 4]


def test_control_without_the_pass_each_reader_has_the_source_make_everything():
    items = Items()
    assert [list(items) for _ in range(3)] == [[0, 1, 2, 3, 4]] * 3
    assert items.made == 15
