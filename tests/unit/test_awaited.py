"""A call without `await` is refused by the next one, and by the function's end; nothing else is."""

from __future__ import annotations

import asyncio

import pytest

from belayer._awaited import LastCall, noticed
from belayer.errors import RequestRefused, RolloutFailed

pytestmark = pytest.mark.unit


class Talker:
    def __init__(self) -> None:
        self.last_call = LastCall("r-0-0")
        self.said: list[str] = []

    @noticed()
    async def say(self, what: str) -> str:
        await asyncio.sleep(0)
        self.said.append(what)
        return what

    @noticed("box.")
    async def say_twice(self, what: str) -> str:
        await self.say(what)
        return await self.say(what)


@pytest.mark.filterwarnings("error")
def test_a_forgotten_await_is_refused_by_the_next_call():
    async def forgetful() -> Talker:
        talker = Talker()
        talker.say("a")
        with pytest.raises(
            RequestRefused, match=r"say was called but not awaited before box\.say_twice.*\n.*await"
        ) as error:
            await talker.say_twice("b")
        assert "`await rollout.say(...)`" in str(error.value)
        return talker

    assert asyncio.run(forgetful()).said == []


@pytest.mark.filterwarnings("error")
def test_a_forgotten_last_await_is_refused_at_the_end():
    talker = Talker()
    talker.say_twice("a")
    with pytest.raises(RequestRefused, match=r"box\.say_twice was called but not awaited before the function returned"):
        talker.last_call.check("the function returned")
    talker.last_call.check("the function returned")


@pytest.mark.filterwarnings("error")
def test_what_is_awaited_in_any_way_passes():
    async def careful() -> list[str]:
        talker = Talker()
        assert await talker.say("a") == "a"
        assert await asyncio.wait_for(talker.say_twice("b"), 5) == "b"
        task = asyncio.create_task(talker.say("c"))
        await task
        cancelled = asyncio.create_task(talker.say("d"))
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        talker.last_call.check("the function returned")
        return talker.said

    assert asyncio.run(careful()) == ["a", "b", "b", "c"]


def test_two_calls_at_once_are_refused():
    async def both() -> None:
        talker = Talker()
        await asyncio.gather(talker.say("a"), talker.say("b"))

    with pytest.raises(RequestRefused, match="not awaited"):
        asyncio.run(both())


def test_the_first_failure_is_quoted_once():
    inner = RolloutFailed("the function raised", first="x.py:3: KeyError: 1")
    outer = RolloutFailed(f"2 of 4 rollouts failed: {inner.what}", first=inner.first)
    assert str(outer).count("x.py:3") == 1 and str(outer).count("first failure") == 1
