"""Is a checkpoint what was captured, and can it be restored here? Asked before anything of it is used."""

from __future__ import annotations

from pathlib import Path

from belayer.checkpoint.manifest import Manifest
from belayer.errors import CheckpointDamaged
from belayer.sandbox import _data
from belayer.sandbox._here import check_fits
from belayer.sandbox._image_files import verify_images
from belayer.sandbox._levels import Levels


def verify(data: _data.RunData, runtime: str, levels: Levels, manifest: Manifest) -> Path:
    """Folder of the process images. Raises `CheckpointDamaged` unless both halves are as captured. Blocking.

    Of the snapshot it is checked that nobody has changed it. That the disk returns what was written to it is for
    the file system to check when it is read (btrfs does, with a checksum per block).
    """
    folder = data.images(manifest.id)
    snapshot = data.snapshots / manifest.id
    if manifest.level == "full" and manifest.runtime != runtime:
        raise CheckpointDamaged(
            f"checkpoint {manifest.id} was taken by runtime {manifest.runtime}, this is {runtime}",
            next_step=f'set sandbox.runtime = "{manifest.runtime}"',
        )
    levels.check(manifest)
    check_fits(manifest)
    if folder is None and manifest.images:
        raise CheckpointDamaged(f"the process images of checkpoint {manifest.id} are gone")
    if not snapshot.is_dir():
        raise CheckpointDamaged(f"the file-system snapshot of checkpoint {manifest.id} is gone")
    if data.store.trees.identity(snapshot) != manifest.fs_identity:
        raise CheckpointDamaged(f"the file-system snapshot of checkpoint {manifest.id} was changed")
    if folder is not None:
        verify_images(folder, manifest.images)
    return folder or data.memory / manifest.id  # `fs`: nothing is read from there
