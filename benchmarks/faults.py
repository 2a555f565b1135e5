"""Fault campaigns: random faults on living systems under load; nothing may be lost, repeated, changed, stuck or left.

Without one of the two flags below: whole rollouts on a living engine and living sandboxes, struck at every failpoint of
the protocol by every kind of fault, the death of the driver and a full disk among them; see `_joint_campaign`.

`--engine`: SIGKILL, SIGSEGV, SIGABRT, SIGBUS and SIGSTOP of the worker, the same of its shadow, SIGKILL and SIGSTOP of
the owner, SIGKILL of the nursery, double faults, and kills at every failpoint of a weights update; at seeded random
moments, while six requests are always in flight. Every completion is compared, token by token and logprob by logprob,
with what the undisturbed engine says (float32). At the end nothing of the engine may be left on the host, and neither
descriptors nor memory may have grown.

`--sandbox`: sandboxes that hold everything a checkpoint must capture are killed and restored, and every state compared;
see `_sandbox_rounds`.

`--faults N` injects N faults (2,000; engine: 1,000; sandboxes: 500), `--seed S` others. A campaign that was stopped
goes on with `--resume`.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from belayer.config import EngineConfig
from belayer.errors import ConfigError
from belayer.faults.engine_kinds import WEIGHTS

from . import _joint_report, _sandbox_rounds
from ._fault_campaign import Campaign, Kind, Outcome
from ._fault_episode import Record
from ._joint_campaign import Campaign as JointCampaign
from ._models import Model, folder

COUNT = {True: 40, False: 1000}
ROUNDS = {True: 40, False: 500}
JOINT = {True: 24, False: 2000}
JOINT_ROLLOUTS = {True: 12, False: 96}  # of every round
QUICK_S = 38.0  # no fault is struck later; the end comes on top
COUNTED = ("lost", "duplicated", "changed", "logprobs_changed", "hung", "failed", "leaked")
SHOWN = 20  # of what went wrong

_console = Console(highlight=False, soft_wrap=True)


class Struck(msgspec.Struct, frozen=True):
    """An engine to strike, see workloads/faults.toml."""

    name: str
    share: float
    settings: dict[str, float | int | bool | str]
    quick: bool = False


class Workload(msgspec.Struct, frozen=True):
    model: Model
    engines: list[Struck]


def workload() -> Workload:
    """What workloads/faults.toml says. Raises `msgspec.ValidationError` for an entry that is not understood."""
    return msgspec.convert(tomllib.loads((Path(__file__).parent / "workloads" / "faults.toml").read_text()), Workload)


def _engines(plan: Workload, count: int, quick: bool) -> tuple[list[Kind], list[str]]:
    """The engines that can run here, and why others cannot. Who cannot leaves its share to the rest."""
    possible: list[tuple[Struck, EngineConfig]] = []
    skipped: list[str] = []
    model = plan.model
    for engine in plan.engines:
        if quick and not engine.quick:
            continue
        try:
            config = EngineConfig(
                model=folder(model),
                max_model_len=model.max_model_len,
                max_num_seqs=model.max_num_seqs,
                kv_bytes=model.kv_bytes,
                **engine.settings,  # pyright: ignore[reportArgumentType]
            )
        except ValidationError as error:
            skipped.append(f"{engine.name}: {error.errors()[0]['msg']}")
            continue
        possible.append((engine, config))
    whole = sum(engine.share for engine, _config in possible)
    kinds: list[Kind] = []
    share = 0.0
    for engine, config in possible:
        share += engine.share
        kinds.append(Kind(engine.name, config, round(count * share / whole)))
    return kinds, skipped


def bench(
    quick: bool,
    engine: bool = False,
    sandbox: bool = False,
    faults: int | None = None,
    seed: int = 0,
    resume: bool = False,
) -> dict[str, Any]:
    """Run the campaign; the result is in the form of every bench, one cell for each kind of fault."""
    if engine and sandbox:
        raise ConfigError(
            "two campaigns were chosen", next_step="say --engine or --sandbox, or neither for whole rollouts"
        )
    if not engine and not sandbox:
        return _joint(quick, faults or JOINT[quick], seed, resume)
    if sandbox:
        return _sandbox_rounds.rounds(faults or ROUNDS[quick], seed, resume, QUICK_S if quick else None, _console.print)
    plan = workload()
    engines, skipped = _engines(plan, faults or COUNT[quick], quick)
    for reason in skipped:
        _console.print(f"skipped: {reason}")
    state = Path("build") / f"bench-faults-engine-{seed}.state.json"
    logs = Path(tempfile.mkdtemp(prefix="belayer-bench-faults-"))
    campaign = Campaign(
        engines,
        plan.model,
        seed=seed,
        deadline=time.monotonic() + QUICK_S if quick else float("inf"),
        say=_console.print,
        state=state,
        logs=logs,
    )
    if resume:
        campaign.resume()
        _console.print(f"going on after {campaign.outcome.injected} faults")
    try:
        asyncio.run(campaign.run())
    except KeyboardInterrupt:
        result = _result(campaign.outcome, seed)
        show(result, _console)
        _console.print(f"stopped after {campaign.outcome.injected} faults; go on with --resume")
        raise
    return _result(campaign.outcome, seed) | {"skipped": skipped, "logs": str(logs)}


def _joint(quick: bool, faults: int, seed: int, resume: bool) -> dict[str, Any]:
    campaign = JointCampaign(
        workload().model,
        faults=faults,
        rollouts=JOINT_ROLLOUTS[quick],
        seed=seed,
        quick=quick,
        state=Path("build").absolute() / f"bench-faults-joint-{seed}{'-quick' if quick else ''}.state.json",
        say=_console.print,
    )
    if resume:
        campaign.resume()
        _console.print(f"going on after {campaign.saved.injected} faults")
    try:
        campaign.run()
    except KeyboardInterrupt:
        _joint_report.show(_joint_report.result_of(campaign.saved, faults, quick=quick), _console)
        _console.print(f"stopped after {campaign.saved.injected} faults; go on with --resume")
        raise
    return _joint_report.result_of(campaign.saved, faults, quick=quick)


def _result(outcome: Outcome, seed: int) -> dict[str, Any]:
    checks: dict[str, int] = {name: outcome.found.get(name, 0) for name in COUNTED}
    checks["engines_lost"] = outcome.engines_lost
    by_kind: dict[str, list[Record]] = {}
    for record in outcome.records:
        by_kind.setdefault(record.kind, []).append(record)
    never = [kind for kind, records in by_kind.items() if len(records) > 2 and not any(r.injected for r in records)]
    checks["kinds_that_never_struck"] = len(never)
    return {
        "ok": not any(checks.values()),
        "seed": seed,
        "injected": outcome.injected,
        "not_injected": dict(Counter(record.why for record in outcome.records if not record.injected)),
        "never_struck": never,
        "requests": outcome.completed,
        "tokens": outcome.tokens,
        "continuations_over_updates_checked": outcome.parts_checked,
        "spontaneous_recoveries": outcome.spontaneous,
        "engines": {name: _by_engine(name, outcome) for name in dict.fromkeys(r.engine for r in outcome.records)},
        "growth": outcome.growth,
        "checks": checks,
        "wrong": outcome.details,
        "wall_s": outcome.wall_s,
        "cells": [_cell(kind, by_kind[kind]) for kind in WEIGHTS if kind in by_kind],
    }


def _by_engine(name: str, outcome: Outcome) -> dict[str, Any]:
    """Recoveries of the worker alone, for they are what the engines differ in."""
    struck = [record for record in outcome.records if record.engine == name and record.injected]
    killed = [
        r.recovery_s for r in struck if r.recovery_s is not None and r.kind.startswith("worker.") and r.shadow_ready
    ]
    return {
        "injected": len(struck),
        "worker_recovery_median_s": statistics.median(killed) if killed else None,
        "worker_recovery_p99_s": _p99(killed),
    }


def _cell(kind: str, records: list[Record]) -> dict[str, Any]:
    struck = [record for record in records if record.injected]
    times = [record.recovery_s for record in struck if record.recovery_s is not None]
    detected = [record.detect_s for record in struck if record.detect_s is not None]
    return {
        "workload": kind,
        "injected": len(struck),
        "not_injected": len(records) - len(struck),
        "with_shadow": sum(record.shadow_ready for record in struck),
        "how": dict(Counter(record.how for record in struck)),
        "subject": {
            "median_s": statistics.median(times) if times else None,
            "p99_s": _p99(times),
            "samples_s": times,
            "phases_s": {"detect_s": statistics.median(detected)} if detected else {},
            "detect_p99_s": _p99(detected),
        },
        "baselines": {},
        "ratios": {},
        "checks": {},
    }


def _p99(values: list[float]) -> float | None:
    """Nearest rank."""
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))] if values else None


def show(result: dict[str, Any], console: Console) -> None:
    """The table by kind of fault, and the totals."""
    if "pairs" in result:
        return _joint_report.show(result, console)
    if "rounds" in result:
        return _show_rounds(result, console)
    table = Table("fault", "injected", "how", "median", "p99", "detection", "its p99", title="belayer bench faults")
    for cell in result["cells"]:
        subject = cell["subject"]
        how = ", ".join(f"{name} {count}" for name, count in sorted(cell["how"].items(), key=lambda item: -item[1]))
        table.add_row(
            cell["workload"],
            str(cell["injected"]),
            how,
            _ms(subject["median_s"]),
            _ms(subject["p99_s"]),
            _ms(subject["phases_s"].get("detect_s")),
            _ms(subject["detect_p99_s"]),
        )
    console.print(table)
    console.print(
        f"{result['injected']} faults (seed {result['seed']}) in {result['wall_s']:.0f} s; "
        f"{result['requests']} requests and {result['tokens']} tokens compared, "
        f"{result['continuations_over_updates_checked']} continuations over an update; "
        f"{result['spontaneous_recoveries']} recoveries without a fault of ours"
    )
    if result["not_injected"]:
        console.print(f"not injected: {result['not_injected']}")
    for name, figures in result["engines"].items():
        console.print(
            f"{name}: {figures['injected']} faults; a struck worker with a shadow was replaced in "
            f"{_ms(figures['worker_recovery_median_s'])} (median), {_ms(figures['worker_recovery_p99_s'])} (p99)"
        )
    console.print(f"growth from begin to end: {result['growth']}")
    console.print(f"checks: {result['checks']}")
    for text in result["wrong"][:SHOWN]:
        console.print(f"  {text}", markup=False)


def _show_rounds(result: dict[str, Any], console: Console) -> None:
    table = Table("fault", "rounds", "checkpoint", "restore", "wrong", title="belayer bench faults --sandbox")
    for cell in result["cells"]:
        times = _ms(cell["checkpoint"]["median_s"]), _ms(cell["subject"]["median_s"])
        table.add_row(cell["workload"], str(cell["rounds"]), *times, str(cell["checks"]["wrong_states"]))
    console.print(table)
    console.print(
        f"{result['rounds']} rounds (seed {result['seed']}) in {result['wall_s']:.0f} s; "
        f"{result['states_compared']} states compared; refused for a moment: {result['refusals'] or 'nothing'}"
    )
    for name, why in result["skipped"].items():
        console.print(f"skipped: {name}: {why}", markup=False)
    console.print(f"checks: {result['checks']}")
    for text in result["wrong"][:SHOWN]:
        console.print(f"  {text}", markup=False)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f} ms"
