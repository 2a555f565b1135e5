"""What the checkpoint tests share: an image of a few megabytes, made of the host's own programs."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from belayer.sandbox import images
from belayer.sandbox.store import Store

TINY = "test-tiny"
_PROGRAMS = ("bash", "sh", "cat", "sleep", "mkdir", "rm", "stat", "ln", "chmod", "head", "mkfifo", "sync", "ls")


def make_tiny_image(store: Store, scratch: Path) -> str:
    """Put the image into the store, if it is not there; returns its name. Exporting its sandboxes takes no time."""
    if TINY in images.names(store):
        return TINY
    root = scratch / "tiny-root"
    for name in _PROGRAMS:
        found = shutil.which(name)
        assert found, f"this host has no {name}"
        _copy(root, Path("/usr/bin") / name, Path(found).resolve())
        listing = subprocess.run(["ldd", found], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/\S+) \(0x", listing):
            _copy(root, Path(library), Path(library).resolve())
    for name in ("bin", "sbin"):
        (root / "usr" / "sbin").mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    images.import_directory(store, TINY, root)
    shutil.rmtree(root)
    return TINY


@contextmanager
def tiny_image(scratch: Path) -> Iterator[str]:
    """The image in the default store, for the length of a block."""
    store = Store.open()
    try:
        yield make_tiny_image(store, scratch)
        images.remove(store, TINY)
    finally:
        store.close()


def _copy(root: Path, path: Path, source: Path) -> None:
    target = root / path.relative_to("/")
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
