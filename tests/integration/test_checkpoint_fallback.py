"""A checkpoint that does not verify costs a rollout only time: the next older one is used, and an event says so."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from tests.checkpoint_kit import tiny_image
from tests.conftest import needs_sandboxes
from tests.sandbox_kit import kill_init, sandboxes

from belayer import events
from belayer.checkpoint import make_policy
from belayer.config import PolicyConfig, RecoveryConfig
from belayer.events import Event
from belayer.journal import Journal
from belayer.journal.records import EnvRestored, RolloutStarted
from belayer.recovery import EnvironmentKeeper
from belayer.recovery.actions import Shell
from belayer.recovery.breaker import CircuitBreaker
from belayer.sandbox import Sandboxes

pytestmark = [pytest.mark.integration, needs_sandboxes]


class Rollout:
    """One rollout's environment and journal, with a checkpoint after every action."""

    def __init__(self, folder: Path, manager: Sandboxes) -> None:
        self.seen: list[Event] = []
        self.journal = Journal(folder)
        self.journal.record(RolloutStarted(rollout="r", group="g", task=0, seed=0))
        self.records: list[object] = []
        self.calls = 0
        record = self.journal.record
        self.journal.record = lambda entry: (self.records.append(entry), record(entry))[1]  # type: ignore[method-assign]
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

    async def act(self, command: str) -> str:
        result = await self.keeper.act(self.calls, Shell(command=command))
        self.calls += 1
        self.keeper.bubble_begins()
        return result.stdout.decode()

    def ids(self) -> list[str]:
        return [checkpoint.id for checkpoint in self.journal.history("r").checkpoints]

    def refusals(self) -> list[dict]:
        return [
            event.data
            for event in self.seen
            if event.kind == events.FAULT_DETECTED and event.data["fault"] == "checkpoint"
        ]

    def last_restore(self) -> EnvRestored:
        return [record for record in self.records if isinstance(record, EnvRestored)][-1]


def flip(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_makes_way_for_the_next_older_one(tmp_path):
    async def body(image: str) -> None:
        async with sandboxes(tmp_path / "checkpoints", image=image) as manager:
            manager.checkpoints.keep = 4
            data = manager.checkpoints.data
            rollout = Rollout(tmp_path / "journal", manager)
            try:
                for number in range(1, 5):
                    assert await rollout.act("n=$((n+1)); echo $n >> /log; echo $n") == f"{number}\n"
                await rollout.keeper._checkpoint.settle()
                first, second, third, fourth = rollout.ids()
                # the newest has a damaged image, the one before a damaged manifest, and one has lost its snapshot
                flip(next((data.memory / fourth).glob("pages-*.img")))
                flip(data.manifest_path(third), 40)
                (data.snapshots / second).rename(data.snapshots / "elsewhere")
                sandbox = rollout.keeper.sandbox
                assert sandbox is not None
                kill_init(sandbox)
                assert await rollout.act("n=$((n+1)); echo $n >> /log; cat /log") == "1\n2\n3\n4\n5\n"
                found = rollout.refusals()
                assert [refusal["checkpoint"] for refusal in found] == [fourth, third, second], found
                assert "pages" in found[0]["how"] and "manifest" in found[1]["how"] and "snapshot" in found[2]["how"]
                restored = rollout.last_restore()
                assert (restored.checkpoint, restored.replayed) == (first, 3)
                recovered = [event.data for event in rollout.seen if event.kind == events.RECOVERED]
                assert [data["how"] for data in recovered] == ["full restore"]

                # nothing is left to restore from: a new container, and every action again
                await rollout.keeper._checkpoint.settle()
                for checkpoint in rollout.ids():
                    shutil.rmtree(data.memory / checkpoint, ignore_errors=True)
                sandbox = rollout.keeper.sandbox
                assert sandbox is not None
                kill_init(sandbox)
                assert await rollout.act("echo $n; cat /log") == "5\n1\n2\n3\n4\n5\n"
                restored = rollout.last_restore()
                assert (restored.checkpoint, restored.replayed) == ("", 5)
            finally:
                await rollout.keeper.close(keep_checkpoints=False)
                rollout.journal.close()

    with tiny_image(tmp_path) as image:
        asyncio.run(body(image))


def test_a_rollout_goes_on_without_processes_where_the_run_accepts_that(tmp_path):
    seen: list[Event] = []

    async def body(image: str) -> None:
        folder = tmp_path / "checkpoints"
        async with sandboxes(folder, events=seen.append, image=image, allow_level="fs+shell") as manager:
            manager.levels.best, manager.levels.why = "fs+shell", "this host has no CRIU"
            rollout = Rollout(tmp_path / "journal", manager)
            try:
                for number in range(1, 4):
                    assert await rollout.act("n=$((n+1)); echo $n >> /log; echo $n") == f"{number}\n"
                    await rollout.keeper._checkpoint.settle()
                assert rollout.refusals() == []
                sandbox = rollout.keeper.sandbox
                assert sandbox is not None
                kill_init(sandbox)
                assert await rollout.act("n=$((n+1)); echo $n >> /log; cat /log") == "1\n2\n3\n4\n"
                restored = rollout.last_restore()
                assert (restored.checkpoint, restored.replayed) == (rollout.ids()[2], 0)
                recovered = [event.data["how"] for event in rollout.seen if event.kind == events.RECOVERED]
                assert recovered == ["fs+shell restore"], "it must not be called a full one"
            finally:
                await rollout.keeper.close(keep_checkpoints=False)
                rollout.journal.close()

    with tiny_image(tmp_path) as image:
        asyncio.run(body(image))
    told = [event.data for event in seen if event.kind == events.RESTORE_LEVEL]
    assert [(data["level"], data["reason"]) for data in told] == [("fs+shell", "this host has no CRIU")]
