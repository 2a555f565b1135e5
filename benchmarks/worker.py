"""Worker recovery: SIGKILL of the serving worker in the middle of decoding, with a shadow standing by.

Subject: the time from the signal until every request in flight has its first token from the promoted shadow. A token
that the dead worker had still sent does not count as recovered.

Every round measures the subject and, while the next shadow stands idle, what it is compared with:

  cold_start                         an engine started from nothing (processes, imports, checkpoint, warm-up) and given
                                     the same requests with the tokens they had at the kill
  cold_start_without_warm_up         the same less the time of its warm-up, which a start for these requests could skip
  image_standby                      no standby process: the shadow comes from its image on disk
  standby_without_retained_weights   a standby that has imported everything, but has no weights and no warm engine
  prefill floor                      the prefill of the very same prefixes alone, by a warm idle worker

Every run, killed or not, must lose no token and repeat none; in float32 it must also deliver the tokens and logprobs of
the undisturbed run. In bfloat16 tokens depend on the shape of the batch, so there the number that changed is reported
and not checked. What is measured is data: workloads/worker.toml.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import tempfile
import time
import tomllib
import typing
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from belayer.config import EngineConfig
from belayer.engine import Engine
from belayer.errors import ConfigError
from belayer.ownership import RunLabel

from ._models import Model, folder
from ._standbys import BareStandby
from ._tape import Watch
from ._worker_cell import FLOOR_EXTRA_S, FLOOR_FACTOR, Cell, Protected, Stage, measure
from ._worker_plot import plot

BUDGET_S = {True: 46.0, False: 720.0}  # quick: no round begins that would end later, but each cell's first does
QUICK_KILLS = 2
OVERHEAD = "_engine_overhead"


class Workloads(msgspec.Struct, frozen=True):
    models: dict[str, Model]
    cells: list[Cell]


def workloads() -> Workloads:
    """What workloads/worker.toml says. Raises `msgspec.ValidationError` for an entry that is not understood."""
    text = (Path(__file__).parent / "workloads" / "worker.toml").read_text()
    return msgspec.convert(tomllib.loads(text), Workloads)


def bench(quick: bool) -> dict[str, Any]:
    """Run it; the result is in the form of every bench: cells with samples, medians, ratios and checks."""
    began = time.monotonic()
    cells, skipped = asyncio.run(_bench(quick))
    if (overhead := _overhead(quick)) is not None:
        cells.append(overhead)
    ok = all(int(value) == 0 or value is True for cell in cells for value in cell["checks"].values())
    return {"ok": ok, "cells": cells, "skipped": skipped, "wall_s": time.monotonic() - began}


async def _bench(quick: bool) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    plan = workloads()
    deadline = time.monotonic() + BUDGET_S[quick]
    results: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    groups: dict[tuple[str, bool], list[Cell]] = {}
    for cell in plan.cells:
        if cell.quick or not quick:
            groups.setdefault((cell.model, cell.adopt), []).append(cell)
    for (name, adopt), cells in groups.items():
        if adopt and "adopt_sealed_blocks" not in EngineConfig.model_fields:
            skipped.append({"workload": f"{name}, sealed blocks adopted", "skipped": "this engine adopts no blocks"})
            continue
        async with AsyncExitStack() as stack:
            stage = await _stage(stack, plan.models[name], adopt)
            for cell in cells:
                one = msgspec.structs.replace(cell, kills=min(cell.kills, QUICK_KILLS)) if quick else cell
                results.append(await measure(one, stage, deadline))
    return results, skipped


async def _stage(stack: AsyncExitStack, model: Model, adopt: bool) -> Stage:
    """Start what a group of cells needs; `stack` ends it again, in reverse order."""
    changes: dict[str, Any] = {"adopt_sealed_blocks": True} if adopt else {}
    config = EngineConfig(
        model=folder(model),
        dtype=model.dtype,  # pyright: ignore[reportArgumentType]
        max_model_len=model.max_model_len,
        max_num_seqs=model.max_num_seqs,
        kv_bytes=model.kv_bytes,
        **changes,
    )
    label = stack.enter_context(RunLabel.new("bench worker"))
    logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="belayer-bench-")))
    subject = await _protected(stack, config, logs / "subject")
    image: Protected | str = "this engine has no shadow images"
    if "image" in typing.get_args(EngineConfig.model_fields["standby"].annotation):
        try:
            image = await _protected(stack, config.model_copy(update={"standby": "image"}), logs / "image")
        except ConfigError as error:  # what images need is not here
            image = error.what
    bare = BareStandby(config, label, logs / "bare")
    stack.push_async_callback(bare.close)
    await bare.wait_ready()
    return Stage(model, config, subject, image, bare, logs)


async def _protected(stack: AsyncExitStack, config: EngineConfig, logs: Path) -> Protected:
    label = stack.enter_context(RunLabel.new("bench worker"))
    watch = Watch()
    engine = await Engine.start(config, label, events=watch, log_dir=logs)
    stack.push_async_callback(engine.close)
    return Protected(engine, watch)


def _overhead(quick: bool) -> dict[str, Any] | None:
    """What protection costs while nothing fails, measured by a module of its own."""
    name = f"{__package__}.{OVERHEAD}"
    if importlib.util.find_spec(name) is None:
        return None
    return importlib.import_module(name).overhead(quick)


def show(result: dict[str, Any], console: Console) -> None:
    """What the table of every bench does not say."""
    for cell in result["cells"]:
        if "prefill_floor" in cell:
            floor, against, armed = cell["prefill_floor"], cell["against_floor"], cell["next_shadow_armed"]
            console.print(
                f"{cell['workload']}: {cell['prefix']}; prefill floor {floor['median_s'] * 1e3:.1f} ms; "
                f"{FLOOR_FACTOR:g} x (floor + {FLOOR_EXTRA_S * 1e3:g} ms) is {against['limit_s'] * 1e3:.1f} ms "
                f"({'kept' if against['within'] else 'exceeded'}); next shadow armed {armed['median_s']:.2f} s after "
                f"the promotion; changed: {cell['changed']}"
            )
    for entry in result["skipped"]:
        console.print(f"{entry['workload']}: skipped: {entry['skipped']}")
    console.print(f"{result['wall_s']:.0f} s in all")
    if not result["quick"]:
        console.print(f"figure: {', '.join(map(str, plot(result, Path('build'))))}")
