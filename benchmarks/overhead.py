"""What protection costs while nothing fails, in pairs: whole rollouts, or the rollout engine alone.

`belayer bench overhead` runs the same rollouts with Belayer and without (`_rollout_overhead.py`), `--turns` one half of
it, or sandboxes in step (`_in_step.py`); `--engine` compares the engine's tokens per second with vLLM's alone
(`_engine_overhead.py`).
"""

from __future__ import annotations

from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from ._engine_overhead import overhead
from ._in_step import in_step
from ._rollout_overhead import TARGET_HIDDEN, rollout_overhead
from .calibration import show_calibration
from .worker import workloads

Turns = Literal["waits", "inference", "step"]


def bench(
    quick: bool,
    engine: bool = False,
    turns: Turns | None = None,
    scale: float | None = None,
    policy: str = "adaptive",
) -> dict[str, Any]:
    """Run it; the result is in the form of every bench."""
    models = workloads().models
    if engine:
        cells = overhead(models, quick)
    elif turns == "step":
        cells = [in_step(models, quick, scale=scale)]
    else:
        kinds: tuple[Turns, ...] = (turns,) if turns else ("waits", "inference")
        cells = [rollout_overhead(kind, models, quick, scale=scale, policy=policy) for kind in kinds]
    return {"ok": not any(value for cell in cells for value in cell["checks"].values()), "cells": cells}


def show(result: dict[str, Any], console: Console) -> None:
    """The overhead with its intervals, and where it goes."""
    table = Table("workload", "against", "overhead", "by sign test", "95% bootstrap", "pairs", "target")
    for cell in result["cells"]:
        for number, (name, found) in enumerate(cell.get("overhead", {}).items()):
            low, high = found["bootstrap"]
            table.add_row(
                cell["workload"] if not number else "",
                name,
                f"{found['median']:+.2%}",
                f"{found['low']:+.2%} to {found['high']:+.2%} ({found['confidence']:.0%})",
                f"{low:+.2%} to {high:+.2%}",
                str(found["pairs"]),
                f"{found['target']:.0%}: {_verdict(found)}",
            )
    if table.row_count:
        console.print(table)
    for cell in result["cells"]:
        if "arms" in cell:
            _show_in_step(cell, console)
        elif "phases_us_per_token" in cell:
            _show_engine(cell, console)
        else:
            _show_rollouts(cell, console)


def _verdict(found: dict[str, Any]) -> str:
    if found["surely_within"] and found["confidence"] >= 0.95:
        return "met"
    return "met by the median" if found["within_target"] else "missed"


def _show_engine(cell: dict[str, Any], console: Console) -> None:
    where = ", ".join(f"{name} {value:.1f}" for name, value in cell["phases_us_per_token"].items())
    console.print(f"{cell['workload']}: microseconds of a token: {where}")


def _show_in_step(cell: dict[str, Any], console: Console) -> None:
    table = Table("policy", "checkpoints", "given up", "skipped", "at once", "overlapping", "exposed, of dumping")
    for arm, found in cell["arms"].items():
        table.add_row(
            "adaptive" if arm == "aware" else "without the price for others",
            str(found["taken"]),
            str(found["abandoned"]),
            str(found["skipped"]),
            str(found["at_once"]),
            f"{found['overlap_s']:.2f} s",
            f"{found['exposed_s'] * 1e3:.0f} ms of {found['seconds']:.2f} s: {found['exposed_of_dumping']:.1%}",
        )
    table.title = cell["workload"]
    console.print(table)


def _show_rollouts(cell: dict[str, Any], console: Console) -> None:
    found, journal = cell["checkpoints"], cell["journal"]
    console.print(f"[bold]{cell['workload']}")
    line = (
        f"  {found['turns']} turns: {found['taken']} checkpoints taken, {found['skipped']} skipped by the policy, "
        f"{found['abandoned']} abandoned; journal {journal['seconds_per_batch'] * 1e3:.1f} ms a batch, "
        f"{journal['s_per_record'] * 1e6:.0f} us a record"
    )
    console.print(line)
    if found["taken"]:
        console.print(
            f"  checkpoints: {found['median_s'] * 1e3:.0f} ms each, {found['seconds']:.2f} s in all and "
            f"{found['queued_s']:.2f} s in the queue, "
            f"{found['exposed_s'] * 1e3:.1f} ms of it exposed: {found['hidden']:.2%} hidden "
            f"(target {TARGET_HIDDEN:.0%}: {'met' if found['hidden'] >= TARGET_HIDDEN else 'missed'})"
        )
    if by_scale := cell.get("hidden_by_scale"):
        table = Table("turns last", "checkpoints", "each", "hidden, measured", "hidden, computed")
        for scale, computed in by_scale["computed"].items():
            live = by_scale["measured"].get(scale)
            table.add_row(
                f"{scale} x published",
                str(live["taken"]) if live else "",
                f"{live['median_s'] * 1e3:.0f} ms" if live and live["taken"] else "",
                f"{live['hidden']:.2%}" if live and live["taken"] else "",
                f"{computed:.2%}",
            )
        table.title = "a checkpoint at every turn: how much of it is hidden"
        console.print(table)
    show_calibration(cell["calibration"], console)
