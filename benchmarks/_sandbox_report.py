"""What the sandbox campaign came to: its figures and its table."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from ._campaign import milliseconds, show_verdict
from ._sandbox_rounds import FAULTS, Round, Saved


def result_of(saved: Saved) -> dict[str, Any]:
    """The result in the form of every bench, one cell for each kind of fault."""
    checks = {
        "wrong_states": sum(bool(done.wrong) for done in saved.rounds),
        "leaks": saved.found.get("leaked", 0),
        "failures": saved.found.get("failed", 0),
        "no_rounds": int(not saved.rounds),
    }
    return {
        "ok": not any(checks.values()),
        "seed": saved.seed,
        "rounds": len(saved.rounds),
        "states_compared": sum(done.resources for done in saved.rounds),
        "refusals": dict(Counter(text[:200] for done in saved.rounds for text in done.refused)),
        "skipped": saved.skipped,
        "checks": checks,
        "wrong": saved.details,
        "wall_s": saved.wall_s,
        "cells": [_cell(fault, [done for done in saved.rounds if done.fault == fault]) for fault in FAULTS],
    }


def _cell(fault: str, done: list[Round]) -> dict[str, Any]:
    restores, checkpoints = sorted(one.restore_s for one in done), sorted(one.checkpoint_s for one in done)
    middle = len(done) // 2
    return {
        "workload": fault,
        "rounds": len(done),
        "subject": {"median_s": restores[middle] if done else None, "samples_s": restores},
        "checkpoint": {"median_s": checkpoints[middle] if done else None},
        "baselines": {},
        "ratios": {},
        "checks": {"wrong_states": sum(bool(one.wrong) for one in done)},
    }


def show(result: dict[str, Any], console: Console) -> None:
    """The table by kind of fault, and the totals."""
    table = Table("fault", "rounds", "checkpoint", "restore", "wrong", title="belayer bench faults --sandbox")
    for cell in result["cells"]:
        times = milliseconds(cell["checkpoint"]["median_s"]), milliseconds(cell["subject"]["median_s"])
        table.add_row(cell["workload"], str(cell["rounds"]), *times, str(cell["checks"]["wrong_states"]))
    console.print(table)
    console.print(
        f"{result['rounds']} rounds (seed {result['seed']}) in {result['wall_s']:.0f} s; "
        f"{result['states_compared']} states compared; refused for a moment: {result['refusals'] or 'nothing'}"
    )
    for name, why in result["skipped"].items():
        console.print(f"skipped: {name}: {why}", markup=False)
    show_verdict(result, console)
