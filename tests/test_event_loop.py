"""Ctrl-C on a command: the first ends its work, further ones don't end its clean-up."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from slime_backend.event_loop import run_until_signal


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_end_the_clean_up(signum: signal.Signals) -> None:
    done = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signum)
            await asyncio.sleep(30)
        finally:
            for _ in range(3):
                os.kill(os.getpid(), signum)
                await asyncio.sleep(0.02)
            done.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        run_until_signal(work())
    assert done == ["cleaned up"]
