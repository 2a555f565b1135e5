"""Export a checkpoint to one file, import it into another run, also on another host. The file's format: `_archive`."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from belayer.checkpoint.manifest import (
    Manifest,
    decode_manifest,
    encode_manifest,
    read_manifest,
    sync_folder,
    write_manifest,
)
from belayer.errors import CheckpointDamaged, CheckpointRefused, StorageFull
from belayer.faults import failpoints
from belayer.ownership import RunLabel
from belayer.sandbox import _archive, _claims, _pins
from belayer.sandbox._data import IMPORT_PREFIX, RunData, RunPlaces, settle_store
from belayer.sandbox._here import check_fits
from belayer.sandbox._image_files import verify_images
from belayer.sandbox._trees import remove_tree
from belayer.sandbox._writer import sync_snapshot
from belayer.sandbox.store import Store, storage_errors
from belayer.versions import versions


def export_checkpoint(checkpoints: Path, checkpoint_id: str, file: Path, store: Store) -> Manifest:
    """Write the checkpoint to `file`, which must not exist yet. The run may be alive; the checkpoint stays meanwhile.

    `file` appears when it is complete and on the disk. Raises `CheckpointDamaged`, `StorageFull`, and
    `CheckpointRefused` when there is such a file already. Blocking.
    """
    places = RunPlaces.of(checkpoints)
    if os.path.lexists(file):
        raise CheckpointRefused(f"{file} exists already", kept="that file", next_step="choose another name")
    with _pins.pinned(places.checkpoints, checkpoint_id) as there, ExitStack() as opened:
        if not there:
            raise CheckpointDamaged(f"checkpoint {checkpoint_id} is being deleted")
        manifest = read_manifest(places.manifest_path(checkpoint_id))
        images = _open_images(places, manifest, opened)
        snapshot = places.snapshot_in(store, checkpoint_id)
        if not snapshot.is_dir() or store.trees.identity(snapshot) != manifest.fs_identity:
            raise CheckpointDamaged(f"the file-system snapshot of checkpoint {checkpoint_id} is gone or was changed")
        with RunLabel.new(f"export of {checkpoint_id}") as label, _working_folder(store, label) as home:
            root = store.trees.root(home / "export", label.dir / "export")
            try:
                with storage_errors(f"checkpoint {checkpoint_id} cannot be exported"):
                    store.trees.make_root(snapshot, root)
                with _new_file(file) as out:
                    _write(out, manifest, images, root.path)
            finally:
                store.trees.remove_root(root)
    return manifest


def import_checkpoint(file: Path, checkpoints: Path, store: Store) -> Manifest:
    """Make the checkpoint in `file` one of the run whose checkpoints folder is given (made if need be). Blocking.

    Only archives from a trusted source: CRIU restores, as root, what the images say. Raises `RunInUse` (the run is
    alive), `CheckpointDamaged`, `CheckpointUnfit` (made on a host that is too different), `CheckpointRefused` (the run
    has that checkpoint already), `StorageFull`; then nothing of it stays.
    """
    with open(file, "rb") as source:
        reader = _archive.ArchiveReader(source, str(file))
        manifest = decode_manifest(reader.small("manifest.json"), f"in {file}")
        about = _about(reader)
        check_fits(manifest)
        if "/" in manifest.id or manifest.id.startswith("."):
            raise CheckpointDamaged(f"{file} names a checkpoint {manifest.id!r}")
        data = RunData(checkpoints, store)
        try:
            data.collect_garbage()
            settle_store(store)
            if data.manifest_path(manifest.id).exists():
                raise CheckpointRefused(f"the run has checkpoint {manifest.id} already", kept="that one")
            try:
                return _unpack(reader, manifest, about, data)
            except BaseException as error:
                data.remove(manifest.id)
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise StorageFull(f"no room to import {file}: {error}", kept="everything") from error
                raise
        finally:
            data.close()


def _write(out: BinaryIO, manifest: Manifest, images: dict[str, BinaryIO], root: Path) -> None:
    archive = _archive.ArchiveWriter(out)
    try:
        archive.add("manifest.json", encode_manifest(manifest))
        version = versions().get("belayer", "unknown")
        about = _archive.About(_archive.FORMAT, version, _archive.find_sockets(root))
        archive.add("checkpoint.json", msgspec.json.encode(about))
        for name, content in images.items():
            archive.add_file(f"images/{name}", content, manifest.images[name].size)
        failpoints.hit("checkpoint.export.images")
        for number, piece in enumerate(_archive.pack_tree(root)):
            archive.add(f"tree/{number:06}", piece)
        failpoints.hit("checkpoint.export.tree")
        archive.finish()
    finally:
        archive.abandon()


def _unpack(reader: _archive.ArchiveReader, manifest: Manifest, about: _archive.About, data: RunData) -> Manifest:
    folder = data.disk / f"{manifest.id}.{os.getpid()}.import.tmp"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        for name in manifest.images:
            found, blocks = reader.next()
            if found != f"images/{name}" or "/" in name:
                raise CheckpointDamaged(f"{reader.name} is damaged: images/{name} is missing")
            _archive.copy_blocks(blocks, folder / name)
        verify_images(folder, manifest.images)
        sync_folder(folder)
        failpoints.hit("checkpoint.import.images")
        with RunLabel.new(f"import of {manifest.id}") as label, _working_folder(data.store, label) as home:
            identity = _unpack_snapshot(reader, about, data, manifest.id, label, home)
        failpoints.hit("checkpoint.import.tree")
        os.replace(folder, data.disk / manifest.id)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for place in (data.disk, data.checkpoints, data.checkpoints.parent):
        sync_folder(place)
    sync_snapshot(data.snapshots / manifest.id)
    data.mark_durable()
    newest = max((known.sequence for known in data.manifests()), default=0)
    imported = msgspec.structs.replace(manifest, fs_identity=identity, sequence=newest + 1, durability="host")
    write_manifest(data.manifest_path(manifest.id), imported, durable=True)
    return imported


def _unpack_snapshot(
    reader: _archive.ArchiveReader,
    about: _archive.About,
    data: RunData,
    checkpoint_id: str,
    label: RunLabel,
    home: Path,
) -> str:
    """Unpack the file system as an image, make a root of it, and its snapshot: every kind of store can do that."""
    trees = data.store.trees
    image = data.store.images / f"{IMPORT_PREFIX}{label.name}"
    root = trees.root(home / "import", label.dir / "import")
    data.store.check_room()
    try:
        with storage_errors(f"checkpoint {checkpoint_id} cannot be imported"):
            filled = trees.make_image(image)
            _archive.unpack_tree(filled, _pieces(reader), reader.name)
            _archive.make_sockets(filled, about.sockets)
            trees.seal_image(image)
            trees.make_root(image, root)
            trees.snapshot(root, data.snapshots / checkpoint_id)
            return trees.identity(data.snapshots / checkpoint_id)
    finally:
        trees.remove_root(root)
        remove_tree(image)


def _pieces(reader: _archive.ArchiveReader) -> Iterator[bytes]:
    """The file system's bytes, up to the archive's end, which is checked."""
    number = 0
    while True:
        before = reader.checksum
        name, blocks = reader.next()
        if name == "end.json":
            reader.check_end(b"".join(blocks), before)
            return
        if name != f"tree/{number:06}":
            raise CheckpointDamaged(f"{reader.name} is damaged: piece {number} of its file system is missing")
        yield from blocks
        number += 1


def _about(reader: _archive.ArchiveReader) -> _archive.About:
    try:
        about = msgspec.json.decode(reader.small("checkpoint.json"), type=_archive.About)
    except msgspec.MsgspecError as error:
        raise CheckpointDamaged(f"{reader.name} is damaged: {error}") from error
    if about.format != _archive.FORMAT:
        raise CheckpointDamaged(
            f"{reader.name} has archive format {about.format}; this version reads {_archive.FORMAT}",
            next_step=f"use Belayer {about.belayer}",
        )
    return about


def _open_images(places: RunPlaces, manifest: Manifest, opened: ExitStack) -> dict[str, BinaryIO]:
    """All image files, opened after they were verified: the run may move them while they are read."""
    if not manifest.images:
        return {}
    folder = places.images(manifest.id)
    if folder is None:
        raise CheckpointDamaged(f"the process images of checkpoint {manifest.id} are gone")
    try:
        files: dict[str, BinaryIO] = {}
        for name in manifest.images:
            files[name] = opened.enter_context((folder / name).open("rb"))
    except OSError as error:
        raise CheckpointDamaged(f"{error.filename} cannot be read: {error.strerror}") from error
    if places.images(manifest.id) == folder:
        verify_images(folder, manifest.images)
    return files


@contextmanager
def _working_folder(store: Store, label: RunLabel) -> Iterator[Path]:
    """A folder of the store that goes with this process, however that ends."""
    home = store.root / "runs" / label.name
    claim = _claims.claim(home)
    try:
        yield home
    finally:
        _claims.release(home, claim)


@contextmanager
def _new_file(file: Path) -> Iterator[BinaryIO]:
    """A file that gets its name when the block has ended well: who is killed before leaves nothing."""
    folder = file.absolute().parent
    named: Path | None = None
    try:
        try:
            fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            named = folder / f".{file.name}.{os.getpid()}.tmp"  # this file system has only files with names
            fd = os.open(named, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
            _give_name(out.fileno(), named, file)
        sync_folder(folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"no room to write {file}", kept="the checkpoint", next_step="free disk space, or write it elsewhere"
            ) from error
        raise
    finally:
        if named is not None:
            named.unlink(missing_ok=True)


def _give_name(fd: int, named: Path | None, file: Path) -> None:
    if named is not None:
        os.link(named, file)  # unlike a rename, it never replaces anything
        return
    top = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # a folder's descriptor makes this linkat(2), which can follow the link in /proc to the file without a name
        os.link(f"/proc/self/fd/{fd}", file.absolute(), src_dir_fd=top, follow_symlinks=True)
    finally:
        os.close(top)
