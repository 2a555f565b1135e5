"""`python -m belayer.sandbox.setup`: build what sandboxes need, once. The second call only looks (well below 1 s)."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from belayer.errors import BelayerError
from belayer.sandbox import images
from belayer.sandbox._native import native_program
from belayer.sandbox.store import Store


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
