"""What of a run's checkpoints outlives its process, and who may delete it.

    <run>/checkpoints/run_id               names the run in the two places below
    <run>/checkpoints/<id>.json            manifests; a checkpoint exists when this does
    <run>/checkpoints/images/<id>/         process images on disk: moved here by `close()` and by the reaper, copied by
                                           the background writer; complete when the folder has this name
    <run>/checkpoints/pins/<id>            see `_pins`
    /dev/shm/belayer/data-<run id>/images/<id>/
                                           process images in memory (`_memory`), while the run is alive or was killed
    <store>/runs-data/<run id>/<id>        file-system snapshots

A file `lock` in the folders of memory and store is locked by the living process; `owner.json` names the checkpoints
folder. A dead run whose folder still exists may be resumed: `settle` moves its images from memory to disk. A dead run
whose folder is gone, or holds another run id, is garbage: `settle` deletes it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import threading
from pathlib import Path

from belayer.checkpoint.manifest import Manifest, read_manifest
from belayer.errors import CheckpointDamaged
from belayer.faults import failpoints
from belayer.files import write_atomically
from belayer.ownership import labels
from belayer.sandbox import _claims, _memory, _pins
from belayer.sandbox.store import DURABLE, Store, remove_tree

PREFIX = "data-"
MEMORY = "images"
PUBLISH_TIMEOUT_S = 5.0  # a disk that hangs in the middle of a publication holds nobody up longer than this
IMPORT_PREFIX = ".import-"  # and the label of the process that unpacks a checkpoint there


class RunPlaces:
    """Where the checkpoints of the run are whose checkpoints folder is given. To look only: it locks nothing."""

    def __init__(self, checkpoints: Path, run_id: str) -> None:
        self.checkpoints = checkpoints.absolute()
        self.run_id = run_id
        self.memory_home = labels.SHM_DIR / f"{PREFIX}{run_id}"
        self.memory = self.memory_home / MEMORY
        self.disk = self.checkpoints / "images"

    @classmethod
    def of(cls, checkpoints: Path) -> RunPlaces:
        """Raises `CheckpointDamaged` when the folder never had a checkpoint."""
        run_id = _read_id(checkpoints)
        if run_id is None:
            raise CheckpointDamaged(f"there are no checkpoints in {checkpoints}: it has no run_id")
        return cls(checkpoints, run_id)

    def snapshot_in(self, store: Store, checkpoint_id: str) -> Path:
        """Where the store has the file system of a checkpoint."""
        return store.root / "runs-data" / self.run_id / checkpoint_id

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

    def on_disk(self, checkpoint_id: str) -> bool:
        """Are its images on disk (also)?"""
        return (self.disk / checkpoint_id).is_dir()

    def in_memory(self, checkpoint_id: str) -> bool:
        """Are its images in memory (also)?"""
        return (self.memory / checkpoint_id).is_dir()


class RunData(RunPlaces):
    """The three places of one run, opened and locked by this process."""

    def __init__(self, checkpoints: Path, store: Store) -> None:
        checkpoints.mkdir(parents=True, exist_ok=True)
        run_id = _read_id(checkpoints)
        if run_id is None:
            write_atomically(checkpoints / "run_id", secrets.token_hex(8).encode())
            run_id = _read_id(checkpoints) or ""
        super().__init__(checkpoints, run_id)
        self.store = store
        self.snapshots = store.root / "runs-data" / self.run_id
        about = {"checkpoints": str(self.checkpoints)}
        self._memory_lock = _claims.claim(self.memory_home, about)
        try:
            _memory.make(self.memory)
            self._store_lock = _claims.claim(self.snapshots, about)
        except BaseException:
            os.close(self._memory_lock)
            raise
        # held by the thread that gives a checkpoint's parts their names, or takes them away
        self.publishing = threading.Lock()
        self.closed = False

    def remove(self, checkpoint_id: str) -> bool:
        """Delete one checkpoint: the manifest first, so that no half of it can be restored.

        False: another process reads it just now (see `_pins`), and it was not touched.
        """
        with self.publishing, _pins.unpinned(self.checkpoints, checkpoint_id) as free:
            if not free:
                return False
            self.manifest_path(checkpoint_id).unlink(missing_ok=True)
        failpoints.hit("checkpoint.remove.manifest")
        for place in (self.memory, self.disk):
            shutil.rmtree(place / checkpoint_id, ignore_errors=True)
        failpoints.hit("checkpoint.remove.images")
        remove_tree(self.snapshots / checkpoint_id)
        return True

    def mark_durable(self) -> None:
        """A snapshot of this run is about to be promised to survive a reboot: the store must be kept sound for it."""
        mark = self.snapshots / DURABLE
        if not mark.exists():
            fd = os.open(mark, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def to_disk(self, checkpoint_id: str) -> None:
        """Move one checkpoint's images from memory to disk. Raises `OSError`; they are then still in memory."""
        _move(self.memory / checkpoint_id, self.disk / checkpoint_id, self.publishing)

    def collect_garbage(self) -> None:
        """Delete what has no manifest: what a killed process was about to publish, or had begun to delete."""
        known = {path.stem for path in self.checkpoints.glob("*.json")}
        for place in (self.memory, self.disk, self.snapshots):
            for entry in list(place.iterdir()) if place.is_dir() else []:
                if entry.is_dir() and entry.name not in known:
                    remove_tree(entry) if place == self.snapshots else shutil.rmtree(entry, ignore_errors=True)
        for unpublished in self.checkpoints.glob("*.tmp"):
            unpublished.unlink(missing_ok=True)
        _pins.forget_unknown(self.checkpoints, known)

    def close(self) -> list[str]:
        """Move what remains to disk, or, when nothing remains, delete every trace outside the run's directory.

        Images that the disk has no room for stay in memory, where the next process finds them; returned are sentences
        about them.
        """
        if self.closed:
            return []
        got = self.publishing.acquire(timeout=PUBLISH_TIMEOUT_S)
        self.closed = True
        if got:
            self.publishing.release()
        self.collect_garbage()
        stay = []
        for manifest in self.manifests():
            if self.in_memory(manifest.id):
                try:
                    self.to_disk(manifest.id)
                except OSError as error:
                    stay.append(f"the images of checkpoint {manifest.id} stay in {self.memory}: {error}")
        if any(entry.is_dir() for entry in self.snapshots.iterdir()):
            os.close(self._store_lock)
        else:
            _claims.release(self.snapshots, self._store_lock)
        if stay:
            os.close(self._memory_lock)
        else:
            _memory.remove(self.memory)
            _claims.release(self.memory_home, self._memory_lock)
        return stay


