"""What of a run's checkpoints outlives its process, and who may delete it.

    <run>/checkpoints/run_id               names the run in the two places below
    <run>/checkpoints/<id>.json            manifests; a checkpoint exists when this does
    <run>/checkpoints/images/<id>/         process images on disk: moved here by `close()` and by the reaper
    /dev/shm/belayer/data-<run id>/<id>/   process images in memory, while the run is alive or was killed
    <store>/runs-data/<run id>/<id>        file-system snapshots

A file `lock` in the folders of memory and store is locked by the living process; `owner.json` names the checkpoints
folder. A dead run whose folder still exists may be resumed: `settle` moves its images from memory to disk. A dead run
whose folder is gone, or holds another run id, is garbage: `settle` deletes it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from pathlib import Path

import google_crc32c

from belayer.checkpoint.manifest import ImageFile, Manifest, read_manifest
from belayer.errors import CheckpointDamaged
from belayer.ownership import labels
from belayer.sandbox import _claims
from belayer.sandbox.store import Store, remove_tree

PREFIX = "data-"


class RunData:
    """The three places of one run, opened and locked by this process."""

    def __init__(self, checkpoints: Path, store: Store) -> None:
        checkpoints.mkdir(parents=True, exist_ok=True)
        self.checkpoints = checkpoints.absolute()
        id_file = self.checkpoints / "run_id"
        if not id_file.exists():
            fresh = id_file.with_suffix(f".{os.getpid()}")
            fresh.write_text(secrets.token_hex(8))
            os.replace(fresh, id_file)
        self.run_id = id_file.read_text().strip()
        self.memory = labels.SHM_DIR / f"{PREFIX}{self.run_id}"
        self.disk = self.checkpoints / "images"
        self.store = store
        self.snapshots = store.root / "runs-data" / self.run_id
        about = {"checkpoints": str(self.checkpoints)}
        self._memory_lock = _claims.claim(self.memory, about)
        try:
            self._store_lock = _claims.claim(self.snapshots, about)
        except BaseException:
            os.close(self._memory_lock)
            raise
        self._open = True

    def manifest_path(self, checkpoint_id: str) -> Path:
        return self.checkpoints / f"{checkpoint_id}.json"

    def manifests(self) -> list[Manifest]:
        """Every readable manifest, oldest first. An unreadable one does not exist; its restore says why."""
        found = []
        for path in self.checkpoints.glob("*.json"):
            try:
                found.append(read_manifest(path))
            except CheckpointDamaged:
                continue
        return sorted(found, key=lambda m: m.sequence)

    def images(self, checkpoint_id: str) -> Path | None:
        """Where this checkpoint's process images are."""
        for place in (self.memory, self.disk):
            if (place / checkpoint_id).is_dir():
                return place / checkpoint_id
        return None

    def remove(self, checkpoint_id: str) -> None:
        """Delete one checkpoint: the manifest first, so that no half of it can be restored."""
        self.manifest_path(checkpoint_id).unlink(missing_ok=True)
        for place in (self.memory, self.disk):
            shutil.rmtree(place / checkpoint_id, ignore_errors=True)
        remove_tree(self.snapshots / checkpoint_id)

    def to_disk(self, checkpoint_id: str) -> None:
        """Move one checkpoint's images from memory to disk."""
        _move(self.memory / checkpoint_id, self.disk / checkpoint_id)

    def collect_garbage(self) -> None:
        """Delete images and snapshots without a manifest: what a killed process was about to publish."""
        known = {path.stem for path in self.checkpoints.glob("*.json")}
        for place in (self.memory, self.disk, self.snapshots):
            for entry in list(place.iterdir()) if place.is_dir() else []:
                if entry.is_dir() and entry.name not in known:
                    remove_tree(entry) if place == self.snapshots else shutil.rmtree(entry, ignore_errors=True)

    def close(self) -> None:
        """Move what remains to disk, or, when nothing remains, delete every trace outside the run's directory."""
        if not self._open:
            return
        self._open = False
        self.collect_garbage()
        for manifest in self.manifests():
            if (self.memory / manifest.id).is_dir():
                self.to_disk(manifest.id)
        if any(entry.is_dir() for entry in self.snapshots.iterdir()):
            os.close(self._store_lock)
        else:
            _claims.release(self.snapshots, self._store_lock)
        _claims.release(self.memory, self._memory_lock)


def settle() -> list[str]:
    """Clear the memory of dead runs: move resumable images to disk, delete the rest. Says what was done."""
    done = []
    for memory in _claims.claimed_folders(labels.SHM_DIR, lambda name: name.startswith(PREFIX)):
        with _claims.if_dead(memory) as dead:
            if not dead:
                continue
            checkpoints = _owner(memory, memory.name.removeprefix(PREFIX))
            for entry in [e for e in memory.iterdir() if e.is_dir()] if checkpoints else []:
                if checkpoints and (checkpoints / f"{entry.name}.json").exists():
                    _move(entry, checkpoints / "images" / entry.name)
            _claims.delete_dead(memory)
            done.append(f"{memory} ({f'moved to {checkpoints}' if checkpoints else 'deleted'})")
    return done


def settle_store(store: Store) -> list[str]:
    """Delete from the store what belongs to no living process and to no existing run."""
    done = []
    for folder in _claims.claimed_folders(store.root / "runs"):
        with _claims.if_dead(folder) as dead:
            if dead:
                _claims.delete_dead(folder)
                done.append(str(folder))
    for folder in _claims.claimed_folders(store.root / "runs-data"):
        with _claims.if_dead(folder) as dead:
            if dead and _owner(folder, folder.name) is None:
                _claims.delete_dead(folder)
                done.append(str(folder))
    return done


def describe_images(folder: Path) -> dict[str, ImageFile]:
    """Size and checksum of each image file."""
    return {path.name: _describe(path) for path in sorted(folder.iterdir()) if _is_image(path)}


def verify_images(folder: Path, expected: dict[str, ImageFile]) -> None:
    """Raises `CheckpointDamaged` unless the folder holds exactly the expected files with the expected content."""
    names = {path.name for path in folder.iterdir() if _is_image(path)}
    if names != set(expected):
        raise CheckpointDamaged(f"{folder}: image files are missing or foreign: {sorted(names ^ set(expected))[:4]}")
    for name, file in expected.items():
        if _describe(folder / name) != file:
            raise CheckpointDamaged(f"{folder / name} is not what was written: size or checksum differ")


def _is_image(path: Path) -> bool:
    return path.suffix == ".img"


def _describe(path: Path) -> ImageFile:
    checksum = size = 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 22):
            checksum = google_crc32c.extend(checksum, block)
            size += len(block)
    return ImageFile(size, checksum)


def _move(source: Path, target: Path) -> None:
    """Across file systems, so that `target` appears complete or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(source, fresh)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(fresh, target)
    shutil.rmtree(source, ignore_errors=True)


def _owner(folder: Path, run_id: str) -> Path | None:
    """The checkpoints folder of the run, if it still exists and is still that run's."""
    try:
        checkpoints = Path(json.loads((folder / "owner.json").read_text())["checkpoints"])
        return checkpoints if (checkpoints / "run_id").read_text().strip() == run_id else None
    except (OSError, ValueError, KeyError):
        return None
