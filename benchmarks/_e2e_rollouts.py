"""Rollouts while environments die at a constant rate: Belayer, starting anew, and nothing failing, on the same batch.

  no_faults  Belayer, and nothing fails
  belayer    sandboxes are killed at random; checkpoints, restore and replay bring each back
  restart    the same kills; a rollout whose sandbox died is started again from nothing: no checkpoints, no replay
             (policy.name = "never", recovery.infra_retries = 0), as often as it takes

Turns are waits (`_paced.py`), tool calls are real commands in real sandboxes. A new container is quick here; where it
takes the published 23 s, starting anew costs more than is seen. The function and its seeds are the same in all arms, so
whatever a trajectory holds must be the same too.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from belayer import events as ev
from belayer.config import Config
from belayer.errors import RolloutFailed
from belayer.observe.survivorship import LengthClass, survivorship
from belayer.trajectory import trajectory
from belayer.verify import verify_run

from ._eta import Eta
from ._models import Model
from ._paced import PACE, PacedEngine, PacedRun
from ._paired import bootstrap, paired_p, series, unpaired_p
from ._rollout_overhead import run_config
from ._strikes import Strikes
from ._turns import RIGHT, Shape, solve, tasks

TARGET = 0.015
SHAPES = {True: Shape(6, 6, (3, 6), 0.05), False: Shape(8, 8, (10, 20), 0.1)}
# expected kills of a rollout that takes as long as undisturbed. Starting anew takes (e^x - 1) / x times as long: +17%,
# and with 0.73 the published +48.7%
RATES = {True: (0.73,), False: (0.3, 0.73)}
ROUNDS = {True: 1, False: 2}
ARMS = ("no_faults", "belayer", "restart")
PATIENCE = 100


class Lived(msgspec.Struct):
    """One batch in one arm. Of each delivered task: its reward, tokens of the model and turns."""

    wall_s: float
    rollout_s: dict[int, float]
    found: dict[int, tuple[float, list[int], int]]
    struck: int
    restores: int
    restarts: int
    replayed: int
    tokens_made: int
    tokens_delivered: int
    checkpoints: int
    seconds: dict[str, float]
    lost: int
    lengths: list[LengthClass]
    findings: int
    duplicated: int


class Watch:
    """Counts of the run's events."""

    def __init__(self) -> None:
        self.replayed = self.restores = self.checkpoints = 0
        names = ("restore", "replay", "checkpoints", "checkpoints_exposed")
        self.seconds: dict[str, float] = {name: 0.0 for name in names}

    def __call__(self, event: ev.Event) -> None:
        if event.kind == ev.RECOVERED and event.data["what"] == "sandbox":
            self.restores += 1
            self.replayed += event.data.get("replayed", 0)
            for phase in ("restore", "replay"):
                self.seconds[phase] += event.data["phases"].get(f"{phase}_s", 0.0)
        elif event.kind == ev.CHECKPOINT:
            self.checkpoints += 1
            self.seconds["checkpoints"] += event.data["wall_s"]
            self.seconds["checkpoints_exposed"] += event.data["exposed_s"]


def arm_config(config: Config, arm: str) -> Config:
    """The configuration of an arm: that of `restart` never restores anything. None gives up: budgets are wide."""
    budgets = {"infra_retries": 0 if arm == "restart" else PATIENCE, "attempts": PATIENCE, "breaker": 1_000_000}
    policy = {"name": "never"} if arm == "restart" else {}
    return config.model_copy(
        update={
            "policy": config.policy.model_copy(update=policy),
            "recovery": config.recovery.model_copy(update=budgets),
        }
    )


def rollouts_under_faults(model: Model, quick: bool, scale: float | None) -> list[dict[str, Any]]:
    """One cell for each rate of failures."""
    shape = SHAPES[quick]
    if scale is not None:
        shape = msgspec.structs.replace(shape, scale=scale)
    return asyncio.run(_sweep(model, shape, quick))


