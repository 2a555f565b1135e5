"""What the engine campaign came to: its figures and its table."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from belayer.faults.engine_kinds import WEIGHTS

from ._campaign import milliseconds, show_verdict
from ._fault_campaign import Saved
from ._fault_episode import Record

COUNTED = ("lost", "duplicated", "changed", "logprobs_changed", "hung", "failed", "leaked")


def result_of(saved: Saved) -> dict[str, Any]:
    """The result in the form of every bench, one cell for each kind of fault."""
    checks: dict[str, int] = {name: saved.found.get(name, 0) for name in COUNTED}
    checks["engines_lost"] = saved.engines_lost
    by_kind: dict[str, list[Record]] = {}
    for record in saved.records:
        by_kind.setdefault(record.kind, []).append(record)
    never = [kind for kind, records in by_kind.items() if len(records) > 2 and not any(r.injected for r in records)]
    checks["kinds_that_never_struck"] = len(never)
    return {
        "ok": not any(checks.values()),
        "seed": saved.seed,
        "injected": saved.injected,
        "not_injected": dict(Counter(record.why for record in saved.records if not record.injected)),
        "never_struck": never,
        "requests": saved.completed,
        "tokens": saved.tokens,
        "continuations_over_updates_checked": saved.parts_checked,
        "spontaneous_recoveries": saved.spontaneous,
        "engines": {name: _by_engine(name, saved) for name in dict.fromkeys(r.engine for r in saved.records)},
        "growth": saved.growth,
        "checks": checks,
        "wrong": saved.details,
        "wall_s": saved.wall_s,
        "cells": [_cell(kind, by_kind[kind]) for kind in WEIGHTS if kind in by_kind],
    }


def _by_engine(name: str, saved: Saved) -> dict[str, Any]:
    """Recoveries of the worker alone, for they are what the engines differ in."""
    struck = [record for record in saved.records if record.engine == name and record.injected]
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
    table = Table(
        "fault", "injected", "how", "median", "p99", "detection", "its p99", title="belayer bench faults --engine"
    )
    for cell in result["cells"]:
        subject = cell["subject"]
        how = ", ".join(f"{name} {count}" for name, count in sorted(cell["how"].items(), key=lambda item: -item[1]))
        table.add_row(
            cell["workload"],
            str(cell["injected"]),
            how,
            milliseconds(subject["median_s"]),
            milliseconds(subject["p99_s"]),
            milliseconds(subject["phases_s"].get("detect_s")),
            milliseconds(subject["detect_p99_s"]),
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
        median, p99 = (milliseconds(figures[f"worker_recovery_{what}_s"]) for what in ("median", "p99"))
        console.print(
            f"{name}: {figures['injected']} faults; a struck worker with a shadow was replaced in "
            f"{median} (median), {p99} (p99)"
        )
    console.print(f"growth from begin to end: {result['growth']}")
    show_verdict(result, console)
