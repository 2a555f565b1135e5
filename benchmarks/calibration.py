"""Are the policy's predictions right? Coverage of the predicted quantiles, of a recorded run or of a live one.

`belayer bench calibration --run RUN` reads the metrics and the journal of a run; without `--run` it runs rollouts of
the published turn lengths (turns are waits, `_paced.py`), takes a checkpoint at every turn and kills sandboxes at a
constant rate, so that there is something of everything to predict.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from belayer import events as ev
from belayer.errors import RunError
from belayer.observe.metrics import MetricsLog, scan_metrics

from ._calibration import LEVELS, Calibration, journalled, of_run
from ._e2e_rollouts import arm_config
from ._eta import Eta
from ._paced import PACE, PacedRun
from ._paired import series
from ._rollout_overhead import MTBF_S, SHAPES, run_config
from ._strikes import Strikes
from ._turns import solve, tasks
from .worker import workloads

BATCHES = {True: 2, False: 8}
KILL_EVERY_S = 40.0  # of a sandbox's life


def bench(quick: bool, run: Path | None = None) -> dict[str, Any]:
    """The figures of `run`, or of live batches."""
    if run is not None:
        if not (run / "metrics.jsonl").is_file():
            raise RunError(f"{run} has no metrics.jsonl", next_step="give the folder of a run of `belayer train`")
        return _result(f"the run {run.name}", run)
    with tempfile.TemporaryDirectory(prefix="belayer-bench-") as name:
        folder = Path(name) / "run"
        asyncio.run(_live(folder, quick))
        scale = SHAPES[quick].scale
        return _result(f"live, scale {scale:g}", folder, prior_s=MTBF_S * scale)


async def _live(folder: Path, quick: bool) -> None:
    folder.mkdir()
    shape = msgspec.structs.replace(SHAPES[quick], turns=(3, 3))
    eta = Eta("calibration", BATCHES[quick])
    with MetricsLog(folder / "metrics.jsonl") as metrics:
        config = run_config(workloads().models["tiny"], shape, "always")
        async with await PacedRun.open(folder, arm_config(config, "belayer"), sink=metrics) as run:
            striking = asyncio.create_task(Strikes(run, KILL_EVERY_S, 0).run())
            try:
                for number in range(BATCHES[quick]):
                    async for trajectory in run.rollouts(solve, tasks(shape, PACE, number), name=f"b{number}"):
                        run.acknowledge(trajectory)
                    eta()
            finally:
                striking.cancel()
                await asyncio.gather(striking, return_exceptions=True)


def _result(name: str, run: Path, prior_s: float = MTBF_S) -> dict[str, Any]:
    found: Calibration = of_run(run, prior_s)
    events: list[ev.Event] = list(scan_metrics(run / "metrics.jsonl").events)
    checks = {"no_turns": int(not found.bubbles)}
    cell = {
        "workload": name,
        "subject": series(found.bubbles) if found.bubbles else {"median_s": 0.0, "samples_s": []},
        "baselines": {},
        "calibration": found.figures(),
        "journalled": journalled(run, events),
        "checks": checks,
    }
    return {"ok": not any(checks.values()), "cells": [cell]}


def show(result: dict[str, Any], console: Console) -> None:
    """Coverage tables, and what the run itself had believed."""
    for cell in result["cells"]:
        console.print(f"[bold]{cell['workload']}")
        show_calibration(cell["calibration"], console)
        own = cell["journalled"]
        if own["checkpoints"]:
            console.print(
                f"  by the journal's own numbers, of {own['checkpoints']} checkpoints: took "
                f"{own['cost_median_ratio']:.2f} x (median) the predicted time; exposed "
                f"{own['exposed_waited_s'] * 1e3:.1f} ms in all, predicted {own['exposed_predicted_s'] * 1e3:.1f} ms"
            )
        else:
            console.print(
                "  the journal holds no predictions of checkpoints taken (policy without numbers, or none taken)"
            )


def show_calibration(found: dict[str, Any], console: Console) -> None:
    """Of what was predicted: coverage, failures, exposed time."""
    rows = [(name, found[name]) for name in ("bubble", "cost") if found[name].get("count")]
    if rows:
        table = Table("predicted quantile", *(f"{level:g}" for level in LEVELS), "values", title="coverage")
        for name, each in rows:
            values = (f"{each['coverage'][f'{level:g}']:.3f}" for level in LEVELS)
            table.add_row(name, *values, str(each["count"]))
            table.add_row("  by chance ±", *(f"{each['band'][f'{level:g}']:.3f}" for level in LEVELS), "")
        console.print(table)
    cost, failures, exposed = found["cost"], found["failures"], found["exposed"]
    if cost["observed"]:
        console.print(
            f"  checkpoint cost: {cost['observed']} predicted, took {cost['mean_ratio']:.2f} x (mean), "
            f"{cost['median_ratio']:.2f} x (median) of what was predicted"
        )
    console.print(
        f"  failures: {failures['counted']} in {failures['at_risk_s']:.0f} s at risk, expected "
        f"{failures['expected']:.2f} (so far off by chance: p = {failures['chance']:.2f})"
    )
    console.print(
        f"  exposed time of checkpoints: predicted {exposed['predicted_s'] * 1e3:.1f} ms, waited "
        f"{exposed['waited_s'] * 1e3:.1f} ms"
    )