async def _sweep(model: Model, shape: Shape, quick: bool) -> list[dict[str, Any]]:
    plan = [("no_faults", 0.0)] + [(arm, rate) for rate in RATES[quick] for arm in ARMS[1:]]
    lived: dict[tuple[str, float], list[Lived]] = {each: [] for each in plan}
    eta = Eta("e2e", len(plan) * ROUNDS[quick])
    for number in range(ROUNDS[quick]):
        batch = tasks(shape, PACE, 5000 + number)
        mean_s = 0.0
        # what is not struck comes first: how long a rollout takes now says what a rate means now
        for arm, rate in plan[:1] + (plan[1:] if number % 2 == 0 else plan[:0:-1]):
            one = await live(model, shape, batch, arm, mean_s / rate if rate else None, seed=number)
            mean_s = mean_s or statistics.fmean(one.rollout_s.values())
            lived[arm, rate].append(one)
            eta(f"{arm}{f' at {rate:g} kills a rollout' if rate else ''}: {one.wall_s:.1f} s, {one.struck} kills")
    calm = lived["no_faults", 0.0]
    mean_s = statistics.fmean(seconds for one in calm for seconds in one.rollout_s.values())
    return [cell(shape, rate, mean_s, calm, lived["belayer", rate], lived["restart", rate]) for rate in RATES[quick]]


async def live(
    model: Model, shape: Shape, batch: list[dict[str, Any]], arm: str, mtbf_s: float | None, seed: int
) -> Lived:
    """Run one batch in one arm."""
    watch, rollout_s = Watch(), {}
    config = arm_config(run_config(model, shape), arm)
    began: dict[str, float] = {}

    async def timed(rollout: Any) -> float:
        began.setdefault(rollout.id, time.perf_counter())  # a later attempt goes on counting
        reward = await solve(rollout)
        rollout_s[rollout.task["number"]] = time.perf_counter() - began[rollout.id]
        return reward

    with tempfile.TemporaryDirectory(prefix="belayer-bench-") as name:
        async with await PacedRun.open(Path(name) / "run", config, sink=watch) as run:
            strikes = Strikes(run, mtbf_s or float("inf"), seed)
            striking = asyncio.create_task(strikes.run()) if mtbf_s else None
            start = time.perf_counter()
            try:
                async for each in run.rollouts(timed, batch, name="e"):
                    run.acknowledge(each)
            except RolloutFailed:
                pass  # counted below
            finally:
                wall_s = time.perf_counter() - start
                if striking is not None:
                    striking.cancel()
                    await asyncio.gather(striking, return_exceptions=True)
            histories = list(run.journal.histories.values())
            engine = run.engine
            assert isinstance(engine, PacedEngine)
        verdict = verify_run(Path(name) / "run")
    finished = [trajectory(history) for history in histories if history.finished]

    return Lived(
        wall_s=wall_s,
        rollout_s=rollout_s,
        found={each.task["number"]: (each.reward, each.token_ids, each.turns) for each in finished},
        struck=strikes.struck.total(),
        restores=watch.restores,
        restarts=sum(history.attempts - 1 for history in histories),
        replayed=watch.replayed,
        tokens_made=engine.generated,
        tokens_delivered=sum(sum(each.loss_mask) for each in finished),
        checkpoints=watch.checkpoints,
        seconds=watch.seconds,
        lost=len(batch) - len(finished),
        lengths=survivorship(histories),
        findings=len(verdict.findings),
        duplicated=verdict.delivered - len(finished),
    )


