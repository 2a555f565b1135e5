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

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import google_crc32c

from belayer.checkpoint.manifest import ImageFile, Manifest, read_manifest
from belayer.errors import CheckpointDamaged, RunInUse
from belayer.ownership import labels
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
        self.memory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(self.memory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise RunInUse(f"the checkpoints in {self.checkpoints} are used by another living process") from None
        (self.memory / "owner.json").write_text(json.dumps({"checkpoints": str(self.checkpoints)}))
        self.snapshots.mkdir(exist_ok=True)
        (self.snapshots / "owner.json").write_text(json.dumps({"checkpoints": str(self.checkpoints)}))
        self._store_lock = os.open(self.snapshots / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._store_lock, fcntl.LOCK_EX)

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
        if self._lock < 0:
            return
        self.collect_garbage()
        for manifest in self.manifests():
            if (self.memory / manifest.id).is_dir():
                self.to_disk(manifest.id)
        if not any(entry.is_dir() for entry in self.snapshots.iterdir()):
            shutil.rmtree(self.snapshots, ignore_errors=True)
        shutil.rmtree(self.memory, ignore_errors=True)
        os.close(self._store_lock)
        os.close(self._lock)
        self._lock = -1


def settle() -> list[str]:
    """Clear the memory of dead runs: move resumable images to disk, delete the rest. Says what was done."""
    done = []
    for memory in sorted(labels.SHM_DIR.glob(f"{PREFIX}*")) if labels.SHM_DIR.is_dir() else []:
        fd = _try_lock(memory / "lock")
        if fd is None:
            continue
        try:
            checkpoints = _owner(memory, memory.name.removeprefix(PREFIX))
            for entry in [e for e in memory.iterdir() if e.is_dir()] if checkpoints else []:
                if checkpoints and (checkpoints / f"{entry.name}.json").exists():
                    _move(entry, checkpoints / "images" / entry.name)
            shutil.rmtree(memory, ignore_errors=True)
            done.append(f"{memory} ({'moved to ' + str(checkpoints) if checkpoints else 'deleted'})")
        finally:
            os.close(fd)
    return done


def settle_store(store: Store) -> list[str]:
    """Delete from the store what belongs to no living label and to no existing run."""
    done = []
    for folder in _folders(store.root / "runs"):
        if not _is_locked(folder / "lock"):
            remove_tree(folder)
            done.append(str(folder))
    for folder in _folders(store.root / "runs-data"):
        if _owner(folder, folder.name) is None and not _is_locked(folder / "lock"):
            remove_tree(folder)
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


def _folders(parent: Path) -> Iterator[Path]:
    if parent.is_dir():
        yield from [entry for entry in sorted(parent.iterdir()) if entry.is_dir()]


def _try_lock(path: Path) -> int | None:
    """The locked descriptor, or None when a living process has the lock. A missing lock file is made: nobody has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd
    except BlockingIOError:
        os.close(fd)
        return None


def _is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    fd = _try_lock(path)
    if fd is None:
        return True
    os.close(fd)
    return False
