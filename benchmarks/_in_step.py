"""Sandboxes whose turns begin and end together, so that all want a checkpoint at the same moment.

  aware  the policy as it is: what a dump costs the others is in its price, so a checkpoint waits until it is alone
  blind  the same without that: as many dump at once as `sandbox.max_dumps` allows

Rollouts meet at a barrier before each turn. Turns are waits with the published lengths, scaled; every rollout has the
same ones. Failures are assumed to come at a constant rate that makes a checkpoint worth its price, and none comes.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from belayer import events as ev
from belayer.checkpoint.policy import Adaptive, Learned
from belayer.checkpoint.predictors import Contention, FailureRate
from belayer.verify import verify_run

from ._eta import Eta
from ._models import Model
from ._paced import PACE, PacedRun
from ._paired import series
from ._rollout_overhead import Seen, run_config
from ._turns import RIGHT, TURN, Shape, lengths, solve

SHAPES = {True: Shape(5, 5, (4, 4), 0.1), False: Shape(8, 8, (10, 10), 0.1)}
ROUNDS = {True: 1, False: 2}
TOOL_S = 0.3
WRITTEN = 1 << 20
MTBF_S = 100.0


class Blind(Contention):
    """Does not care about others."""

    def delay_s(self, cost_s: float, running: int) -> float:
        return 0.0


class Lived(msgspec.Struct):
    """One batch in one arm. `overlap_s`: time in which more than one dump ran; `at_once`: how many at most."""

    wall_s: float
    at_once: int
    overlap_s: float
    checkpoints: dict[str, Any]
    wrong: int
    findings: int


def policy(aware: bool) -> Adaptive:
    """`adaptive` with a known failure rate, with or without a price for the delay of others."""
    learned = Learned()
    learned.failures = FailureRate(MTBF_S, worth=1e6)
    if not aware:
        learned.contention = Blind()
    return Adaptive(learned=learned)


def in_step(models: dict[str, Model], quick: bool, *, scale: float | None = None) -> dict[str, Any]:
    """One cell: both arms in turn on the same turns."""
    shape = SHAPES[quick]
    if scale is not None:
        shape = msgspec.structs.replace(shape, scale=scale)
    arms: dict[str, list[Lived]] = {"aware": [], "blind": []}
    eta = Eta("overhead, in step", 2 * ROUNDS[quick])
    for number in range(ROUNDS[quick]):
        for arm in ("aware", "blind") if number % 2 == 0 else ("blind", "aware"):
            one = asyncio.run(live(models["tiny"], shape, arm == "aware", number))
            arms[arm].append(one)
            eta(f"{arm}: {one.wall_s:.1f} s, {one.at_once} at once, hidden {one.checkpoints['hidden'] or 0:.1%}")
    walls = {arm: [one.wall_s for one in each] for arm, each in arms.items()}
    return {
        "workload": f"in step, scale {shape.scale:g}: {shape.rollouts} x {shape.turns[0]} turns, all at once",
        "subject": series(walls["aware"]),
        "baselines": {"blind": series(walls["blind"])},
        "ratios": {"blind": sum(walls["blind"]) / sum(walls["aware"])},
        "arms": {arm: _sums(each) for arm, each in arms.items()},
        "checks": {
            "state_wrong": sum(one.wrong for each in arms.values() for one in each),
            "inconsistent": sum(one.findings for each in arms.values() for one in each),
        },
    }


async def live(model: Model, shape: Shape, aware: bool, seed: int) -> Lived:
    """One batch. All rollouts run at the same time: `shape.slots` is at least `shape.rollouts`."""
    seen, dumps = Seen(), list[tuple[float, float]]()
    barrier = asyncio.Barrier(shape.rollouts)
    count = shape.turns[0]
    turns = lengths(count, TURN, random.Random(f"in step {seed}"), float("inf"))
    steps = [[max(1, round(each * shape.scale * PACE)), TOOL_S, WRITTEN] for each in turns]

    def watch(event: ev.Event) -> None:
        if event.kind == ev.CHECKPOINT:
            dumps.append((event.data["start"], event.data["start"] + event.data["wall_s"]))

    async def one(rollout: Any) -> float:
        return await solve(_Together(rollout, barrier.wait))

    with tempfile.TemporaryDirectory(prefix="belayer-bench-") as name:
        config = run_config(model, shape)
        async with await PacedRun.open(Path(name) / "run", config, sink=ev.fan_out(seen, watch)) as run:
            run._policy = policy(aware)
            tasks = [{"number": number, "steps": steps} for number in range(shape.rollouts)]
            began, wrong = time.perf_counter(), 0
            async for each in run.rollouts(one, tasks, name="s"):
                wrong += each.reward < RIGHT
                run.acknowledge(each)
            wall_s = time.perf_counter() - began
        findings = len(verify_run(Path(name) / "run").findings)
    at_once, overlap_s = overlap(dumps)
    return Lived(wall_s, at_once, overlap_s, seen.figures(), wrong, findings)


class _Together:
    """A rollout whose turns begin when all are there."""

    def __init__(self, rollout: Any, meet: Callable[[], Any]) -> None:
        self._rollout, self._meet = rollout, meet
        self.task, self.sandbox, self.observe = rollout.task, rollout.sandbox, rollout.observe

    async def generate(self, **asked: Any) -> Any:
        await self._meet()
        return await self._rollout.generate(**asked)


def overlap(spans: list[tuple[float, float]]) -> tuple[int, float]:
    """(how many at most, seconds with more than one) of spans of time."""
    edges = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    most = running = 0
    shared, last = 0.0, 0.0
    for at, step in edges:
        shared += (at - last) * (running > 1)
        running, last = running + step, at
        most = max(most, running)
    return most, shared


def _sums(each: list[Lived]) -> dict[str, Any]:
    names = ("taken", "skipped", "abandoned", "seconds", "exposed_s", "queued_s")
    sums = {name: sum(one.checkpoints[name] for one in each) for name in names}
    return sums | {
        "at_once": max(one.at_once for one in each),
        "overlap_s": sum(one.overlap_s for one in each),
        "exposed_of_dumping": sums["exposed_s"] / sums["seconds"] if sums["seconds"] else 0.0,
    }
