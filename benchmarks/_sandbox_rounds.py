"""Kill and restore at random, over everything that a checkpoint must capture: nothing may come back other than it was.

A sandbox holds a group of the resources of benchmarks/conformance. In each round some of them are used, the state of
all is noted, a checkpoint is taken, and one of `FAULTS` strikes; then the newest checkpoint is restored and every
resource compared. After some rounds the sandbox is discarded, and the next group has its turn. At the end nothing of
the run may be left on the host.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from belayer.config import load_config
from belayer.errors import CheckpointRefused, SandboxError
from belayer.ownership import RunLabel
from belayer.ownership.reap import everything_labelled
from belayer.sandbox import Sandbox, Sandboxes

from . import _campaign
from .conformance import arrange, names
from .conformance.engine import Trial, differences
from .conformance.own import OwnBox

FAULTS = {  # and how often
    "kill": 3,
    "damage and kill": 4,
    "kill while a command runs": 3,
    "kill while it is checkpointed": 3,
    "files removed from outside": 2,
    "replaced while it runs": 2,
    "twice in a row": 2,
    "fork": 1,
}
NOT_KEPT = ("peer of a unix socket",)  # see docs/sandbox.md
LIFE = 20  # rounds of one sandbox
SHARE = 10  # resources in one sandbox
LANES = 2  # sandboxes at once
REFUSALS = 5  # in a row: what is refused for a moment may be tried again


class Round(msgspec.Struct):
    index: int
    fault: str
    resources: int
    checkpoint_s: float = 0.0
    restore_s: float = 0.0
    wrong: list[str] = []
    refused: list[str] = []


class Saved(_campaign.Saved, kw_only=True):
    rounds: list[Round] = msgspec.field(default_factory=list)
    skipped: dict[str, str] = msgspec.field(default_factory=dict)


class Campaign(_campaign.Campaign[Saved]):
    """`run` ends when `rounds` are done or `deadline` (monotonic) is past."""

    unit = "rounds"

    def __init__(self, rounds: int, seed: int, *, deadline: float, say: Callable[[str], None], state: Path) -> None:
        super().__init__(Saved(seed=seed), state=state, say=say)
        self._wanted = rounds
        self._deadline = deadline
        self._lives = 0
        self._next = 0

    @property
    def done(self) -> int:
        return len(self.saved.rounds)

    def run(self) -> None:
        self._next = max((done.index + 1 for done in self.saved.rounds), default=0)
        self._lives = self._next // LIFE
        asyncio.run(self._lanes())

    async def _lanes(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="belayer-bench-rounds-"))
        config = load_config().sandbox.model_copy(update={"memory_bytes": 2 << 30})
        fds = len(os.listdir("/proc/self/fd"))
        try:
            with RunLabel.new("bench faults --sandbox") as label:
                manager = await Sandboxes.open(config, label, checkpoints=folder / "checkpoints")
                try:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(LANES):
                            group.create_task(self._lane(manager))
                finally:
                    await manager.close()
                self._leaks(label.name, fds)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _goes_on(self) -> bool:
        return self._next < self._wanted and time.monotonic() < self._deadline

    def _leaks(self, label: str, fds: int) -> None:
        left = [
            thing for thing in everything_labelled() if thing.label == label and thing.kind not in ("shm", "folder")
        ]
        self.saved.count("leaked", *map(str, left))
        if (more := len(os.listdir("/proc/self/fd")) - fds) > 3:
            self.saved.count("leaked", f"{more} descriptors of this process")

    # -- one sandbox after the other -----------------------------------------------------------------------------------
    async def _lane(self, manager: Sandboxes) -> None:
        while self._goes_on():
            number, self._lives = self._lives, self._lives + 1
            members = [name for name in names() if name not in NOT_KEPT and name not in self.saved.skipped]
            groups = arrange(members, SHARE)
            # every group has its turn, in another order for another seed
            order = random.Random(f"{self.saved.seed} {number // len(groups)}").sample(range(len(groups)), len(groups))
            life = _Life(manager, f"rounds-{number}", groups[order[number % len(groups)]])
            try:
                await life.begin()
                for member, why in life.trial.wrong.items():
                    if why.startswith("skipped: "):
                        self.saved.skipped[member] = why.removeprefix("skipped: ")
                    else:
                        self.saved.count("failed", f"{member}: {why}")
                for _ in range(LIFE):
                    if not self._goes_on() or life.over:
                        break
                    index, self._next = self._next, self._next + 1
                    done = await life.round(random.Random(f"{self.saved.seed} round {index}"), index)
                    self.saved.rounds.append(done)
                    self.saved.count("wrong", *(f"round {index} ({done.fault}): {text}" for text in done.wrong))
                    self.tell(self._how_far)
            except CheckpointRefused as error:
                if len(life.trial.names) > 1:
                    self.saved.count("failed", f"{life.trial.names}: {error.what}")
                self.saved.skipped |= dict.fromkeys(life.trial.names, f"refused: {error.what}")
            except (SandboxError, OSError, RuntimeError) as error:
                # a call that should have worked, and ended this sandbox's life
                self.saved.count("failed", f"{type(error).__name__}: {error}")
            finally:
                await manager.discard(life.name)

    def _how_far(self) -> str:
        return f"{self.done} of {self._wanted} rounds; last: {self.saved.rounds[-1].fault}"


class _Life:
    """One sandbox with its resources, through many generations."""

    def __init__(self, manager: Sandboxes, name: str, members: list[str]) -> None:
        self.name = name
        self.over = False
        self._manager = manager
        self._members = members

    async def begin(self) -> None:
        self.box = await self._manager.create(self.name)
        self.trial = Trial(OwnBox(self.box, self._manager), self._members)
        await self.trial.setup()

    async def round(self, chance: random.Random, index: int) -> Round:
        fault = chance.choices(list(FAULTS), list(FAULTS.values()))[0]
        done = Round(index, fault, len(self.trial.names))
        some = [name for name in self.trial.names if chance.random() < 0.5]
        used = (await self.trial.ask("use", names=some))[0] if some else {}
        done.wrong += [f"{name} does not work: {found['error']}" for name, found in used.items() if "error" in found]
        (before,) = await self.trial.ask("probe")
        token = await self._checkpoint(done)
        for _ in range(2 if fault == "twice in a row" else 1):
            token = await self._strike(fault, token, chance) or token
            begun = time.perf_counter()
            self._take(await self._manager.restore(self.name, token))
            done.restore_s = time.perf_counter() - begun
            (now,) = await self.trial.ask("probe")
            done.wrong += _wrong(before, now)
        if fault == "fork":
            (before,) = await self.trial.ask("probe")
            for fork in await self.box.fork(2):
                (now,) = await self.trial.ask("probe", box=OwnBox(fork, self._manager))
                done.wrong += [f"in a fork: {text}" for text in _wrong(before, now)]
                await self._manager.discard(fork.name)
        self.over = bool(done.wrong)  # what follows from one wrong state is not counted again
        return done

    def _take(self, box: Sandbox) -> None:
        self.box = box
        self.trial.box = OwnBox(box, self._manager)

    async def _checkpoint(self, done: Round) -> str:
        for _ in range(REFUSALS):
            begun = time.perf_counter()
            try:
                manifest = await self.box.checkpoint(action=done.index)
            except CheckpointRefused as error:
                done.refused.append(error.what)
                await asyncio.sleep(0.1)
                continue
            done.checkpoint_s = time.perf_counter() - begun
            return manifest.id
        raise CheckpointRefused(done.refused[-1])

    async def _strike(self, fault: str, token: str, chance: random.Random) -> str | None:
        """The fault; the id of another checkpoint to restore if one was published meanwhile."""
        if fault in ("replaced while it runs", "fork"):
            return None
        if fault == "damage and kill":
            await self.trial.ask("damage", names=[name for name in self.trial.names if chance.random() < 0.7])
        elif fault == "files removed from outside":
            for folder in chance.sample(("usr", "etc", "srv", "tmp", "opt", "dev/shm"), 2):
                await asyncio.to_thread(shutil.rmtree, self.box.root / folder, ignore_errors=True)
        running: asyncio.Task[Any] | None = None
        if fault == "kill while a command runs":
            running = asyncio.create_task(self.trial.ask("use"))
        elif fault == "kill while it is checkpointed":
            running = asyncio.create_task(self.box.checkpoint(action=0))
        await asyncio.sleep(chance.uniform(0.0, 0.15))
        with suppress(ProcessLookupError):
            os.kill(self.box.init_pid, signal.SIGKILL)
        if running is None:
            return None
        (result,) = await asyncio.gather(running, return_exceptions=True)
        if isinstance(result, BaseException):
            if not isinstance(result, SandboxError | RuntimeError):
                raise result
            return None
        return getattr(result, "id", None)


def _wrong(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [f"{name}: {text}" for name, text in differences(before, now).items() if text]
