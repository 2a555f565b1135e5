"""`belayer image`: the images of the sandbox store."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from belayer.errors import ImageError
from belayer.sandbox import images
from belayer.sandbox.image_import import import_image
from belayer.sandbox.store import Store

console = Console(highlight=False, soft_wrap=True)


@contextmanager
def _store(folder: Path | None) -> Iterator[Store]:
    store = Store.open(folder)
    try:
        yield store
    finally:
        store.close()


def import_command(name: str, source: str, *, ref: str, store: Path | None) -> int:
    """Import and say what came of it."""
    with _store(store) as opened:
        info = import_image(
            opened, name, source, ref=ref, progress=lambda text: console.print(f"  {text}", markup=False)
        )
    console.print(f"image {info.name}: {info.files} files, {info.bytes >> 20} MB, {info.digest[:19]}", markup=False)
    return 0


def list_command(*, as_json: bool, store: Path | None) -> int:
    """A table, or JSON."""
    with _store(store) as opened:
        found = [info for name in images.names(opened) if (info := images.read_info(opened, name)) is not None]
    if as_json:
        print(json.dumps([msgspec.to_builtins(info) for info in found], indent=1))
        return 0
    table = Table("image", "digest", "files", "MB", "made", "from")
    for info in found:
        made = datetime.datetime.fromtimestamp(info.created).strftime("%Y-%m-%d %H:%M")
        table.add_row(info.name, info.digest[:19], str(info.files), str(info.bytes >> 20), made, info.source[:60])
    console.print(table)
    return 0


def remove_command(name: str, *, store: Path | None) -> int:
    """Remove one; an image that is not there is an error."""
    with _store(store) as opened:
        images.find(opened, name)
        if opened.trees.kind != "btrfs" and any((opened.root / "runs").iterdir()):
            raise ImageError(
                f"image {name} may be in use: runs are alive in this store", next_step="wait until they end"
            )
        images.remove(opened, name)
    console.print(f"image {name} is removed", markup=False)
    return 0
