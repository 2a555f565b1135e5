"""Whole rollouts with Belayer's protection on and off: what does it cost while nothing fails?

Subject: `Run` as a user runs it: journal, keepers, sandbox checkpoints under the model's turns by the policy.
Baseline `unprotected`: the same function on the same engine and in sandboxes of the same store, without run, journal,
keeper, health checks and checkpoints. Each pair runs one batch by both, in ABBA order; every pair has another batch.

  waits      turns are waits behind the engine's own hook, as with a GPU elsewhere: no processor here thinks
  inference  turns are real ones of the real engine, as many tokens as it makes in that time: checkpoints and the model
             fight over the processors of this machine

The real engine's own cost (owner, sampler) is in both sides of `inference`; `belayer bench overhead --engine` measures
it.
"""

from __future__ import annotations

import asyncio
import gc
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from belayer import events as ev
from belayer.checkpoint.predictors import LogNormal, expected_exposed
from belayer.config import Config, EngineConfig
from belayer.engine import GenerationRequest, Sampling
from belayer.journal import Journal
from belayer.run import Run
from belayer.seeds import derive_seed
from belayer.trajectory import Trajectory
from belayer.verify import verify_run

from ._calibration import Calibration
from ._eta import Eta
from ._models import Model, folder
from ._paced import PACE, PacedRun
from ._paired import compare, series
from ._turns import TURN, Shape, Unprotected, solve, tasks

TARGET = 0.01
TARGET_HIDDEN = 0.99
SHAPES = {True: Shape(5, 5, (2, 2), 0.05), False: Shape(8, 8, (3, 3), 0.2)}
PAIRS = {True: 2, False: 10}
OTHER_SCALES = (0.05, 0.02)  # a protected batch of each, for the share that is hidden
SCALES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
READY_S = 180.0
MTBF_S = 3600.0


class Side(msgspec.Struct):
    """One batch by one side. `trajectories` are by number of the task: all tokens, and the reward."""

    wall_s: float
    cpu_s: float
    rollout_s: float
    trajectories: list[tuple[list[int], float]]


class Seen:
    """What the subject's events said since the last `clear`. Seconds are sums."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.taken = self.skipped = self.abandoned = self.faults = 0
        self.wall_s: list[float] = []
        self.exposed_s = self.frozen_s = self.queued_s = 0.0

    def __call__(self, event: ev.Event) -> None:
        if event.kind == ev.CHECKPOINT:
            self.taken += 1
            self.wall_s.append(event.data["wall_s"])
            self.exposed_s += event.data["exposed_s"]
            self.frozen_s += event.data["frozen_s"]
            self.queued_s += event.data.get("queued_s", 0.0)
        elif event.kind == ev.CHECKPOINT_SKIPPED:
            self.abandoned += bool(event.data["abandoned"])
            self.skipped += not event.data["abandoned"]
        elif event.kind == ev.FAULT_DETECTED:
            self.faults += 1

    @property
    def hidden(self) -> float | None:
        """Share of the checkpoints' time, with that in the host's queue, that no rollout waited for."""
        return 1.0 - self.exposed_s / (sum(self.wall_s) + self.queued_s) if self.taken else None

    def figures(self) -> dict[str, Any]:
        return {
            "taken": self.taken,
            "skipped": self.skipped,
            "abandoned": self.abandoned,
            "seconds": sum(self.wall_s),
            "median_s": statistics.median(self.wall_s) if self.wall_s else None,
            "frozen_s": self.frozen_s,
            "queued_s": self.queued_s,
            "exposed_s": self.exposed_s,
            "hidden": self.hidden,
        }


class Timed:
    """Seconds that a journal's `record` takes."""

    def __init__(self, journal: Journal) -> None:
        self.seconds, self.records = 0.0, 0
        self._record = journal.record
        journal.record = self.record

    def record(self, record: Any) -> None:
        begun = time.perf_counter()
        self._record(record)
        self.seconds += time.perf_counter() - begun
        self.records += 1


def rollout_overhead(
    turns: str, models: dict[str, Model], quick: bool, *, scale: float | None, policy: str
) -> dict[str, Any]:
    """One cell; `turns` is "waits" or "inference"."""
    shape = SHAPES[quick]
    if scale is not None:
        shape = msgspec.structs.replace(shape, scale=scale)
    return asyncio.run(_measure(turns, models["tiny"], shape, quick, policy))


