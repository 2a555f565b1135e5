"""`belayer checkpoint`: what a run's sandboxes can be restored from, and how to take that to another host."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from belayer.checkpoint.manifest import Manifest, read_manifest
from belayer.config import SandboxConfig, load_config
from belayer.errors import CheckpointDamaged, RunError
from belayer.run_directory import RunDirectory, configured, read_about
from belayer.sandbox import RunPlaces
from belayer.sandbox.store import Store
from belayer.sandbox.transfer import export_checkpoint, import_checkpoint

console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)


def list_command(run: Path) -> int:
    """Print one line per manifest. 1 if one is damaged."""
    places = RunPlaces.of(_checkpoints(run))
    readable = places.manifests()
    damaged = sorted({path.stem for path in places.checkpoints.glob("*.json")} - {manifest.id for manifest in readable})
    table = Table(box=None, pad_edge=False)
    # ids are there to be copied: they are never cut
    table.add_column("checkpoint", no_wrap=True, min_width=max((len(manifest.id) for manifest in readable), default=0))
    for heading in ("sandbox", "action", "level", "survives", "images in", "MB", "taken"):
        table.add_column(heading, no_wrap=True)
    for manifest in readable:
        table.add_row(*_row(places, manifest))
    if readable:
        console.print(table)
    for checkpoint_id in damaged:
        try:
            read_manifest(places.manifest_path(checkpoint_id))
        except CheckpointDamaged as error:
            console.print(f"[red]damaged:[/] {error.what}")
    console.print(f"{len(readable)} checkpoints" + (f", {len(damaged)} damaged" if damaged else ""))
    return 1 if damaged else 0


def export_command(run: Path, checkpoint_id: str, file: Path) -> int:
    """Write the archive."""
    checkpoints = _checkpoints(run)
    with _store(run, durable=False) as store:
        manifest = export_checkpoint(checkpoints, checkpoint_id, file, store)
    console.print(
        f"exported checkpoint {manifest.id} (sandbox {manifest.sandbox}, action {manifest.action}) to {file}, "
        f"{file.stat().st_size >> 20} MB",
        markup=False,
    )
    return 0


def import_command(file: Path, run: Path) -> int:
    """Import the archive into a run that nobody holds."""
    if not file.is_file():
        raise RunError(f"there is no file {file}", next_step="check the path")
    directory = RunDirectory.open(run) if (run / "run.json").is_file() else None
    try:
        with _store(run, durable=True) as store:
            manifest = import_checkpoint(file, run / "checkpoints", store)
    finally:
        if directory is not None:
            directory.close()
    console.print(
        f"imported checkpoint {manifest.id} (sandbox {manifest.sandbox}, action {manifest.action}) into {run}",
        markup=False,
    )
    return 0


def _row(places: RunPlaces, manifest: Manifest) -> list[str]:
    where = [
        name
        for name, there in (("memory", places.in_memory(manifest.id)), ("disk", places.on_disk(manifest.id)))
        if there
    ]
    return [
        manifest.id,
        manifest.sandbox,
        str(manifest.action),
        manifest.level,
        {"process": "the driver", "host": "a reboot"}[manifest.durability],
        " and ".join(where) or ("lost" if manifest.images else "-"),
        f"{manifest.image_bytes / (1 << 20):.1f}",
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created)),
    ]


def _checkpoints(run: Path) -> Path:
    if not (run / "checkpoints" / "run_id").is_file():
        raise RunError(f"{run} is no run's folder, or has never had a sandbox", next_step="check the path")
    return run / "checkpoints"


@contextmanager
def _store(run: Path, *, durable: bool) -> Iterator[Store]:
    """The store that the run uses, by its own configuration; for a new run by this process's."""
    config = load_config().sandbox
    if (run / "run.json").is_file():
        config = SandboxConfig.model_validate(configured(read_about(run), "sandbox"))
    store = Store.open(config.store, config.store_bytes, kind=config.store_kind, durable=durable)
    try:
        yield store
    finally:
        store.close()
