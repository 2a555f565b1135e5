"""The whole system while things fail: against restart-on-failure, and against nothing failing, with the same seeds.

`belayer bench e2e` runs rollouts with the published turn lengths under random sandbox failures (`_e2e_rollouts.py`);
`--train` trains the example's model by GRPO under failures of sandboxes and engine (`_e2e_training.py`).
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from ._e2e_rollouts import rollouts_under_faults
from ._e2e_training import training_under_faults
from .worker import workloads


def bench(quick: bool, train: bool = False, scale: float | None = None) -> dict[str, Any]:
    """Run it; the result is in the form of every bench."""
    cells = training_under_faults(quick) if train else rollouts_under_faults(workloads().models["tiny"], quick, scale)
    return {"ok": not any(value for cell in cells for value in cell["checks"].values()), "cells": cells}


def show(result: dict[str, Any], console: Console) -> None:
    """Wall time against no faults, what was done again, and whether faults changed what a trainer gets."""
    table = Table("workload", "arm", "wall", "rollouts (95%)", "kills", "restores", "restarts", "tokens redone", "lost")
    for cell in result["cells"]:
        for number, (arm, found) in enumerate(cell["arms"].items()):
            against = cell["against_no_faults"].get(arm)
            low, high = against["interval"] if against else (1.0, 1.0)
            table.add_row(
                cell["workload"] if not number else "",
                arm,
                f"x {against['wall']:.3f}" if against else "1",
                f"x {against['rollouts']:.3f} ({low:.3f} to {high:.3f})" if against else "1",
                str(found["struck"]),
                str(found["restores"]),
                str(found["restarts"]),
                f"{found['tokens_redone']} of {found['tokens_delivered']}",
                str(found["lost"]),
            )
    table.title = "wall time against the same without faults"
    console.print(table)
    for cell in result["cells"]:
        console.print(f"[bold]{cell['workload']}")
        for arm, against in cell["against_no_faults"].items():
            if arm != "restart":
                met = "met" if against["wall"] <= 1 + against["target"] else "missed"
                console.print(f"  {arm}: target x {1 + against['target']:.3f}: {met}")
        for arm, found in cell["same"].items():
            parts = [
                f"mean {name} {each['without']:.4f} without, {each['with']:.4f} with faults (p = {each['p']:.3f})"
                for name, each in ((name, found[name]) for name in ("reward", "length"))
            ]
            console.print(
                f"  {arm}: {found['identical']} of {found['compared']} trajectories identical; {'; '.join(parts)}; "
                f"{found['test']}"
            )
        for arm, found in cell["arms"].items():
            classes = ", ".join(
                f"{each['low']}{'' if each['high'] == each['low'] else '-' + str(each['high'])}: {each['rollouts']} "
                f"(restored {each['restored']}, retried {each['retried']}, lost {each['lost']})"
                for each in found["survivorship"]
            )
            console.print(f"  {arm} by turns: {classes}")
        for arm, found in cell["arms"].items():
            if spent := found.get("seconds"):
                parts = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in spent.items())
                console.print(f"  {arm}: seconds of all rollouts, those hidden under turns included: {parts}")
        for arm, curve in cell.get("reward_curve", {}).items():
            console.print(f"  {arm}: mean reward by step: {' '.join(f'{value:.3f}' for value in curve)}")
