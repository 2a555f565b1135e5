"""The scenarios of the stateful test on real sandboxes: struck at every step of the protocol, nothing may differ.

Only the engine is the model one, whose tokens are a pure function: what is examined here is the environment's half.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from tests.conftest import needs_sandboxes
from tests.sandbox_kit import sandboxes
from tests.stateful.test_consistency import Chaos, ModelEngine, World

from belayer import events
from belayer.checkpoint.policy import EveryN, Never
from belayer.config import Config, RecoveryConfig, RunConfig
from belayer.faults import failpoints
from belayer.journal import Journal
from belayer.journal import records as r
from belayer.run import Run
from belayer.verify import verify_run

pytestmark = [pytest.mark.crash, needs_sandboxes]

KILLED = (
    "action.chosen", "action.intended", "action.sent", "action.performed", "action.completed", "turn.tokens",
    "checkpoint.begin", "checkpoint.frozen", "checkpoint.publish.captured", "checkpoint.journal.before",
    "checkpoint.journal.after",
)  # fmt: skip
AGAIN = ("restore.begin", "replay.begin", "replay.action", "replay.end", "restore.journalled")  # while it recovers
DAMAGED = ("action.intended", "action.performed", "checkpoint.begin")
SPOILT = ("checkpoint.journal.after",)  # the newest checkpoint is damaged, and then wanted
FICKLE = ("turn.tokens", "action.completed")  # of rollouts whose observations no replay reproduces
CASES = [
    *((point, "kill") for point in KILLED),
    *((point, "again") for point in AGAIN),
    *((point, "damage") for point in DAMAGED),
    *((point, "spoil") for point in SPOILT),
    *((point, "fickle") for point in FICKLE),
]
TURNS = 3


async def solve(rollout):
    await rollout.observe([7, 8, 9])
    await rollout.sandbox.shell("mkdir -p /w && cd /w && n=1")
    for number in range(TURNS):
        turn = await rollout.generate(max_tokens=3)
        first = turn.token_ids[0]
        if rollout.task["fickle"]:
            command = "n=$(od -An -N6 -tx1 /dev/urandom | tr -d ' '); echo $n"
        else:
            command = f"n=$((n * 3 + {first})); mkdir -p d{first} && cd d{first}; echo $n >> /w/log; echo $n $PWD; ls /"
        result = await rollout.sandbox.shell(command)
        await rollout.observe([200 + byte for byte in result.stdout])
        await rollout.sandbox.exec(f"echo {number} >> /w/turns")
    last = await rollout.sandbox.shell("cat /w/turns | wc -l; md5sum < /w/log 2>/dev/null; pwd")
    return float(sum(last.stdout) % 997)


class Hand:
    """Strikes each rollout once at its own failpoint; those of `again` once before, so that there is a recovery."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.waiting = {f"c-{number}-0": case for number, case in enumerate(CASES)}
        self.struck: dict[str, str] = {}
        self.begun: set[str] = set()
        self.points = {point for point, _ in CASES} | {"action.performed"}
        for point in self.points:
            self.arm(point)

    def arm(self, point: str) -> None:
        failpoints.arm(point, lambda: self.passed(point))

    def passed(self, point: str) -> None:
        self.arm(point)  # it has fired, and there are others that come by
        rollout = failpoints.subject()
        if rollout not in self.run.keepers:
            rollout = rollout.rpartition(".")[0]
        keeper = self.run.keepers.get(rollout)
        wanted = self.waiting.get(rollout)
        if keeper is None or wanted is None or keeper.sandbox is None or keeper.completed < 2:
            return
        kind = wanted[1]
        if kind == "again" and rollout not in self.begun:
            if point == "action.performed" and keeper.completed >= 4:  # there is a checkpoint by then
                self.begun.add(rollout)
                os.kill(keeper.sandbox.init_pid, signal.SIGKILL)
            return
        if point != wanted[0]:
            return
        del self.waiting[rollout]
        self.struck[rollout] = kind
        if kind == "damage":
            shutil.rmtree(keeper.sandbox.root / "etc")
            return
        if kind == "spoil":
            newest = self.run.sandboxes.newest(keeper.name)
            images = self.run.sandboxes.checkpoints.data.images(newest.id)
            largest = max(images.iterdir(), key=lambda path: path.stat().st_size)
            content = bytearray(largest.read_bytes())
            content[len(content) // 2] ^= 1
            largest.write_bytes(content)
        if kind == "again" and point != "restore.journalled":  # what is being restored is not the keeper's yet
            for folder in Path("/sys/fs/cgroup").rglob(f"{keeper.name}-*"):
                for pid in (folder / "cgroup.procs").read_text().split() if (folder / "cgroup.procs").exists() else []:
                    os.kill(int(pid), signal.SIGKILL)
        elif not keeper.sandbox.dead:
            os.kill(keeper.sandbox.init_pid, signal.SIGKILL)


class Due(EveryN):
    """Every n, also where the agent has to queue for it: what is struck here counts on its checkpoint."""

    def decide(self, situation):
        return super().decide(msgspec.structs.replace(situation, bubble_over=False))


async def collect(folder: Path, *, strike: bool):
    config = Config(run=RunConfig(max_concurrent=8), recovery=RecoveryConfig(infra_retries=12, attempts=1))
    async with sandboxes(folder / "checkpoints") as manager:
        journal = Journal(folder / "journal")
        run = Run(SimpleNamespace(path=folder), config, journal, SimpleNamespace(close=lambda: None))
        run._policy = Due(2) if strike else Never()
        run.sandboxes, run.engine, run.sink = manager, ModelEngine(World(), Chaos([]), 5), events.ignore
        hand = Hand(run) if strike else None
        try:
            tasks = [{"fickle": kind == "fickle"} for _, kind in CASES]
            done = await run.collect(solve, tasks, name="c")
            run.acknowledge(*done)
        finally:
            for point in failpoints.NAMES:
                failpoints.disarm(point)
            journal.close()
    return done, journal.histories, hand


def test_struck_at_every_step_on_real_sandboxes(tmp_path):
    calm, _, _ = asyncio.run(collect(tmp_path / "calm", strike=False))
    done, histories, hand = asyncio.run(collect(tmp_path / "struck", strike=True))
    assert not hand.waiting, f"not struck: {hand.waiting}"
    for undisturbed, struck, (point, kind) in zip(calm, done, CASES, strict=True):
        where = f"{struck.rollout_id}: {kind} at {point}"
        assert struck.restores >= 1, f"{where}: nothing was restored"
        if kind == "fickle":
            continue
        assert struck.truncations == 0, where
        assert (struck.token_ids, struck.reward) == (undisturbed.token_ids, undisturbed.reward), where
    # one observation was lost and came back as another one: the context was cut there, and says what is
    cut = [histories[each.rollout_id] for each in done if each.truncations]
    assert cut and all(history.started.task["fickle"] for history in cut)
    for history in histories.values():
        shown = [bytes(token - 200 for token in c.ids) for c in history.calls[1:] if c.kind == "observe"]
        said = [c.result["exec"]["stdout"] for c in history.actions() if re.search(r"n=\$", c.asked)]
        assert shown == said, f"{history.rollout}: the model was shown something else than its environment said"
    verdict = verify_run(tmp_path / "struck")
    assert verdict.consistent and verdict.delivered == len(CASES), verdict.findings


def test_checkpoints_of_rollouts_that_are_over_do_not_stay(tmp_path):
    """A driver may be killed after a rollout's end was journalled, and before its checkpoints were deleted."""

    async def body() -> None:
        journal = Journal(tmp_path / "journal")
        for name in ("over", "under-way", "again"):
            journal.record(r.RolloutStarted(rollout=name, group="g", task=1, seed=1))
        async with sandboxes(tmp_path / "checkpoints") as manager:
            for name in ("over", "under-way", "again"):
                box = await manager.create(f"{name}.0")
                await box.checkpoint(action=0, rollout=name, attempt=0)
            garbled = (await box.checkpoint(action=0, rollout="again", attempt=0)).id
        (tmp_path / "checkpoints" / f"{garbled}.json").write_text("{}")
        journal.record(r.RolloutFinished(rollout="over", reward=1.0))
        journal.record(r.RolloutFailed(rollout="again", error="SandboxLost", reason="x"))
        journal.record(r.RolloutStarted(rollout="again", attempt=1, group="g", task=1, seed=1))
        run = Run(SimpleNamespace(path=tmp_path), Config(), journal, SimpleNamespace(close=lambda: None))
        async with sandboxes(tmp_path / "checkpoints") as manager:
            await run.forget_finished(manager)
            assert [manifest.rollout for manifest in manager.checkpoints.newest()] == ["under-way"]
            assert (await manager.restore("under-way.0", manager.checkpoints.newest()[0].id)).parent
            await manager.discard("under-way.0")
        assert not list((tmp_path / "checkpoints").glob("*.json"))
        journal.close()

    asyncio.run(body())
