"""What `belayer doctor --reap` and a new run do about sandboxes of dead runs, beyond what their labels already name."""

from __future__ import annotations

from pathlib import Path

from belayer.errors import SandboxUnavailable
from belayer.ownership import store_dir
from belayer.sandbox import _data, images
from belayer.sandbox.criu import forget_kernel_features
from belayer.sandbox.store import Store, existing_kinds, unmount_unused


def reap(store_folder: Path | None = None) -> list[str]:
    """Clear what dead runs left in memory, in the store and in the mount table; returns a line for each thing done.

    Resumable checkpoints are not lost: their images move from memory to the run's directory. Call it after
    `belayer.ownership.reap`, which kills the processes.
    """
    done = _data.settle()
    forget_kernel_features()
    folder = (store_folder or store_dir()).absolute()
    for kind in existing_kinds(folder):
        try:
            store = Store.open(folder, kind=kind)
        except SandboxUnavailable:
            continue  # not to be used now: nothing can be in use in it
        try:
            done += [*images.sweep(store), *_data.settle_store(store)]
        finally:
            store.close()
    return [*done, *unmount_unused()]
