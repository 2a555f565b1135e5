"""The host's order of dumps: how many at once, who goes first, what happens to those who stop or die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from belayer.checkpoint.turns import PATIENCE_S, RETRY_S, URGENT_PATIENCE_S, YIELD_S, Turn, Turns, TurnState
from belayer.errors import CheckpointAbandoned

pytestmark = pytest.mark.unit

HOLDER = """
import asyncio, pathlib, sys
from belayer.checkpoint.turns import Turn, Turns
async def main():
    turns = Turns(pathlib.Path(sys.argv[1]), at_once=1)
    async with turns.taken(Turn()):
        print("held", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


class Clock:
    """Time that passes only when it is told to, with what was put off."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def later(self, delay: float, work: Callable[[], None]) -> None:
        self.due.append((self.now + delay, work))

    async def pass_(self, seconds: float) -> None:
        self.now += seconds
        ready = [work for at, work in self.due if at <= self.now]
        self.due = [(at, work) for at, work in self.due if at > self.now]
        for work in ready:
            work()
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Dump:
    """One checkpoint that ends when the test says so."""

    def __init__(self, turns: Turns, log: list[str], name: str) -> None:
        self.turn, self.name = Turn(), name
        self.end = asyncio.Event()
        self.log = log
        self.task = asyncio.create_task(self._run(turns))

    async def _run(self, turns: Turns) -> str:
        try:
            async with turns.taken(self.turn):
                self.log.append(self.name)
                await self.end.wait()
                return "done"
        except CheckpointAbandoned:
            return "abandoned"


def test_in_the_order_of_arrival_and_promoted_ones_first(tmp_path: Path) -> None:
    async def main() -> None:
        clock, log = Clock(), list[str]()
        turns = Turns(tmp_path / "t", at_once=1, clock=clock, later=clock.later)
        a, b, c, d = (Dump(turns, log, name) for name in "abcd")
        await settle()
        assert log == ["a"] and a.turn.state is TurnState.BEGUN
        assert d.turn.promote() and not a.turn.promote()
        assert d.turn.state is TurnState.PROMOTED
        assert b.turn.abandon() and not a.turn.abandon()  # what has begun is never given up
        assert await b.task == "abandoned" and b.turn.state is TurnState.ABANDONED
        for dump, expected in ((a, "ad"), (d, "adc"), (c, "adc")):
            dump.end.set()
            await dump.task
            await settle()
            assert "".join(log) == expected
        assert {each.turn.state for each in (a, c, d)} == {TurnState.OVER}
        turns.close()
        assert not (tmp_path / "t").exists()

    asyncio.run(main())


def test_two_runs_share_the_hosts_limit_and_the_promoted_one_goes_first(tmp_path: Path) -> None:
    async def main() -> None:
        clock, log = Clock(), list[str]()
        one, two, three = (Turns(tmp_path, at_once=1, clock=clock, later=clock.later) for _ in range(3))
        a = Dump(one, log, "a")
        await settle()
        b, c = Dump(two, log, "b"), Dump(three, log, "c")
        await settle()
        assert log == ["a"]
        c.turn.promote()
        a.end.set()
        await settle()
        for _ in range(3):  # whoever looks first
            await clock.pass_(0.01)
        assert log == ["a", "c"]
        c.end.set()
        await settle()
        await clock.pass_(0.01)
        assert log == ["a", "c", "b"]
        b.end.set()
        await asyncio.gather(a.task, b.task, c.task)
        for turns in (one, two, three):
            turns.close()

    asyncio.run(main())


def test_a_run_that_has_dumped_lets_others_go_before_it_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        clock, log = Clock(), list[str]()
        busy, patient = (Turns(tmp_path, at_once=1, clock=clock, later=clock.later) for _ in range(2))
        dumps = [Dump(busy, log, "a") for _ in range(3)]
        await settle()
        dumps.append(Dump(patient, log, "b"))
        await settle()
        dumps[0].end.set()
        await settle()
        for _ in range(4):
            await clock.pass_(RETRY_S)
        assert log == ["a", "b"]
        for _ in range(len(dumps) * 3):
            for each in dumps:
                each.end.set()
            await clock.pass_(YIELD_S)
        assert log == ["a", "b", "a", "a"]
        assert all(each.task.done() for each in dumps)
        busy.close()
        patient.close()
        assert not tmp_path.exists()

    asyncio.run(main())


def test_a_promoted_one_waits_only_a_moment_for_a_busy_host(tmp_path: Path) -> None:
    async def main() -> None:
        clock, log = Clock(), list[str]()
        busy, other = (Turns(tmp_path, at_once=1, clock=clock, later=clock.later) for _ in range(2))
        a = Dump(busy, log, "a")
        await settle()
        b, c = Dump(other, log, "b"), Dump(other, log, "c")
        await settle()
        b.turn.promote()
        await clock.pass_(URGENT_PATIENCE_S + RETRY_S)
        assert log == ["a", "b"] and c.turn.open
        for each in (a, b, c):
            each.end.set()
        for _ in range(5):
            await clock.pass_(YIELD_S)
        assert log == ["a", "b", "c"]
        busy.close()
        other.close()

    asyncio.run(main())


def test_a_run_that_waits_for_itself_is_never_impatient(tmp_path: Path) -> None:
    async def main() -> None:
        clock, log = Clock(), list[str]()
        turns = Turns(tmp_path, at_once=2, clock=clock, later=clock.later)
        dumps = [Dump(turns, log, name) for name in "abcdef"]
        await settle()
        for each in dumps:
            each.turn.promote()
        assert [each.turn.ahead() for each in dumps[2:]] == [2.0] * 4  # two dump, three more go first: (5 + 1 - 2) / 2
        for _ in range(5):
            await clock.pass_(PATIENCE_S)  # all at once would take each other's processors
            assert log == ["a", "b"]
        for number, each in enumerate(dumps):
            each.end.set()
            await each.task
            await settle()
            assert len(log) == min(6, number + 3)
        turns.close()

    asyncio.run(main())


def test_one_that_has_waited_is_asked_again_when_its_turn_comes(tmp_path: Path) -> None:
    async def main() -> None:
        clock, log = Clock(), list[str]()
        turns = Turns(tmp_path, at_once=2, clock=clock, later=clock.later)
        a, b, c, d = (Dump(turns, log, name) for name in "abcd")
        b.turn.wanted = lambda beside: not beside
        c.turn.wanted = lambda beside: False
        await settle()
        assert log == ["a"] and b.turn.open, "there is a slot, but it would not be alone"
        a.end.set()
        await settle()
        assert log == ["a", "b"] and c.turn.open
        b.end.set()
        assert await c.task == "abandoned" and c.turn.state is TurnState.ABANDONED
        await settle()
        assert log == ["a", "b", "d"]
        d.end.set()
        await d.task
        turns.close()

    asyncio.run(main())


def test_a_promoted_one_is_not_asked_again(tmp_path: Path) -> None:
    async def main() -> None:
        clock, log = Clock(), list[str]()
        turns = Turns(tmp_path, at_once=1, clock=clock, later=clock.later)
        a, b = (Dump(turns, log, name) for name in "ab")
        b.turn.wanted = lambda beside: False
        await settle()
        b.turn.promote()
        a.end.set()
        await settle()
        assert log == ["a", "b"]
        b.end.set()
        await b.task
        turns.close()

    asyncio.run(main())


def test_a_cancelled_one_leaves_its_place_and_its_slot(tmp_path: Path) -> None:
    async def main() -> None:
        clock, log = Clock(), list[str]()
        turns = Turns(tmp_path, at_once=1, clock=clock, later=clock.later)
        a, b, c = (Dump(turns, log, name) for name in "abc")
        await settle()
        b.task.cancel()
        a.task.cancel()
        await asyncio.gather(a.task, b.task, return_exceptions=True)
        await settle()
        assert log == ["a", "c"]
        c.end.set()
        await c.task
        turns.close()

    asyncio.run(main())


def test_a_holder_that_was_killed_blocks_nobody_and_a_stopped_one_not_for_long(tmp_path: Path) -> None:
    def hold() -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        return process

    async def main(holder: subprocess.Popen[bytes]) -> None:
        clock, log = Clock(), list[str]()
        turns = Turns(tmp_path, at_once=1, clock=clock, later=clock.later)
        a = Dump(turns, log, "a")
        os.kill(holder.pid, signal.SIGSTOP)
        await settle()
        await clock.pass_(PATIENCE_S - 0.1)
        assert not log
        await clock.pass_(0.2)
        assert log == ["a"], "a stopped run holds up the host"
        a.end.set()
        await a.task
        b = Dump(turns, log, "b")
        await settle()
        assert log == ["a"]
        holder.kill()
        holder.wait()
        await clock.pass_(0.01)
        assert log == ["a", "b"], "a killed run holds up the host"
        b.end.set()
        await b.task
        turns.close()

    holder = hold()
    try:
        asyncio.run(main(holder))
    finally:
        holder.kill()
        holder.wait()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    at_once=st.integers(1, 3),
    steps=st.lists(
        st.tuples(st.sampled_from(["new", "promote", "abandon", "cancel", "end", "wait"]), st.integers(0, 30)),
        max_size=40,
    ),
)
def test_never_more_at_once_and_nobody_waits_for_nothing(tmp_path: Path, at_once: int, steps) -> None:
    async def main() -> None:
        clock, log = Clock(), list[str]()
        runs = [Turns(tmp_path, at_once=at_once, clock=clock, later=clock.later) for _ in range(2)]
        dumps: list[Dump] = []
        for step, number in steps:
            if step == "new":
                dumps.append(Dump(runs[number % 2], log, str(len(dumps))))
            elif dumps:
                dump = dumps[number % len(dumps)]
                before = dump.turn.state
                if step == "promote":
                    waits = dump.turn.promote()
                    # a promotion may be all that it waited for: then it has begun, and waits no more
                    assert waits == dump.turn.open and (waits or before is not TurnState.PROMOTED)
                    assert waits <= (before in (TurnState.WAITING, TurnState.PROMOTED))
                    assert waits or before is not TurnState.WAITING or dump.turn.state is TurnState.BEGUN
                elif step == "abandon":
                    assert dump.turn.abandon() == (before in (TurnState.WAITING, TurnState.PROMOTED))
                elif step == "cancel":
                    dump.task.cancel()
                elif step == "end":
                    dump.end.set()
            await settle()
            if step == "wait":
                await clock.pass_(0.006)
            running = [each for each in dumps if each.turn.state is TurnState.BEGUN and not each.task.done()]
            assert len(running) <= at_once
        for _ in range(2 * len(dumps) + 2):
            for each in dumps:
                each.end.set()
            await clock.pass_(YIELD_S + RETRY_S)
        assert all(each.task.done() for each in dumps), [each.turn.state for each in dumps]
        assert not any(each.turn.open for each in dumps if not each.task.cancelled())
        for turns in runs:
            turns.close()

    asyncio.run(main())
