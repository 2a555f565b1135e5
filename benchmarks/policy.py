"""When to checkpoint: `adaptive` against the other policies, simulated over failure rates, disks and loads.

The world is in `_policy_sim.py`: many sandboxes share a host's disk, turns and tool calls are drawn from published
distributions. Every policy gets the same rollouts and the same failures (equal seeds), so that ratios are paired. A
cell is judged by the mean wall time of its rollouts; intervals are 95%, over the seeds.

Checks: every simulated rollout ends, and a policy that takes no checkpoint waits for none. The figures never fail it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from belayer.checkpoint.policy import Adaptive, Always, EveryN, Never, Paper, Policy, YoungDaly

from ._policy_plot import plot
from ._policy_recorded import recorded_turns
from ._policy_sim import MB, Outcome, World, simulate

SUBJECT = "adaptive"
POLICIES: dict[str, Callable[[], Policy]] = {
    "never": Never,
    "always": Always,
    **{f"every-{n}": (lambda n=n: EveryN(n)) for n in (2, 4, 8, 16)},
    "young-daly": YoungDaly,
    "paper": Paper,
    SUBJECT: Adaptive,
}
SEEDS = {True: 2, False: 6}
FOLDER = Path("build") / "bench-policy"
T_975 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36}  # Student's t by degrees of freedom


def sweep(quick: bool) -> list[tuple[str, World]]:
    """Name and world of each cell."""
    loads, disks, rates, waits = ((8, 64), (2000, 500, 100), (1e3, 1e4, 1e5), (True, False))
    if quick:
        loads, disks, rates = (32,), (2000, 100), (1e3, 1e5)
    cells = []
    for wait, load, disk, rate in itertools.product(waits, loads, disks, rates):
        where = "counts once on disk" if wait else "counts once in memory"
        name = f"{load} sandboxes, {disk} MB/s, MTBF {rate:,.0f} s, {where}"
        cells.append((name, World(sandboxes=load, bytes_per_s=disk * MB, mtbf_s=rate, waits_for_disk=wait)))
    if quick:
        cells = [(name, replace(world, rounds=(20, 40))) for name, world in cells]
    return cells


def bench(quick: bool, run: Path | None = None) -> dict[str, Any]:
    """Simulate every cell; with `run`, turns are those of that run instead of drawn ones."""
    cells = []
    plan = sweep(quick)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("policies simulated", total=len(plan) * len(POLICIES) * SEEDS[quick])
        for name, world in plan:
            turns = recorded_turns(run, world) if run else None
            outcomes: dict[str, list[Outcome]] = {}
            for policy, make in POLICIES.items():
                outcomes[policy] = []
                for seed in range(SEEDS[quick]):
                    outcomes[policy].append(simulate(world, make(), seed, turns))
                    bar.advance(task)
            cells.append(_cell(name, world, outcomes))
    result = {"ok": all(all(cell["checks"].values()) for cell in cells), "cells": cells, "verdict": _verdict(cells)}
    result["files"] = [str(path) for path in plot(result, FOLDER)]
    return result


def _cell(name: str, world: World, outcomes: dict[str, list[Outcome]]) -> dict[str, Any]:
    means = {policy: [each.mean_wall_s for each in found] for policy, found in outcomes.items()}
    mine = means.pop(SUBJECT)
    best = min(means, key=lambda policy: statistics.mean(means[policy]))
    return {
        "workload": name,
        "world": {
            "sandboxes": world.sandboxes,
            "disk_bytes_per_s": world.bytes_per_s,
            "mtbf_s": world.mtbf_s,
            "waits_for_disk": world.waits_for_disk,
        },
        "subject": {"median_s": statistics.median(mine), "samples_s": mine},
        "baselines": {p: {"median_s": statistics.median(found), "samples_s": found} for p, found in means.items()},
        "ratios": {p: statistics.median(b / a for a, b in zip(mine, found, strict=True)) for p, found in means.items()},
        "best_fixed": best,
        "against_best": _interval([a / b for a, b in zip(mine, means[best], strict=True)]),
        "policies": {
            policy: {
                "hidden": statistics.mean(each.hidden for each in found),
                "exposed_share": statistics.mean(each.exposed_s / sum(each.wall_s) for each in found),
                "checkpoints": statistics.mean(each.checkpoints for each in found),
                "failures": statistics.mean(each.failures for each in found),
                "disk_users": statistics.mean(each.disk_users for each in found),
            }
            for policy, found in outcomes.items()
        },
        "checks": {
            "every rollout ended": all(
                len(each.wall_s) == world.sandboxes for found in outcomes.values() for each in found
            ),
            "never waits for no checkpoint": all(each.exposed_s == 0 for each in outcomes["never"]),
        },
    }


def _interval(ratios: list[float]) -> dict[str, float]:
    """Mean of the paired ratios and its 95% interval."""
    mean = statistics.mean(ratios)
    half = T_975[len(ratios) - 1] * statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.inf
    return {"mean": mean, "low": mean - half, "high": mean + half}


def _verdict(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """`adaptive` over all cells, and the best policy of all that would have been chosen once for all of them."""
    worst = max(cells, key=lambda cell: cell["against_best"]["mean"])
    better = [cell["workload"] for cell in cells if cell["against_best"]["high"] < 1.0]
    once = {
        policy: statistics.geometric_mean(cell["ratios"][policy] for cell in cells) for policy in cells[0]["baselines"]
    }
    return {
        "worst_against_best": worst["against_best"]["mean"],
        "worst_cell": worst["workload"],
        "strictly_better_in": better,
        "slower_than_adaptive_on_average": once,
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Every cell in a line, and what follows."""
    table = Table("cell", *POLICIES, "best fixed", "adaptive / best (95%)", title="mean wall time / that of adaptive")
    for cell in result["cells"]:
        against = cell["against_best"]
        table.add_row(
            cell["workload"],
            *(f"{cell['ratios'].get(policy, 1.0):.3f}" for policy in POLICIES),
            cell["best_fixed"],
            f"{against['mean']:.4f} ({against['low']:.4f} to {against['high']:.4f})",
        )
    console.print(table)
    verdict = result["verdict"]
    console.print(
        f"adaptive is at worst {verdict['worst_against_best']:.4f} x the best fixed policy of a cell "
        f"({verdict['worst_cell']}), and strictly better in {len(verdict['strictly_better_in'])} of "
        f"{len(result['cells'])} cells"
    )
    once = sorted(verdict["slower_than_adaptive_on_average"].items(), key=lambda item: item[1])
    console.print("one policy for all cells, slower than adaptive: " + ", ".join(f"{p} {r:.3f}x" for p, r in once))
    hidden = [cell for cell in result["cells"] if not cell["world"]["waits_for_disk"]]
    collapsed = max(hidden, key=lambda cell: cell["ratios"]["always"])
    always = collapsed["policies"]["always"]
    console.print(
        f"always takes {collapsed['ratios']['always']:.1f}x as long at {collapsed['workload']}, although only "
        f"{always['exposed_share']:.2%} of the wall time is spent waiting for checkpoints: they fill the disk"
    )
    console.print("plot and its data: " + ", ".join(result["files"]))