def cell(
    shape: Shape, rate: float, mean_s: float, calm: list[Lived], belayer: list[Lived], restart: list[Lived]
) -> dict[str, Any]:
    """The figures of one rate. Ratios are to no faults, except `ratios` (baseline to subject, as in every bench)."""
    arms = {"no_faults": calm, "belayer": belayer, "restart": restart}
    walls = {arm: [one.wall_s for one in each] for arm, each in arms.items()}
    mine, calmly = [one.found for one in belayer], [one.found for one in calm]
    return {
        "workload": f"{rate:g} kills a rollout: MTBF {mean_s / shape.scale / rate:.0f} s, scale {shape.scale:g}",
        "rate": rate,
        "mtbf_unscaled_s": mean_s / shape.scale / rate,
        "scale": shape.scale,
        "subject": series(walls["belayer"]),
        "baselines": {arm: series(walls[arm]) for arm in ("no_faults", "restart")},
        "ratios": {
            arm: statistics.median(b / s for s, b in zip(walls["belayer"], walls[arm], strict=True))
            for arm in ("no_faults", "restart")
        },
        "against_no_faults": {
            arm: {
                "wall": statistics.median(a / b for a, b in zip(walls[arm], walls["no_faults"], strict=True)),
                **rollout_ratio(calm, arms[arm]),
                "target": TARGET,
            }
            for arm in ("belayer", "restart")
        },
        "arms": {arm: _sums(each) for arm, each in arms.items()},
        "same": {arm: sameness(calm, arms[arm]) for arm in ("belayer", "restart")},
        "checks": {
            "lost": sum(one.lost for one in belayer),
            "duplicated": sum(one.duplicated for one in belayer),
            "trajectories_changed": sum(
                one.get(number) != other
                for one, kept in zip(mine, calmly, strict=True)
                for number, other in kept.items()
            ),
            "inconsistent": sum(one.findings for each in arms.values() for one in each),
            "state_wrong": sum(value[0] < RIGHT for one in mine for value in one.values()),
        },
    }


def rollout_ratio(calm: list[Lived], other: list[Lived]) -> dict[str, Any]:
    """Mean wall time of a rollout against the same ones undisturbed, and the 95% interval (rollouts are resampled)."""
    pairs = [
        (there.rollout_s[number], here.rollout_s[number])
        for here, there in zip(calm, other, strict=True)
        for number in here.rollout_s
        if number in there.rollout_s
    ]

    def ratio(sample: Sequence[tuple[float, float]]) -> float:
        return sum(a for a, _ in sample) / sum(b for _, b in sample)

    return {"rollouts": ratio(pairs), "interval": bootstrap(pairs, ratio), "pairs": len(pairs)}


def sameness(calm: list[Lived], other: list[Lived]) -> dict[str, Any]:
    """Do faults change what a trainer gets? Mean reward and length with and without, and the test's p.

    Paired by task (signs are flipped) as long as every task came through, else two groups are permuted.
    """
    before = {(i, n): found for i, one in enumerate(calm) for n, found in one.found.items()}
    after = {(i, n): found for i, one in enumerate(other) for n, found in one.found.items()}
    both = sorted(before.keys() & after.keys())
    paired = len(both) == len(before) == len(after)
    result: dict[str, Any] = {
        "compared": len(both),
        "identical": sum(before[key][:2] == after[key][:2] for key in both),
        "test": "paired, sign flips" if paired else "two groups, permuted",
    }
    for name, of in (("reward", lambda found: found[0]), ("length", lambda found: float(len(found[1])))):
        one, two = [of(before[key]) for key in sorted(before)], [of(after[key]) for key in sorted(after)]
        p = paired_p([b - a for a, b in zip(one, two, strict=True)]) if paired else unpaired_p(one, two)
        result[name] = {"without": statistics.fmean(one), "with": statistics.fmean(two) if two else None, "p": p}
    return result


def _sums(each: list[Lived]) -> dict[str, Any]:
    names = ("struck", "restores", "restarts", "replayed", "checkpoints", "lost", "tokens_made", "tokens_delivered")
    sums = {name: sum(getattr(one, name) for one in each) for name in names}
    return {
        **sums,
        "tokens_redone": sums["tokens_made"] - sums["tokens_delivered"],
        "seconds": {name: sum(one.seconds[name] for one in each) for name in each[0].seconds},
        "mean_rollout_s": statistics.fmean(s for one in each for s in one.rollout_s.values()),
        "survivorship": merged([one.lengths for one in each]),
    }


def merged(several: list[list[LengthClass]]) -> list[dict[str, Any]]:
    """Classes of all rounds together, shortest first."""
    found: dict[int, LengthClass] = {}
    for classes in several:
        for each in classes:
            into = found.setdefault(each.low, LengthClass(each.low, each.high))
            for name in ("rollouts", "delivered", "lost", "retried", "restored", "truncated"):
                setattr(into, name, getattr(into, name) + getattr(each, name))
    return [msgspec.to_builtins(found[low]) for low in sorted(found)]
