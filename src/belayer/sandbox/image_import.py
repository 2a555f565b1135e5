"""`import_image`: make a sandbox image of whatever holds one. Unpacked once; all its sandboxes share it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from belayer.errors import ImageError
from belayer.sandbox import _oci, images
from belayer.sandbox._layers import Unpacker, exists_in
from belayer.sandbox._trees import Root
from belayer.sandbox.images import ImageInfo
from belayer.sandbox.store import Store, storage_errors

LIMIT_BYTES = 64 << 30  # of one image's files
SAVE_TIMEOUT_S = 1800.0
_SAVE = {"podman": ["image", "save", "--format", "oci-archive", "--output"], "docker": ["image", "save", "--output"]}


def import_image(
    store: Store,
    name: str,
    source: str,
    *,
    ref: str = "",
    limit_bytes: int = LIMIT_BYTES,
    progress: Callable[[str], None] = lambda text: None,
) -> ImageInfo:
    """Import `source` as image `name`, in the place of an older one of that name. Blocking.

    `source` is `podman:REFERENCE`, `docker:REFERENCE`, an archive (OCI or docker), the folder of an OCI layout, or the
    folder of a root file system; `ref` picks one of several images in an archive. An image whose content is in the
    store already is not unpacked again. Raises `ImageError` (then nothing was changed) and `StorageFull`.
    """
    images.check_name(name)
    program, _, reference = source.partition(":")
    if program in _SAVE and reference:
        with images.workspace(store) as fresh:
            archive = fresh.with_suffix(".save")
            progress(f"{program} saves {reference}")
            with storage_errors(f"image {name} cannot be imported"):
                _save(program, reference, archive)
            return _import(store, name, archive, source, ref, limit_bytes, progress)
    path = Path(source)
    if not path.exists():
        raise ImageError(
            f"there is no {path}", next_step="give an archive, a folder, podman:REFERENCE or docker:REFERENCE"
        )
    if path.is_dir() and not _oci.is_image(_oci.FolderBlobs(path)):
        return images.import_directory(store, name, path)
    return _import(store, name, path, str(path), ref, limit_bytes, progress)


def _import(
    store: Store, name: str, path: Path, source: str, ref: str, limit_bytes: int, progress: Callable[[str], None]
) -> ImageInfo:
    with _oci.opened(path) as blobs:
        found = _oci.find_image(blobs, ref)
        known = _same_content(store, found.digest)
        if known is not None and (known.name == name or store.trees.kind == "btrfs"):
            progress(f"the store has this content already, as {known.name}")
            return known if known.name == name else _second_name(store, known, name, source)
        with images.new_image(store, name, source=source, origin=found.digest, config=found.config) as root:
            unpacker = Unpacker(root, limit_bytes)
            try:
                _oci.unpack(blobs, found, unpacker, progress)
                if found.config.workdir:
                    unpacker.folder(found.config.workdir)
            finally:
                unpacker.close()
            if unpacker.skipped:
                progress(f"{unpacker.skipped} device nodes were left out: containers get their own")
            for program in ("bin/sh", "bin/bash"):
                if not exists_in(root, program):
                    raise ImageError(f"the image has no /{program}, which sandboxes need", next_step="add bash to it")
    info = images.read_info(store, name)
    assert info is not None
    return info


def _same_content(store: Store, origin: str) -> ImageInfo | None:
    for name in images.names(store):
        info = images.read_info(store, name)
        if info is not None and info.origin == origin and info.recipe == images.RECIPE:
            return info
    return None


def _second_name(store: Store, known: ImageInfo, name: str, source: str) -> ImageInfo:
    """The same tree under another name: a snapshot, which takes no space."""
    with images.workspace(store) as fresh:
        tree = store.images / known.name
        store.trees.snapshot(Root(tree, tree), fresh)
        fields = {field: getattr(known, field) for field in known.__struct_fields__}
        info = ImageInfo(**{**fields, "name": name, "source": source})
        images.publish(store, fresh, info)
    return info


def _save(program: str, reference: str, archive: Path) -> None:
    if shutil.which(program) is None:
        raise ImageError(f"{program} is not installed", next_step="save the image elsewhere and import the archive")
    if reference.startswith("-"):
        raise ImageError(f"{reference!r} is not an image's reference")
    command = [program, *_SAVE[program], str(archive), reference]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=SAVE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise ImageError(f"{program} did not save {reference} within {SAVE_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        raise ImageError(f"{program} cannot save {reference}: {done.stderr.strip()[-500:]}")