async def _measure(turns: str, model: Model, shape: Shape, quick: bool, policy: str) -> dict[str, Any]:
    seen, calibration = Seen(), Calibration(prior_s=MTBF_S * shape.scale)
    with tempfile.TemporaryDirectory(prefix="belayer-bench-") as name:
        config = run_config(model, shape, policy)
        kind = PacedRun if turns == "waits" else Run
        async with await kind.open(Path(name) / "run", config, sink=ev.fan_out(seen, calibration)) as run:
            assert run.engine is not None
            journal = Timed(run.journal)
            rate = PACE if turns == "waits" else await _token_rate(run, shape.slots)
            cell = await _pairs(run, shape, rate, journal, seen, turns, quick)
        verdict = verify_run(Path(name) / "run")
        if turns == "waits":
            cell["hidden_by_scale"] = await _scales(Path(name), model, shape, quick)
        cell["checks"]["inconsistent"] = len(verdict.findings)
        cell["checks"]["undelivered"] = verdict.rollouts - verdict.delivered
    cell["calibration"] = calibration.figures()
    return cell


def run_config(model: Model, shape: Shape, policy: str = "adaptive") -> Config:
    """That of all these rollouts."""
    engine = EngineConfig(
        model=folder(model),
        max_model_len=model.max_model_len,
        max_num_seqs=max(shape.slots, model.max_num_seqs),
        kv_bytes=model.kv_bytes,
        images=False,  # none is to be built while this is measured
    )
    limits = {
        "run": {"max_concurrent": shape.slots},
        "sandbox": {"memory_bytes": 256 << 20},
        # what fails once an hour fails as often in the scaled hour
        "policy": {"name": policy, "mtbf_s": MTBF_S * shape.scale},
    }
    return Config.model_validate(limits).model_copy(update={"engine": engine})


async def _pairs(
    run: Run, shape: Shape, rate: float, journal: Timed, seen: Seen, turns: str, quick: bool
) -> dict[str, Any]:
    subject: list[Side] = []
    baseline: list[Side] = []
    checks = {"trajectories_changed": 0, "state_wrong": 0, "faults": 0}
    journal_s: list[float] = []
    exposed: list[float] = []
    eta = Eta(f"overhead, {turns}", PAIRS[quick])
    warm = msgspec.structs.replace(shape, turns=(1, 1), scale=shape.scale / 4)
    await _protected(run, tasks(warm, rate, -1), "warm")
    await _unprotected(run, tasks(warm, rate, -1), "warm")
    seen.clear()
    for number in range(PAIRS[quick]):
        batch = tasks(shape, rate, number)
        for side in ("subject", "baseline") if number % 2 else ("baseline", "subject"):
            if side == "baseline":
                baseline.append(await _unprotected(run, batch, f"p{number}"))
                continue
            before, waited = journal.seconds, seen.exposed_s
            subject.append(await _protected(run, batch, f"p{number}"))
            journal_s.append(journal.seconds - before)
            exposed.append(seen.exposed_s - waited)
        pairs = list(zip(subject[-1].trajectories, baseline[-1].trajectories, strict=True))
        checks["trajectories_changed"] += sum(a != b for a, b in pairs)
        checks["state_wrong"] += sum(min(a[1], b[1]) < 0.5 for a, b in pairs)
        eta(f"protected {subject[-1].wall_s:.2f} s, unprotected {baseline[-1].wall_s:.2f} s")
    checks["faults"] = seen.faults
    walls = [side.wall_s for side in subject], [side.wall_s for side in baseline]
    steps = shape.rollouts * shape.turns[0]
    return {
        "workload": (
            f"rollouts, turns by {turns}, scale {shape.scale:g}: {shape.rollouts} x {shape.turns[0]} turns, "
            f"{shape.slots} at a time, policy {run.config.policy.name}"
        ),
        "turns": turns,
        "scale": shape.scale,
        "tokens_per_s": rate,
        "subject": series(walls[0])
        | {
            "phases_s": {
                "journal_s": statistics.median(journal_s),
                "checkpoints_exposed_s": statistics.median(exposed),
                "driver_cpu_s": statistics.median(side.cpu_s for side in subject),
            }
        },
        "baselines": {
            "unprotected": series(walls[1]) | {"driver_cpu_s": statistics.median(side.cpu_s for side in baseline)}
        },
        "ratios": {"unprotected": statistics.median(b / s for s, b in zip(*walls, strict=True))},
        "overhead": {
            "unprotected": compare(*walls, TARGET),
            "unprotected, summed over rollouts": compare(
                [side.rollout_s for side in subject], [side.rollout_s for side in baseline], TARGET
            ),
        },
        "journal": {
            "seconds_per_batch": statistics.median(journal_s),
            "s_per_record": journal.seconds / journal.records,
        },
        "checkpoints": seen.figures() | {"turns": steps * PAIRS[quick]},
        "checks": checks,
    }


