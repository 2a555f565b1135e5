"""One cell of `belayer bench worker`: a number of requests with prefixes of one length, killed again and again."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from belayer.config import EngineConfig
from belayer.engine import Engine, GenerationRequest, Sampling
from belayer.engine.exactness import is_exact

from ._models import Model
from ._standbys import BareStandby, cold_start
from ._tape import KILL_AT, Tape, Watch, run

READY_S = 180.0
FLOOR_EXTRA_S = 0.060  # what a recovery may cost beside its prefill


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """See workloads/worker.toml."""

    model: str
    requests: int
    prefix: int
    sampling: str
    rounds: int
    kills: int
    cold: int
    adopt: bool = False
    claims: dict[str, float] = {}
    quick: bool = False


class Protected(msgspec.Struct, frozen=True):
    """A running engine and what watches it."""

    engine: Engine
    watch: Watch


class Stage(msgspec.Struct, frozen=True):
    """The processes that a group of cells shares. A baseline that cannot run here is a text: the reason."""

    model: Model
    config: EngineConfig
    subject: Protected
    image: Protected | str
    bare: BareStandby | str
    logs: Path


class _Samples:
    def __init__(self) -> None:
        self.subject: list[float] = []
        self.phases: list[dict[str, float]] = []
        self.armed: list[float] = []  # from the moment on at which the shadow became the worker
        self.prefixes: list[int] = []
        self.floor: list[float] = []
        self.how: Counter[str] = Counter()
        self.baselines: dict[str, list[float]] = {}
        self.ratios: dict[str, list[float]] = {}
        self.checks: Counter[str] = Counter()


async def measure(cell: Cell, stage: Stage, deadline: float) -> dict[str, Any]:
    """The cell's figures, after its rounds of: kills of the subject, the floor, every baseline.

    No round but the first begins when it would, to judge by the one before, end after `deadline` (monotonic seconds).
    """
    engine = stage.subject.engine
    await engine.wait_standby(READY_S)
    work = _requests(cell, stage.model)
    reference = await run(engine, work, Tape())
    samples = _Samples()
    longest = 0.0
    for number in range(cell.rounds):
        began = time.monotonic()
        if number > 0 and began + longest > deadline:
            break
        await _round(cell, stage, reference, samples, number)
        longest = max(longest, time.monotonic() - began)
    return _figures(cell, stage, samples)


async def _round(cell: Cell, stage: Stage, reference: Tape, samples: _Samples, number: int) -> None:
    subject: list[float] = []
    for _ in range(cell.kills):
        tape = await _kill(cell, stage, stage.subject, samples)
        subject.append(tape.recovery_s)
        samples.checks.update(tape.compare(reference))
    # the next shadow is up and idle from here on: what follows has the machine to itself
    await stage.subject.engine.wait_standby(READY_S)
    samples.subject += subject
    samples.floor.append(await _floor(cell, stage, tape, number))
    this_round: dict[str, float] = {}

    if not isinstance(stage.image, str):
        await stage.image.engine.wait_standby(READY_S)
        killed = await _kill(cell, stage, stage.image)
        samples.checks.update(killed.compare(reference))
        this_round["image_standby"] = killed.recovery_s
    resumed = _resumed(cell, stage.model, tape)
    if not isinstance(stage.bare, str):
        bare = Tape(tape.tokens_at_kill, tape.logprobs_at_kill)
        this_round["standby_without_retained_weights"] = await stage.bare.take_over(resumed, bare)
        samples.checks.update(bare.compare(reference))
    if number < cell.cold:
        cold = Tape(tape.tokens_at_kill, tape.logprobs_at_kill)
        logs = stage.logs / f"cold-{cell.requests}-{cell.prefix}-{number}"
        took_s, warm_up_s = await cold_start(stage.config, _resumed(cell, stage.model, tape), cold, logs)
        this_round["cold_start"] = took_s
        this_round["cold_start_without_warm_up"] = took_s - warm_up_s
        samples.checks.update(cold.compare(reference))
    for name, took_s in this_round.items():
        samples.baselines.setdefault(name, []).append(took_s)
        samples.ratios.setdefault(name, []).append(took_s / statistics.median(subject))


async def _kill(cell: Cell, stage: Stage, target: Protected, samples: _Samples | None = None) -> Tape:
    """Kill the worker in the middle of a run; the run goes to its end, and the next shadow is waited for."""
    await target.engine.wait_standby(READY_S)
    tape = Tape(kill=target.engine)
    await run(target.engine, _requests(cell, stage.model), tape)
    await target.engine.wait_standby(READY_S)
    if samples is not None:
        watch = target.watch
        samples.phases.append({"detect_s": watch.detected_at - tape.killed_at, **watch.phases})
        samples.armed.append(watch.armed_at - watch.promoted_at)
        samples.prefixes.append(sum(len(ids) for ids in tape.tokens_at_kill.values()))
        samples.how[watch.how] += 1
    return tape


async def _floor(cell: Cell, stage: Stage, killed: Tape, number: int) -> float:
    """Prefill of the very same prefixes by the warm, idle worker: seconds until each has one more token.

    Their first token is another one each time: nothing of them is cached then, and the work is the same.
    """
    floor = []
    for request in _resumed(cell, stage.model, killed):
        prefix = request.prompt_ids + request.resume_ids
        prefix[0] = (prefix[0] + 17 * (number + 1)) % stage.model.vocabulary
        sampling = msgspec.structs.replace(request.sampling, max_tokens=1)
        floor.append(GenerationRequest(id=request.id, prompt_ids=prefix, sampling=sampling))
    began = time.monotonic()
    tape = await run(stage.subject.engine, floor, Tape())
    return max(tape.first.values()) - began


def _requests(cell: Cell, model: Model) -> list[GenerationRequest]:
    """Prompts that share no prefix."""
    sampled = {"greedy": (0.0, 0.0), "sampled": (1.0, 1.0), "mixed": (0.0, 1.0)}[cell.sampling]
    length = cell.prefix - KILL_AT
    return [
        GenerationRequest(
            id=f"r{index}",
            prompt_ids=[(7 * position + 131 * index) % model.vocabulary for position in range(length)],
            sampling=Sampling(max_tokens=model.max_tokens, seed=index, temperature=sampled[index % 2]),
        )
        for index in range(cell.requests)
    ]


def _resumed(cell: Cell, model: Model, killed: Tape) -> list[GenerationRequest]:
    """The requests as they were at the kill."""
    requests = _requests(cell, model)
    for request in requests:
        request.resume_ids = killed.tokens_at_kill[request.id]
    return requests


def _figures(cell: Cell, stage: Stage, samples: _Samples) -> dict[str, Any]:
    exact = is_exact(stage.config)
    # of an engine that is not exact only this is promised: a continuation of the same prefix
    promised = samples.checks if exact else {n: c for n, c in samples.checks.items() if not n.endswith("_changed")}
    baselines: dict[str, Any] = {name: _series(values) for name, values in samples.baselines.items()}
    for name, process in (("image_standby", stage.image), ("standby_without_retained_weights", stage.bare)):
        if isinstance(process, str):
            baselines[name] = {"skipped": process}
    if not samples.baselines.get("cold_start"):
        baselines["cold_start"] = {"skipped": "measured in another cell"}
    floor = statistics.median(samples.floor)
    recovery = statistics.median(samples.subject)
    generated = round(statistics.median(samples.prefixes) / cell.requests, 1)
    return {
        "workload": (
            f"{cell.model} ({stage.model.parameters / 1e6:.0f}M {stage.model.dtype}), "
            f"{cell.requests} x {cell.prefix} tokens, {cell.sampling}{', blocks adopted' if cell.adopt else ''}"
        ),
        "prefix": f"{cell.prefix - KILL_AT} prompt tokens and {generated:g} generated ones at the kill",
        "model": cell.model,
        "requests": cell.requests,
        "prefix_tokens": cell.prefix,
        "sampling": cell.sampling,
        "adopt": cell.adopt,
        "subject": _series(samples.subject) | {"phases_s": _medians(samples.phases), "how": dict(samples.how)},
        "baselines": dict(sorted(baselines.items())),
        "ratios": {name: statistics.median(values) for name, values in samples.ratios.items()},
        "prefill_floor": _series(samples.floor),
        "against_floor": recovery / (floor + FLOOR_EXTRA_S),
        "next_shadow_armed": _series(samples.armed),
        "claims": _claims(cell, samples, floor),
        "changed": {name: count for name, count in samples.checks.items() if name.endswith("_changed")},
        "checks": dict(promised),
    }


def _claims(cell: Cell, samples: _Samples, floor: float) -> list[dict[str, Any]]:
    """What the cell is held against, and whether it kept it; a claim whose baseline did not run is not decided."""
    recovery, base = statistics.median(samples.subject), samples.baselines
    detect = statistics.median(phases["detect_s"] for phases in samples.phases)
    armed = statistics.median(samples.armed)
    found: list[dict[str, Any]] = []

    def hold(text: str, value: float | None, limit: float, *, at_least: bool) -> None:
        kept = None if value is None else (value >= limit if at_least else value <= limit)
        found.append({"claim": text, "value": value, "limit": limit, "kept": kept})

    for name, limit in cell.claims.items():
        match name:
            case "cold_start":
                ratios = samples.ratios.get(name)
                hold(
                    "times faster than a cold start",
                    statistics.median(ratios) if ratios else None,
                    limit,
                    at_least=True,
                )
            case "image_standby":
                pairs = list(zip(base.get("cold_start", ()), base.get("image_standby", ()), strict=False))
                value = statistics.median(cold / image for cold, image in pairs) if pairs else None
                hold("image standby, times faster than a cold start", value, limit, at_least=True)
            case "detect_s":
                hold("seconds until the exit is detected", detect, limit, at_least=False)
            case "next_shadow_armed_s":
                hold("seconds from the promotion until the next shadow is armed", armed, limit, at_least=False)
            case "floor":
                value = recovery / (floor + FLOOR_EXTRA_S)
                hold(f"recovery / (prefill floor + {FLOOR_EXTRA_S * 1e3:g} ms)", value, limit, at_least=False)
            case _:
                raise ValueError(f"no claim is called {name}")
    return found


def _series(values: list[float]) -> dict[str, Any]:
    return {"median_s": statistics.median(values), "samples_s": values}


def _medians(phases: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for sample in phases for name in sample)
    return {name: statistics.median(sample[name] for sample in phases if name in sample) for name in names}
