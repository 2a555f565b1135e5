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

Every run, killed or not, must lose no token and repeat none; where the engine is exact (`belayer.engine.exactness`) it
must also deliver the tokens and logprobs of the undisturbed run. Elsewhere tokens depend on the shape of the batch, and
the number that changed is reported and not checked. What is measured is data: workloads/worker.toml.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import tempfile
import time
import tomllib
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from belayer.config import EngineConfig
from belayer.engine import Engine
from belayer.engine.exactness import is_exact
from belayer.engine.images.key import key_of
from belayer.engine.images.store import ImageStore
from belayer.engine.workers.child import environment
from belayer.errors import BelayerError, EngineError
from belayer.ownership import RunLabel

from ._models import Model, folder
from ._standbys import BareStandby
from ._tape import Watch
from ._worker_cell import FLOOR_EXTRA_S, READY_S, Cell, Protected, Stage, measure
from ._worker_plot import plot

BUDGET_S = {True: 44.0, False: 640.0}  # quick: no round begins that would end later, but each cell's first does
QUICK_KILLS = 2
OVERHEAD = "_engine_overhead"

_console = Console(highlight=False, soft_wrap=True)


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
    skipped: list[dict[str, str]] = []
    cells = asyncio.run(_bench(quick))
    cells += _overhead(quick, skipped)
    ok = all(int(value) == 0 or value is True for cell in cells for value in cell["checks"].values())
    return {"ok": ok, "cells": cells, "skipped": skipped, "wall_s": time.monotonic() - began}


async def _bench(quick: bool) -> list[dict[str, Any]]:
    plan = workloads()
    deadline = time.monotonic() + BUDGET_S[quick]
    results: list[dict[str, Any]] = []
    groups: dict[tuple[str, bool], list[Cell]] = {}
    for cell in plan.cells:
        if cell.quick or not quick:
            groups.setdefault((cell.model, cell.adopt), []).append(cell)
    for (name, adopt), cells in groups.items():
        async with AsyncExitStack() as stack:
            stage = await _stage(stack, plan.models[name], adopt, quick)
            for cell in cells:
                one = msgspec.structs.replace(cell, kills=min(cell.kills, QUICK_KILLS)) if quick else cell
                results.append(await measure(one, stage, deadline))
                took_s = results[-1]["subject"]["median_s"]
                _console.print(f"{results[-1]['workload']}: recovered in {took_s * 1e3:.1f} ms (median)")
    return results


async def _stage(stack: AsyncExitStack, model: Model, adopt: bool, quick: bool) -> Stage:
    """Start what a group of cells needs; `stack` ends it again, in reverse order."""
    config = EngineConfig(
        model=folder(model),
        dtype=model.dtype,  # pyright: ignore[reportArgumentType]
        max_model_len=model.max_model_len,
        max_num_seqs=model.max_num_seqs,
        kv_bytes=model.kv_bytes,
        adopt_sealed_blocks=adopt,
        images=True,
    )
    label = stack.enter_context(RunLabel.new("bench worker"))
    logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="belayer-bench-")))
    image: Protected | str = "no image is there yet; the full benchmark makes one"
    if not quick or _image_is_there(config, label):
        try:
            # the image is made, if it has to be, before anything is measured
            image = await _protected(stack, config.model_copy(update={"standby": "image"}), logs / "image")
            await image.engine.wait_standby(READY_S)
        except EngineError as error:  # what images need is not here
            image = error.what
    if isinstance(image, str):
        config = config.model_copy(update={"images": False})
    subject = await _protected(stack, config, logs / "subject")
    bare: BareStandby | str = "its imports take too long for a quick run"
    if not quick:
        bare = BareStandby(config, label, logs / "bare")
        stack.push_async_callback(bare.close)
        await bare.wait_ready()
    return Stage(model, config, subject, image, bare, logs)


def _image_is_there(config: EngineConfig, label: RunLabel) -> bool:
    try:
        key = key_of(config, environment(label, config.threads, is_exact(config)))
        return ImageStore(config.images_bytes).find(key) is not None
    except (BelayerError, OSError):  # no CRIU, or an image that is refused
        return False


async def _protected(stack: AsyncExitStack, config: EngineConfig, logs: Path) -> Protected:
    label = stack.enter_context(RunLabel.new("bench worker"))
    watch = Watch()
    engine = await Engine.start(config, label, events=watch, log_dir=logs)
    stack.push_async_callback(engine.close)
    return Protected(engine, watch)


def _overhead(quick: bool, skipped: list[dict[str, str]]) -> list[dict[str, Any]]:
    """What protection costs while nothing fails, in short; `belayer bench overhead` measures it at length."""
    name = f"{__package__}.{OVERHEAD}"
    if quick or importlib.util.find_spec(name) is None:
        reason = "it needs minutes" if quick else "it is not there"
        skipped.append({"workload": "failure-free cost", "skipped": reason})
        return []
    return importlib.import_module(name).overhead(workloads().models, True)


def show(result: dict[str, Any], console: Console) -> None:
    """What the table of every bench does not say."""
    for cell in result["cells"]:
        if "prefill_floor" not in cell:
            continue
        floor, armed = cell["prefill_floor"]["median_s"], cell["next_shadow_armed"]["median_s"]
        console.print(
            f"{cell['workload']}: {cell['prefix']}; prefill floor {floor * 1e3:.1f} ms, recovery is "
            f"{cell['against_floor']:.2f} x (floor + {FLOOR_EXTRA_S * 1e3:g} ms); next shadow armed "
            f"{armed:.2f} s after the promotion; changed: {cell['changed']}"
        )
        for claim in cell["claims"]:
            value = "not measured here" if claim["value"] is None else f"{claim['value']:.3g}"
            kept = {None: "undecided", True: "kept", False: "missed"}[claim["kept"]]
            console.print(f"    {claim['claim']}: {value} (limit {claim['limit']:g}, {kept})")
    for entry in result["skipped"]:
        console.print(f"{entry['workload']}: skipped: {entry['skipped']}")
    console.print(f"{result['wall_s']:.0f} s in all")
    if not result["quick"]:
        console.print(f"figure: {', '.join(map(str, plot(result, Path('build'))))}")