async def _protected(run: Run, batch: list[dict[str, Any]], name: str) -> Side:
    found: dict[int, tuple[list[int], float]] = {}
    rollout_s = 0.0

    async def timed(rollout: Any) -> float:
        nonlocal rollout_s
        begun = time.perf_counter()
        try:
            return await solve(rollout)
        finally:
            rollout_s += time.perf_counter() - begun

    def keep(trajectory: Trajectory) -> None:
        found[trajectory.task["number"]] = (trajectory.token_ids, trajectory.reward)
        run.acknowledge(trajectory)

    await _settle()
    began, cpu = time.perf_counter(), time.process_time()
    async for trajectory in run.rollouts(timed, batch, name=name):
        keep(trajectory)
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    return Side(wall_s, cpu_s, rollout_s, [found[task["number"]] for task in batch])


async def _unprotected(run: Run, batch: list[dict[str, Any]], name: str) -> Side:
    sandboxes, engine = run.sandboxes, run.engine
    assert sandboxes is not None and engine is not None
    slots = asyncio.Semaphore(run.config.run.max_concurrent)
    rollout_s = 0.0

    async def one(index: int, task: dict[str, Any]) -> tuple[list[int], float]:
        nonlocal rollout_s
        seed = derive_seed(run.config.run.seed, f"{name}-{index}-0")  # that of the protected rollout
        seeds = [derive_seed(seed, f"turn {turn}") for turn in range(len(task["steps"]))]
        key = f"plain-{name}-{index}"
        async with slots:
            begun = time.perf_counter()
            sandbox = await sandboxes.create(key)
            try:
                rollout = Unprotected(key, task, seeds, engine, sandbox)
                reward = await solve(rollout)
                rollout_s += time.perf_counter() - begun
            finally:
                await engine.end_trajectory(key)
                await sandboxes.discard(key)
        return rollout.context, reward

    await _settle()
    began, cpu = time.perf_counter(), time.process_time()
    found = await asyncio.gather(*(one(index, task) for index, task in enumerate(batch)))
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    return Side(wall_s, cpu_s, rollout_s, found)


async def _settle() -> None:
    """Neither side pays for what the other has left to the garbage collector or to the background."""
    gc.collect()
    await asyncio.sleep(0.3)


async def _token_rate(run: Run, slots: int) -> float:
    """Tokens a second of each of `slots` requests together, measured."""
    engine = run.engine
    assert engine is not None
    await engine.wait_standby(READY_S)
    count = 160
    found = []
    for attempt in range(3):
        requests = [
            GenerationRequest(
                id=f"rate-{attempt}-{index}",
                prompt_ids=[(7 * position + index) % 251 for position in range(128)],
                sampling=Sampling(max_tokens=count, temperature=1.0, seed=index),
            )
            for index in range(slots)
        ]
        began = time.perf_counter()
        await asyncio.gather(*(engine.generate(request, lambda chunk: None) for request in requests))
        found.append(count / (time.perf_counter() - began))
    return max(found[1:])


async def _scales(folder: Path, model: Model, shape: Shape, quick: bool) -> dict[str, Any]:
    """How much of the checkpoints' time is hidden if one is taken at every turn: live at some scales, computed for all.

    Computed is the share under the published distribution, from the costs measured here.
    """
    measured: dict[float, dict[str, Any]] = {}
    costs: list[float] = []
    for scale in (shape.scale,) if quick else (shape.scale, *OTHER_SCALES):
        seen, other = Seen(), msgspec.structs.replace(shape, scale=scale)
        name = f"scale-{scale:g}"
        async with await PacedRun.open(folder / name, run_config(model, other, "always"), sink=seen) as run:
            await _protected(run, tasks(other, PACE, 1000), name)
        measured[scale] = seen.figures()
        costs += seen.wall_s
    return {
        "policy": "always",
        "measured": {f"{scale:g}": measured[scale] for scale in sorted(measured)},
        "computed": {f"{scale:g}": hidden_if_always(costs, scale) for scale in SCALES} if costs else {},
    }


def hidden_if_always(costs: Sequence[float], scale: float) -> float:
    """Share of checkpoint seconds under turns of the published distribution times `scale`."""
    bubble = LogNormal(math.exp(TURN[0]) * scale, TURN[1])
    return 1.0 - sum(expected_exposed(cost, bubble) for cost in costs) / sum(costs)
