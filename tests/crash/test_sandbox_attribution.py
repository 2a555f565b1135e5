"""Whose doing was it? What an action brings about is its outcome; what comes from outside is restored, not scored."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import needs_sandboxes
from tests.sandbox_kit import died, eventually, kill_init, sandboxes, shell

from belayer import events
from belayer.checkpoint import make_policy
from belayer.config import PolicyConfig, RecoveryConfig
from belayer.errors import RolloutFailed, SandboxLost
from belayer.journal import Journal
from belayer.journal.records import ActionCompleted, ActionIntended, EnvRestored, RolloutStarted
from belayer.recovery import EnvironmentKeeper, environment
from belayer.recovery.actions import Exec, perform_until
from belayer.recovery.breaker import CircuitBreaker
from belayer.sandbox import ExecResult, Sandbox, Sandboxes

pytestmark = [pytest.mark.crash, needs_sandboxes]

MEMORY, PROCESSES, DISK = 64 << 20, 64, 48 << 20
HOG = "x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo ${#x}"

# none of them so large that it would be chosen before a process that is offered
HOGS = "for i in 1 2 3; do (x=$(head -c 28000000 /dev/zero | tr '\\0' x); sleep 5) & done; wait"


class Rollout:
    """One rollout's environment on real sandboxes; keeps what was journalled."""

    def __init__(self, folder: Path, manager: Sandboxes) -> None:
        self.journal = Journal(folder)
        self.journal.record(RolloutStarted(rollout="r", group="g", task=0, seed=0))
        self.records: list[object] = []
        self.seen: list[events.Event] = []
        record = self.journal.record
        self.journal.record = lambda entry: (self.records.append(entry), record(entry))[1]  # type: ignore[method-assign]
        self.calls = 0
        self.keeper = EnvironmentKeeper(
            "r",
            0,
            sandboxes=manager,
            journal=self.journal,
            policy=make_policy(PolicyConfig(name="always")),
            config=RecoveryConfig(),
            breaker=CircuitBreaker(100),
            sink=self.seen.append,
        )

    async def act(self, command: str, timeout_s: float = 20.0) -> ExecResult:
        result = await self.keeper.act(self.calls, Exec(command=command, timeout_s=timeout_s))
        self.calls += 1
        self.keeper.bubble_begins()
        return result

    def count(self, kind: type) -> int:
        return sum(isinstance(record, kind) for record in self.records)

    async def close(self) -> None:
        await self.keeper.close(keep_checkpoints=False)
        self.journal.close()


def test_outcomes_of_actions_are_results(tmp_path):
    async def fork_bomb(box: Sandbox) -> None:
        result = await box.exec("bomb() { bomb | bomb & }; bomb; sleep 20", timeout_s=1.5)
        assert result.process_limit and not result.ok and not result.oom and not result.disk_full
        assert len(box.processes()) <= PROCESSES

        async def gone() -> bool:
            # the bomb fills every place that is freed: the next commands may be refused a process for a moment
            return (await box.exec("kill -9 -1; true", timeout_s=5)).signal == 9 and len(box.processes()) < 8

        await eventually("the bomb is over", gone, 20)

    async def memory(box: Sandbox) -> None:
        result = await box.exec(HOG)
        assert result.oom and not result.ok and not result.process_limit
        # a child that was killed, and a parent that only says so
        result = await box.exec(f"bash -c '{HOG.replace(chr(39), chr(34))}' || exit 3")
        assert result.oom and result.exit_code == 3
        assert not (await box.exec("exit 3")).oom, "an old kill is not told twice"
        await shell(box, "y=1")
        result = await box.shell(HOG)
        assert result.oom and result.shell_ended and result.signal == 9

    async def everybody_killed(box: Sandbox) -> None:
        await shell(box, "sleep 1000 & y=1")
        result = await box.exec("kill -9 -1")
        assert (result.exit_code, result.signal, result.oom) == (None, 9, False)
        # the shell was among them; its own end may come a moment after the command's
        again = await box.shell("echo [$y]")
        assert again.stdout == b"[]\n" or (again.shell_ended and await shell(box, "echo [$y]") == "[]\n")
        await shell(box, "sleep 1000 & y=2")
        await box.shell("kill -9 -1")  # never the caller itself, so the shell stays
        assert await shell(box, "echo [$y]; jobs -r") == "[2]\n"
        result = await box.shell("kill -9 $$")
        assert result.shell_ended and result.signal == 9

    async def disk(box: Sandbox) -> None:
        result = await box.exec("head -c 200000000 /dev/urandom > /tmp/big")
        assert result.disk_full and result.exit_code == 1 and not result.oom
        assert (await box.exec("echo x > /tmp/small; exit 4")).disk_full
        assert (await box.exec("echo reading still works")).ok
        assert (await box.exec("rm /tmp/big && sync")).ok

        async def room() -> bool:
            return (await box.exec("head -c 1000000 /dev/urandom > /tmp/small")).ok

        await eventually("there is room again", room, 20)
        assert not (await box.exec("exit 4")).disk_full

    async def body() -> None:
        async with sandboxes(tmp_path / "c", memory_bytes=MEMORY, pids=PROCESSES, disk_bytes=DISK) as manager:
            box = await manager.create("s")
            for check in (memory, everybody_killed, disk, fork_bomb):
                if check is disk and manager.store.trees.kind != "btrfs":
                    continue  # no quota there
                await check(box)
                assert not box.dead and await box.healthy() is None, check.__name__
                assert (await box.exec("echo on")).stdout == b"on\n"

    asyncio.run(body())


