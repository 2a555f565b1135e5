"""`python -m belayer.sandbox.setup`: build what sandboxes need, once. The second call only looks (well below 1 s)."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path

from belayer.errors import BelayerError
from belayer.ownership import cache_dir
from belayer.sandbox import images
from belayer.sandbox._native import native_program
from belayer.sandbox._trees import StoreKind
from belayer.sandbox.store import Store, existing_kinds

BASE = "base"


def set_up(store_folder: Path | None = None, progress=print) -> None:
    """Build the native program, the store and the base image; `progress` gets one line per step.

    Raises `SandboxUnavailable`, `ImageError` or `StorageFull` with what to do.
    """
    begun = time.monotonic()
    progress(f"sandbox program: {native_program()}")
    store = Store.open(store_folder)
    try:
        progress(f"sandbox store: {store.root}, {store.free_bytes() >> 30} GB free")
        info = images.build_base(store, progress=progress)
        progress(f"sandbox image {info.name}: {info.files} files, {info.bytes >> 20} MB, {info.digest[:19]}")
    finally:
        store.close()
    progress(f"sandboxes are set up ({time.monotonic() - begun:.1f} s)")


def separate_store(name: str) -> None:
    """For tests and measurements: from here on this process and its children use a store of their own by default.

    It lies in the cache folder under `name` and gets the base image of the user's own store, once. So a durable run of
    the user, which makes every transaction of its store wait for the disk, slows nothing, and nothing is left in there.
    Without a store of the user's, or where `BELAYER_STORE` names one already, nothing happens. Raises
    `SandboxUnavailable`, `StorageFull`, `ImageError`.
    """
    kinds = existing_kinds(cache_dir() / "store")
    if "BELAYER_STORE" in os.environ or not kinds or os.geteuid() != 0:
        return
    folder = cache_dir() / name
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "setup.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        store = Store.open(folder, durable=False, kind=kinds[0])
        try:
            info = images.read_info(store, BASE)
            if info is None or info.recipe != images.RECIPE:
                _copy_base(store, kinds[0])
        finally:
            store.close()
    os.environ["BELAYER_STORE"] = str(folder)


def _copy_base(store: Store, kind: StoreKind) -> None:
    users = Store.open(cache_dir() / "store", durable=False, kind=kind)
    try:
        if BASE in images.names(users):
            images.import_directory(store, BASE, images.find(users, BASE).path)
    finally:
        users.close()


def main() -> int:
    """Exit code 0, or 1 with the reason on stderr."""
    try:
        set_up(progress=lambda text: print(f"  {text}", flush=True))
    except BelayerError as error:
        print(f"sandbox set-up failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
