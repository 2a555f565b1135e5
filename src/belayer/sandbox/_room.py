"""Room for the next process images in memory: within a budget, and with the oldest ones moved to disk."""

from __future__ import annotations

import errno
from collections.abc import Container

from belayer.checkpoint.manifest import Manifest
from belayer.errors import StorageFull
from belayer.sandbox import _data, _memory
from belayer.sandbox.container import Sandbox

SHM_RESERVE = 64 << 20  # bytes of memory-backed storage that are left to others
_SLACK = 4 << 20  # bytes of images beside the memory itself


def make_room(
    data: _data.RunData, sandbox: Sandbox, manifests: list[Manifest], pinned: Container[str], most: int
) -> None:
    """Room for a checkpoint of `sandbox`, so that images take no more than `most` bytes of memory. Blocking.

    Of the run's `manifests`, the oldest give way; none whose id is in `pinned`. Raises `StorageFull`.
    """
    data.store.check_room()
    held = [manifest for manifest in manifests if data.in_memory(manifest.id)]
    used = sum(manifest.image_bytes for manifest in held)
    # those that the background writer has copied cost nothing to let go
    held.sort(key=lambda m: (not data.on_disk(m.id), m.sequence))
    held = [manifest for manifest in held if manifest.id not in pinned]
    wanted = sandbox.resident_bytes() + _SLACK
    free = _memory.free_bytes(data.memory) - SHM_RESERVE
    while held and (used + wanted > most or wanted > free):
        oldest = held.pop(0)
        try:
            data.to_disk(oldest.id)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            break  # neither has the disk room
        used -= oldest.image_bytes
        free += oldest.image_bytes
    if wanted > free or wanted > most:
        raise StorageFull(
            f"a checkpoint of {sandbox.name} needs up to {wanted >> 20} MB; {data.memory} has "
            f"{max(free, 0) >> 20} MB free, and sandbox.images_bytes allows {most >> 20} MB",
            kept="the sandbox and its earlier checkpoints",
            next_step="free memory, enlarge /dev/shm or raise sandbox.images_bytes",
        )