def test_a_deleted_system_is_tried_once_more_and_then_accepted(tmp_path):
    async def body() -> None:
        async with sandboxes(tmp_path / "c") as manager:
            rollout = Rollout(tmp_path / "journal", manager)
            try:
                assert (await rollout.act("echo before > /root/file; echo done")).stdout == b"done\n"
                result = await rollout.act("rm -rf --no-preserve-root / 2>/dev/null; echo gone; exit 5")
                assert (result.exit_code, result.stdout) == (5, b"gone\n")
                assert rollout.count(EnvRestored) == 1, "done again from the state before it, once"
                completed = [record for record in rollout.records if isinstance(record, ActionCompleted)]
                assert "damaged" in completed[-1].damage and not completed[0].damage
                # the agent lives with what it did
                after = await rollout.act("echo anything")
                assert not after.ok and rollout.count(EnvRestored) == 1
            finally:
                await rollout.close()

    asyncio.run(body())


def test_kills_from_outside_are_restored(tmp_path):
    async def body() -> None:
        async with sandboxes(tmp_path / "c") as manager:
            alone = await manager.create("alone")
            kill_init(alone)
            await died(alone)
            with pytest.raises(SandboxLost) as caught:
                await alone.exec("true")
            assert not caught.value.ambiguous and "init has died" in caught.value.what
            rollout = Rollout(tmp_path / "journal", manager)
            try:
                await rollout.act("echo 1 >> /root/log")
                box = rollout.keeper.sandbox
                assert box is not None
                kill_init(box)
                assert (await rollout.act("echo 2 >> /root/log; cat /root/log")).stdout == b"1\n2\n"
                box = rollout.keeper.sandbox
                assert box is not None
                os.kill(manager.keeper.pid, signal.SIGKILL)
                await eventually("the sandbox went with its keeper", lambda: box.dead)
                assert (await rollout.act("echo 3 >> /root/log; cat /root/log")).stdout == b"1\n2\n3\n"
                for pid in rollout.keeper.sandbox.processes():  # type: ignore[union-attr]
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                assert (await rollout.act("echo 4 >> /root/log; cat /root/log")).stdout == b"1\n2\n3\n4\n"
                assert rollout.count(EnvRestored) == 3 and rollout.count(ActionCompleted) == 4
            finally:
                await rollout.close()

    asyncio.run(body())


def test_an_ambiguous_death_is_tried_once_more_and_then_set_aside(tmp_path):
    """The kernel normally kills the init last. Here it is made the first choice, as if it were all that is left."""

    async def body() -> None:
        async with sandboxes(tmp_path / "c", memory_bytes=MEMORY) as manager:
            rollout = Rollout(tmp_path / "journal", manager)

            async def offer_the_init() -> None:
                while True:
                    box = rollout.keeper.sandbox
                    for pid in box.processes() if box is not None else []:
                        with suppress(OSError):
                            Path(f"/proc/{pid}/oom_score_adj").write_text("1000" if pid == box.init_pid else "0")
                    await asyncio.sleep(0.005)

            offering = asyncio.create_task(offer_the_init())
            try:
                assert (await rollout.act("echo before")).ok
                with pytest.raises(RolloutFailed, match="died 2 times during action 2") as caught:
                    await rollout.act(f"sleep 0.3; {HOGS}")
                assert "memory ran out" in caught.value.first
                assert rollout.count(ActionIntended) == 3 and rollout.count(ActionCompleted) == 1
            finally:
                offering.cancel()
                await rollout.close()

    asyncio.run(body())


def test_a_death_right_after_an_action_is_no_damage_that_it_did(tmp_path, monkeypatch):
    """Twice at the same action, between its end and the look at what it left behind."""

    async def body() -> None:
        async with sandboxes(tmp_path / "c") as manager:
            rollout = Rollout(tmp_path / "journal", manager)
            deaths = 0

            async def struck(sandbox: Sandbox, *args: Any) -> Any:
                nonlocal deaths
                result = await perform_until(sandbox, *args)
                if deaths < 2 and rollout.calls == 1:
                    deaths += 1
                    kill_init(sandbox)
                    await died(sandbox)
                return result

            monkeypatch.setattr(environment, "perform_until", struck)
            try:
                await rollout.act("echo 1 >> /root/log")
                assert (await rollout.act("echo 2 >> /root/log; cat /root/log")).stdout == b"1\n2\n"
                assert deaths == 2 and rollout.count(ActionIntended) == 4
                assert rollout.count(EnvRestored) == 2, "its work is gone with it, so it is done again each time"
                completed = [record for record in rollout.records if isinstance(record, ActionCompleted)]
                assert [record.damage for record in completed] == ["", ""]
                box = rollout.keeper.sandbox
                assert box is not None and await box.healthy() is None
                # a dead sandbox was accepted nowhere: the next action finds a living one
                assert (await rollout.act("cat /root/log")).stdout == b"1\n2\n"
                assert rollout.count(EnvRestored) == 2
            finally:
                await rollout.close()

    asyncio.run(body())
