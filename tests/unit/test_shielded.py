"""Work that outlives its caller ends, and its error is neither lost to a caller nor printed where there is none."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from belayer._shielded import shielded

pytestmark = pytest.mark.unit


def complaints_of(scenario: Any) -> list[str]:
    """What asyncio would have printed about errors that were never retrieved."""
    found: list[str] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context["message"]))
        await scenario()
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(run())
    gc.collect()
    return found


async def fails_after(going_on: asyncio.Event) -> None:
    await going_on.wait()
    raise OSError("too late")


@pytest.mark.parametrize(("wait", "complains"), [(shielded, False), (asyncio.shield, True)])
def test_an_error_after_the_cancellation_is_not_printed(wait, complains):
    """The second row says that the first one is no accident: with `asyncio.shield` alone it is printed."""

    async def scenario() -> None:
        going_on = asyncio.Event()
        work = asyncio.ensure_future(fails_after(going_on))

        async def caller() -> None:
            await wait(work)

        waiting = asyncio.create_task(caller())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not work.done()
        going_on.set()
        await asyncio.wait([work])

    assert bool(complaints_of(scenario)) is complains


def test_a_caller_that_waits_gets_outcome_and_error():
    async def scenario() -> None:
        assert await shielded(asyncio.ensure_future(asyncio.sleep(0, "done"))) == "done"
        going_on = asyncio.Event()
        going_on.set()
        with pytest.raises(OSError, match="too late"):
            await shielded(asyncio.ensure_future(fails_after(going_on)))

    assert complaints_of(scenario) == []
