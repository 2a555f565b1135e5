"""Environment recovery: SIGKILL of a sandbox's init, against making the environment again.

Subject: the time from the signal until the first command has been answered by the fully restored container. Before
every kill the sandbox is changed by one more turn and checkpointed, so each sample restores a state of its own, on top
of a chain of restores. After the clock has stopped, files, shell variables, the memory's checksum, background jobs and
servers are compared with what they were at the checkpoint; one difference fails the benchmark.

Baselines, between two kills, each led to the same state and checked in the same way:
  new_container_replay   a new container, and every action of the workload again
  fs_only_restore        a new container on the checkpoint's file system, and the actions again that made processes and
                         shell state (what a restore without process images needs for the same state)
  podman                 podman's own checkpoint and restore, from an exported archive
  podman_runtime         Belayer's second runtime: podman's process images, Belayer's file systems and session
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from belayer.config import load_config
from belayer.errors import BelayerError
from belayer.ownership import RunLabel
from belayer.ownership.reap import live_labels
from belayer.sandbox import Sandboxes
from belayer.sandbox.podman import missing

from ._env_cell import Cell, Effort, Stage, remove_images_of_dead_runs
from ._env_claims import claims
from ._env_plot import plot
from ._env_podman import PlainPodman, image_is_there
from ._env_workloads import skipped, workloads

EFFORT = {True: Effort(2, 3, 3.0, forks=1), False: Effort(5, 12, 50.0)}
SLOW_EFFORT = Effort(3, 4, 75.0)  # where one round writes 400 MB five times
QUICK = "it takes too long for a quick run"

_console = Console(highlight=False, soft_wrap=True)


def bench(quick: bool) -> dict[str, Any]:
    """Run it; the result is in the form of every bench: cells with samples, medians, ratios and checks."""
    began = time.monotonic()
    cells = asyncio.run(_bench(quick))
    found = claims(cells)
    ok = all(_passed(cell["checks"]) for cell in cells)
    left_out = [{"workload": name, "skipped": reason} for name, reason in skipped(quick).items()]
    return {"ok": ok, "cells": cells, "skipped": left_out, "claims": found, "wall_s": time.monotonic() - began}


def _passed(checks: dict[str, int]) -> bool:
    return checks["restores_checked"] > 0 and not any(n for name, n in checks.items() if name != "restores_checked")


async def _bench(quick: bool) -> list[dict[str, Any]]:
    cells = []
    async with AsyncExitStack() as stack:
        manager = await _manager(stack, "native")
        remove_images_of_dead_runs(manager.store, live_labels())
        stage = Stage(manager, await _podman(stack, manager, quick), await _second(stack, quick))
        for workload in workloads(quick):
            effort = SLOW_EFFORT if workload.slow else EFFORT[quick]
            cells.append(await Cell(stage, workload).run(effort))
            took_s = cells[-1]["subject"]["median_s"]
            _console.print(f"{workload.name}: recovered in {took_s * 1e3:.1f} ms (median)")
    return cells


async def _manager(stack: AsyncExitStack, runtime: str) -> Sandboxes:
    label = stack.enter_context(RunLabel.new("bench env"))
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="belayer-bench-")))
    config = load_config().sandbox.model_copy(update={"runtime": runtime})
    manager = await Sandboxes.open(config, label, checkpoints=folder / "checkpoints")
    stack.push_async_callback(manager.close)
    return manager


async def _podman(stack: AsyncExitStack, manager: Sandboxes, quick: bool) -> PlainPodman | str:
    if reason := missing():
        return reason
    if quick and not image_is_there(manager.store, manager.config.image):
        return "its image is not there yet; the full benchmark imports it"
    try:
        podman = await asyncio.to_thread(PlainPodman, manager)
    except BelayerError as error:
        return error.what
    stack.push_async_callback(podman.close)
    return podman


async def _second(stack: AsyncExitStack, quick: bool) -> Sandboxes | str:
    if reason := QUICK if quick else missing():
        return reason
    return await _manager(stack, "podman")


def show(result: dict[str, Any], console: Console) -> None:
    """What the table of every bench does not say."""
    table = Table("workload", "frozen", "checkpoint", "kill → exec", "fork of 8", title="median (quartiles), ms")
    for cell in result["cells"]:
        taken = cell["checkpoint"]
        rows = (taken["frozen"], taken["total"], cell["subject"], cell["fork_of_8"])
        table.add_row(f"{cell['workload']} ({cell['actions']} actions)", *map(_quartiles, rows))
    console.print(table)
    for claim in result["claims"]:
        value = "not measured here" if claim["value"] is None else f"{claim['value']:.1f}"
        kept = {None: "undecided", True: "kept", False: "missed"}[claim["kept"]]
        console.print(f"    {claim['claim']}: {value} (limit {claim['limit']:g} {claim['unit']}, {kept})")
    for entry in result["skipped"]:
        console.print(f"{entry['workload']}: skipped: {entry['skipped']}")
    console.print(f"{result['wall_s']:.0f} s in all")
    if not result["quick"]:
        console.print(f"figure: {', '.join(map(str, plot(result, Path('build'))))}")


def _quartiles(series: dict[str, Any]) -> str:
    low, high = series["quartiles_s"]
    return f"{series['median_s'] * 1e3:.1f} ({low * 1e3:.1f}–{high * 1e3:.1f})"
