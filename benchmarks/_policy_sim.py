"""Many rollouts on one host that share its disk, simulated: when do checkpoints pay, and what do they cost others?

A rollout is a row of turns. In each the model takes its time while the environment is idle (the bubble), then a tool
call uses the processor and the disk. At the beginning of a bubble the policy decides; the checkpoint is written to the
disk, and the tool call waits for it (invariant 1). Environments fail at random: what is under way is lost, the newest
checkpoint is read back (or a new container is made) and the tool calls after it are done again; a failure during a
bubble is repaired under it. The distributions are published ones (docs/policy.md).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from belayer.checkpoint.policy import Policy, Situation

from ._policy_kernel import Body, Clock, Disk, Process, Write

MB = 1e6


@dataclass(frozen=True)
class World:
    """One host and what runs on it. Times in seconds, sizes in bytes; pairs are (m, s) of a log-normal."""

    sandboxes: int = 16
    bytes_per_s: float = 500 * MB
    mtbf_s: float = 1e4
    rounds: tuple[int, int] = (20, 100)
    turn: tuple[float, float] = (1.74, 1.10)
    tool: tuple[float, float] = (-1.2, 2.85)
    tool_limit_s: float = 60.0
    tool_bytes: tuple[float, float] = (1 * MB, 1 * MB)  # at least, and for each second
    memory: tuple[float, float] = (185 * MB, 0.3)  # median, spread
    burst: tuple[float, float, float] = (0.1, 500 * MB, 2000 * MB)  # how often, and how much more
    waits_for_disk: bool = True  # else a checkpoint counts once it is in memory, and is written in the background
    memory_bytes_per_s: float = 2000 * MB
    freeze_s: float = 0.05
    restore_s: float = 0.1
    start: tuple[float, float] = (math.log(23.0), 0.4)


@dataclass
class Outcome:
    """What a batch came to. Seconds over all rollouts, unless said otherwise."""

    wall_s: list[float] = field(default_factory=list)  # of each rollout
    checkpoints: int = 0
    checkpoint_s: float = 0.0
    exposed_s: float = 0.0
    failures: int = 0
    recovery_s: float = 0.0
    disk_users: float = 0.0  # on average

    @property
    def mean_wall_s(self) -> float:
        return sum(self.wall_s) / len(self.wall_s)

    @property
    def hidden(self) -> float:
        """Share of the checkpoint time that no rollout waited for."""
        return 1.0 - self.exposed_s / self.checkpoint_s if self.checkpoint_s else 1.0


@dataclass(frozen=True)
class Turn:
    bubble_s: float
    tool_s: float
    tool_bytes: float
    memory_bytes: float


def draw_turns(world: World, rng: random.Random) -> list[Turn]:
    """One rollout, without what happens to it."""
    turns = []
    for _ in range(rng.randint(*world.rounds)):
        tool = min(rng.lognormvariate(*world.tool), world.tool_limit_s)
        least, each = world.tool_bytes
        often, low, high = world.burst
        memory = world.memory[0] * rng.lognormvariate(0.0, world.memory[1])
        memory += rng.uniform(low, high) if rng.random() < often else 0.0
        turns.append(Turn(rng.lognormvariate(*world.turn), tool, least + each * tool, memory))
    return turns


def simulate(
    world: World, policy: Policy, seed: int, turns: Callable[[random.Random], list[Turn]] | None = None
) -> Outcome:
    """One batch. Equal seeds give every policy the same rollouts and the same times of failures."""
    clock = Clock()
    disk = Disk(clock, world.bytes_per_s)
    outcome = Outcome()
    rollouts = [
        _Rollout(number, world, policy, clock, disk, outcome, (seed, number), turns)
        for number in range(world.sandboxes)
    ]
    clock.run(lambda: len(outcome.wall_s) == len(rollouts))
    outcome.disk_users = disk.average()
    return outcome


class _Rollout:
    def __init__(
        self,
        number: int,
        world: World,
        policy: Policy,
        clock: Clock,
        disk: Disk,
        outcome: Outcome,
        seed: tuple[int, int],
        turns: Callable[[random.Random], list[Turn]] | None,
    ) -> None:
        self._world, self._policy, self._clock, self._disk, self._outcome = world, policy, clock, disk, outcome
        self._turns = (
            turns(random.Random(f"{seed} turns")) if turns else draw_turns(world, random.Random(f"{seed} turns"))
        )
        self._fate = random.Random(f"{seed} failures")
        self._chance = random.Random(f"{seed} starts")
        self._begun = random.Random(f"{seed} begin").uniform(0.0, 30.0)
        self._done: list[Turn] = []
        self._saved = 0  # tool calls in the newest checkpoint
        self._saved_bytes = 0.0
        self._saved_at = self._begun
        self._has_checkpoint = False
        self._writing: Process | None = None
        self._tool: Process | None = None
        self._recovery: Process | None = None
        self._over = False
        clock.at(self._begun, self._start)

    def _start(self) -> None:
        self._next_failure()
        Process(self._clock, self._disk, self._live())

    # -- the rollout -----------------------------------------------------------------------------------------------
    def _live(self) -> Body:
        for number, turn in enumerate(self._turns):
            if self._recovery is None and self._done:
                self._decide(turn, len(self._turns) - number)
            yield turn.bubble_s
            self._policy.bubble(turn.bubble_s)
            if self._writing is not None and not self._writing.done.happened:
                waits = self._clock.now
                yield self._writing.done
                self._outcome.exposed_s += self._clock.now - waits
            self._writing = None
            while True:
                if self._recovery is not None:
                    yield self._recovery.done
                    continue
                begun = self._clock.now
                self._tool = Process(self._clock, self._disk, _tool(turn))
                if (yield self._tool.done) == "ok":
                    break
            self._tool = None
            self._policy.action(self._clock.now - begun)
            self._done.append(turn)
        self._over = True
        self._outcome.wall_s.append(self._clock.now - self._begun)

    def _decide(self, turn: Turn, left: int) -> None:
        speed = self._world.bytes_per_s if self._world.waits_for_disk else self._world.memory_bytes_per_s
        restore = self._world.restore_s + turn.memory_bytes / speed
        back = self._world.restore_s + self._saved_bytes / speed
        redo = sum(each.tool_s for each in self._done[self._saved :])
        passed = self._clock.now - self._begun
        average = passed / max(1, len(self._turns) - left)
        decision = self._policy.decide(
            Situation(
                actions_since=len(self._done) - self._saved,
                redo_s=(back if self._has_checkpoint else math.exp(self._world.start[0])) + redo,
                restore_s=restore,
                since_s=self._clock.now - self._saved_at,
                nbytes=turn.memory_bytes,
                others=max(self._disk.average(), self._disk.active),
                remaining_s=average * max(1.0, sum(self._world.rounds) / 2 - len(self._done)),
            )
        )
        if decision.take:
            self._writing = Process(self._clock, self._disk, self._checkpoint(turn.memory_bytes, len(self._done)))

    def _checkpoint(self, nbytes: float, holds: int) -> Body:
        begun = self._clock.now
        try:
            yield self._world.freeze_s
            if self._world.waits_for_disk:
                yield from self._write(nbytes)
            else:
                yield nbytes / self._world.memory_bytes_per_s
                Process(self._clock, self._disk, self._write(nbytes))
            self._outcome.checkpoints += 1
            self._policy.cost(self._clock.now - begun, nbytes)
            self._saved, self._saved_bytes, self._saved_at, self._has_checkpoint = holds, nbytes, begun, True
        finally:  # also when a failure cuts it off
            self._outcome.checkpoint_s += self._clock.now - begun

    def _write(self, nbytes: float) -> Body:
        begun = self._clock.now
        yield Write(nbytes)
        self._policy.written(self._clock.now - begun, nbytes)

    # -- failures ----------------------------------------------------------------------------------------------------
    def _next_failure(self) -> None:
        self._clock.at(self._clock.now + self._fate.expovariate(1.0 / self._world.mtbf_s), self._fail)

    def _fail(self) -> None:
        if self._over:
            return
        self._next_failure()
        self._outcome.failures += 1
        self._policy.failure()
        for process in (self._writing, self._recovery, self._tool):
            if process is not None:
                process.stop()
        begun = self._clock.now
        self._recovery = mine = Process(self._clock, self._disk, self._recover())

        def recovered(how: str) -> None:
            self._outcome.recovery_s += self._clock.now - begun
            if self._recovery is mine:
                self._recovery = None

        mine.done.waiting.insert(0, recovered)

    def _recover(self) -> Body:
        if self._has_checkpoint:
            yield self._world.restore_s
            if self._world.waits_for_disk:
                yield Write(self._saved_bytes)
            else:
                yield self._saved_bytes / self._world.memory_bytes_per_s
        else:
            yield self._chance.lognormvariate(*self._world.start)
        for turn in self._done[self._saved if self._has_checkpoint else 0 :]:
            yield turn.tool_s
            yield Write(turn.tool_bytes)


def _tool(turn: Turn) -> Body:
    yield turn.tool_s
    yield Write(turn.tool_bytes)


def scaled(world: World, by: float) -> World:
    """The same world with every time `by` times as long, for runs that must be shorter."""
    shift = math.log(by)
    return replace(
        world,
        mtbf_s=world.mtbf_s * by,
        turn=(world.turn[0] + shift, world.turn[1]),
        tool=(world.tool[0] + shift, world.tool[1]),
        tool_limit_s=world.tool_limit_s * by,
        start=(world.start[0] + shift, world.start[1]),
    )