def settle() -> list[str]:
    """Clear the memory of dead runs: move resumable images to disk, delete the rest. Says what was done."""
    done = []
    for memory in _claims.claimed_folders(labels.SHM_DIR, lambda name: name.startswith(PREFIX)):
        with _claims.if_dead(memory) as dead:
            if not dead:
                continue
            checkpoints = _owner(memory, memory.name.removeprefix(PREFIX))
            stay = _settle(memory / MEMORY, checkpoints) if checkpoints else ""
            if stay:
                done.append(stay)
                continue
            _memory.remove(memory / MEMORY)
            _claims.delete_dead(memory)
            done.append(f"{memory} ({f'moved to {checkpoints}' if checkpoints else 'deleted'})")
    return done


def _settle(memory: Path, checkpoints: Path) -> str:
    """Move what has a manifest. Says why it cannot all be moved: then it stays, until there is room."""
    for entry in [entry for entry in memory.iterdir() if entry.is_dir()] if memory.is_dir() else []:
        if (checkpoints / f"{entry.name}.json").exists():
            try:
                _move(entry, checkpoints / "images" / entry.name, threading.Lock())
            except OSError as error:
                return f"{memory} stays, its images cannot be moved to {checkpoints}: {error}"
    return ""


def settle_store(store: Store) -> list[str]:
    """Delete from the store what belongs to no living process and to no existing run."""
    done = []
    for folder in _claims.claimed_folders(store.root / "runs"):
        with _claims.if_dead(folder) as dead:
            if dead:
                _claims.delete_dead(folder)
                done.append(str(folder))
    for place in store.images.glob(f"{IMPORT_PREFIX}*"):
        if not (store.root / "runs" / place.name.removeprefix(IMPORT_PREFIX)).is_dir():  # an import that was killed
            remove_tree(place)
            done.append(str(place))
    for folder in _claims.claimed_folders(store.root / "runs-data"):
        with _claims.if_dead(folder) as dead:
            if dead and _owner(folder, folder.name) is None:
                _claims.delete_dead(folder)
                done.append(str(folder))
    return done + store.trees.collect()


def _move(source: Path, target: Path, publishing: threading.Lock) -> None:
    """Across file systems, so that `target` appears complete or not at all; `source` stays when that fails."""
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(f"{target.name}.{os.getpid()}.move.tmp")
        try:
            shutil.rmtree(fresh, ignore_errors=True)
            shutil.copytree(source, fresh)
            failpoints.hit("checkpoint.move.copied")
            with publishing:
                if not target.is_dir():
                    os.replace(fresh, target)
        except shutil.Error as error:
            raise _first_cause(error) from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        failpoints.hit("checkpoint.move.renamed")
    shutil.rmtree(source, ignore_errors=True)


def _first_cause(error: shutil.Error) -> OSError:
    """`copytree` collects the failures of single files, as texts only; its caller needs to know of a full disk."""
    reasons = [str(item[2]) for item in error.args[0]]
    number = errno.ENOSPC if any("[Errno 28]" in reason for reason in reasons) else errno.EIO
    return OSError(number, reasons[0])


def _read_id(checkpoints: Path) -> str | None:
    """The run's id, or None. Only what looks like one counts: folders of that name are deleted with all in them."""
    try:
        found = (checkpoints / "run_id").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return found if re.fullmatch("[0-9a-f]{16}", found) else None


def _owner(folder: Path, run_id: str) -> Path | None:
    """The checkpoints folder of the run, if it still exists and is still that run's."""
    try:
        checkpoints = Path(json.loads((folder / "owner.json").read_text())["checkpoints"])
        return checkpoints if _read_id(checkpoints) == run_id else None
    except (OSError, ValueError, KeyError):
        return None
