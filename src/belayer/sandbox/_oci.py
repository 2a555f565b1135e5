"""Reads images that other tools made: OCI layouts, OCI archives and docker archives. Nothing here writes.

Every blob is checked against its digest before it is used, and every layer, once uncompressed, against the digest that
the image's configuration gives for it.

Sources: OCI image specification (image-layout.md, manifest.md, config.md); the manifest.json of `docker image save`.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from belayer.errors import ImageError
from belayer.sandbox._layers import Unpacker, architecture

_DIGEST = re.compile(r"(sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128})")
_LARGEST_JSON = 16 << 20
MOST_VARIABLES = 100
_REF = "org.opencontainers.image.ref.name"
_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)


class ImageConfig(msgspec.Struct, frozen=True):
    """What an image says about running it. `user` is kept for people: commands in a sandbox run as root."""

    env: dict[str, str] = {}
    workdir: str = ""
    user: str = ""


class Layer(msgspec.Struct, frozen=True):
    """`place` in the source; `digest` of the blob ("" in a docker archive), `diff_id` of what it uncompresses to."""

    place: str
    digest: str
    diff_id: str


class Source(msgspec.Struct, frozen=True):
    """An image found in a source. `digest` is that of its configuration, which names all its content."""

    digest: str
    config: ImageConfig
    layers: list[Layer]


class Blobs(Protocol):
    """Named files: a folder, or an archive of one."""

    def open(self, place: str) -> BinaryIO: ...

    def has(self, place: str) -> bool: ...


class FolderBlobs:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def has(self, place: str) -> bool:
        return (self._folder / place).is_file()

    def open(self, place: str) -> BinaryIO:
        try:
            return open(self._folder / place, "rb")
        except OSError as error:
            raise ImageError(f"{self._folder / place} cannot be read: {error.strerror}") from error


class ArchiveBlobs:
    def __init__(self, archive: tarfile.TarFile, path: Path) -> None:
        self._archive, self._path = archive, path
        self._members = {member.name.removeprefix("./"): member for member in archive.getmembers()}

    def has(self, place: str) -> bool:
        return place in self._members

    def open(self, place: str) -> BinaryIO:
        for _ in range(8):  # `docker image save` makes links between equal layers
            member = self._members.get(place)
            if member is None:
                raise ImageError(f"{self._path} does not hold {place}")
            if member.isfile():
                return _checked(self._archive.extractfile(member))
            link = member.linkname
            if member.issym():
                link = str(Path(place).parent / link)
            place = _tidy(link)
        raise ImageError(f"{self._path}: {place} is a circle of links")


@contextmanager
def opened(path: Path) -> Iterator[Blobs]:
    """The blobs at `path`, a layout folder or an archive file (tar, also gzip, bzip2 or xz). Raises `ImageError`."""
    if path.is_dir():
        yield FolderBlobs(path)
        return
    try:
        with tarfile.open(path, "r:*") as archive:
            yield ArchiveBlobs(archive, path)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError | gzip.BadGzipFile):
            raise
        raise ImageError(f"{path} is not an image archive: {error}") from error


def is_image(blobs: Blobs) -> bool:
    """Is this an OCI layout or a docker archive?"""
    return (blobs.has("oci-layout") and blobs.has("index.json")) or blobs.has("manifest.json")


def find_image(blobs: Blobs, ref: str = "") -> Source:
    """The image for this machine; `ref` picks one of several by its reference or tag. Raises `ImageError`."""
    if blobs.has("oci-layout") and blobs.has("index.json"):
        return _from_layout(blobs, ref)
    if blobs.has("manifest.json"):
        return _from_docker(blobs, ref)
    raise ImageError("neither an OCI layout (oci-layout, index.json) nor a docker archive (manifest.json)")


def unpack(blobs: Blobs, source: Source, unpacker: Unpacker, progress: Callable[[str], None]) -> None:
    """Unpack all layers. Raises `ImageError` when one does not have its digest."""
    for number, layer in enumerate(source.layers, 1):
        progress(f"layer {number} of {len(source.layers)}: {layer.diff_id[:19]}")
        with blobs.open(layer.place) as blob:
            if layer.digest:
                _verify(blob, layer.digest, layer.place)
                blob.seek(0)
            content = _Hashed(_uncompressed(blob), layer.diff_id)
            try:
                unpacker.apply(content, layer.diff_id[:19])  # type: ignore[arg-type]
                content.finish()
            except (zlib.error, gzip.BadGzipFile, EOFError) as error:
                raise ImageError(f"layer {layer.place} cannot be uncompressed: {error}") from error


# -- the two formats ---------------------------------------------------------------------------------------------------
def _from_layout(blobs: Blobs, ref: str) -> Source:
    descriptor = _choose(_json(blobs, "index.json").get("manifests", []), ref)
    for _ in range(4):  # an index may hold indexes, one entry for each platform
        document = _blob_json(blobs, descriptor)
        if descriptor.get("mediaType") not in _INDEXES and "manifests" not in document:
            break
        descriptor = _choose(document.get("manifests", []), "")
    else:
        raise ImageError("the image's index does not lead to a manifest")
    config_digest = _digest(document.get("config", {}))
    config = _blob_json(blobs, document["config"])
    layers = [_digest(layer) for layer in document.get("layers", [])]
    return _source(config, config_digest, [(_place(digest), digest) for digest in layers])


def _from_docker(blobs: Blobs, ref: str) -> Source:
    entries = _json(blobs, "manifest.json")
    if not isinstance(entries, list):
        raise ImageError("manifest.json is not a list of images")
    wanted = [entry for entry in entries if not ref or any(_matches(ref, tag) for tag in entry.get("RepoTags") or [])]
    if len(wanted) != 1:
        tags = sorted(tag for entry in entries for tag in entry.get("RepoTags") or [])
        raise ImageError(
            f"the archive holds {len(entries)} images, {len(wanted)} of them fit", next_step=f"choose one: {tags}"
        )
    place = _tidy(str(wanted[0].get("Config", "")))
    with blobs.open(place) as file:
        data = file.read(_LARGEST_JSON)
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    named = re.fullmatch(r"(?:.*/)?([0-9a-f]{64})(?:\.json)?", place)
    if named and f"sha256:{named[1]}" != digest:
        raise ImageError(f"the image's configuration {place} does not have the digest in its name")
    layers = [(_tidy(str(layer)), "") for layer in wanted[0].get("Layers") or []]
    return _source(_parse(data, place), digest, layers)


def _source(config: dict[str, Any], digest: str, layers: list[tuple[str, str]]) -> Source:
    if (config.get("os", "linux"), config.get("architecture", architecture())) != ("linux", architecture()):
        raise ImageError(
            f"the image is for {config.get('os')}/{config.get('architecture')}, this machine is linux/{architecture()}"
        )
    diff_ids = [_digest({"digest": item}) for item in config.get("rootfs", {}).get("diff_ids", [])]
    if len(diff_ids) != len(layers) or not layers:
        raise ImageError(f"the image has {len(layers)} layers, and digests for {len(diff_ids)}")
    run = config.get("config") or {}
    env: dict[str, str] = dict(
        item.split("=", 1) for item in run.get("Env") or [] if "=" in item and not item.startswith("=")
    )
    if len(env) > MOST_VARIABLES or any("\0" in item for pair in env.items() for item in pair):
        raise ImageError(f"the image sets {len(env)} variables; {MOST_VARIABLES} can be kept")
    workdir = str(run.get("WorkingDir") or "")
    found = [Layer(place, blob, diff) for (place, blob), diff in zip(layers, diff_ids, strict=True)]
    return Source(
        digest, ImageConfig(env, workdir if workdir.startswith("/") else "", str(run.get("User") or "")), found
    )


def _choose(descriptors: list[dict[str, Any]], ref: str) -> dict[str, Any]:
    def fits(descriptor: dict[str, Any]) -> bool:
        platform = descriptor.get("platform")
        return not platform or (platform.get("os"), platform.get("architecture")) == ("linux", architecture())

    wanted = [item for item in descriptors if fits(item)]
    if ref:
        wanted = [item for item in wanted if _matches(ref, item.get("annotations", {}).get(_REF, ""))]
    digests = {item.get("digest") for item in wanted}
    if len(digests) == 1:
        return wanted[0]
    names = sorted({item.get("annotations", {}).get(_REF, "?") for item in descriptors})
    raise ImageError(
        f"{len(digests)} of {len(descriptors)} images fit linux/{architecture()}{f' and {ref}' if ref else ''}",
        next_step=f"choose one with --ref: {', '.join(names)}" if names else None,
    )


def _matches(ref: str, name: str) -> bool:
    return name in (ref, f"{ref}:latest") or name.endswith((f"/{ref}", f":{ref}", f"/{ref}:latest"))


# -- blobs and digests -------------------------------------------------------------------------------------------------
def _digest(descriptor: dict[str, Any]) -> str:
    digest = str(descriptor.get("digest", ""))
    if not _DIGEST.fullmatch(digest):
        raise ImageError(f"{digest!r} is not a digest that can be checked (sha256 or sha512)")
    return digest


def _place(digest: str) -> str:
    kind, _, value = digest.partition(":")
    return f"blobs/{kind}/{value}"


def _blob_json(blobs: Blobs, descriptor: dict[str, Any]) -> dict[str, Any]:
    digest = _digest(descriptor)
    with blobs.open(_place(digest)) as file:
        data = file.read(_LARGEST_JSON)
    _verify(io.BytesIO(data), digest, _place(digest))
    return _parse(data, _place(digest))


def _json(blobs: Blobs, place: str) -> Any:
    with blobs.open(place) as file:
        return _parse(file.read(_LARGEST_JSON), place)


def _parse(data: bytes, place: str) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise ImageError(f"{place} is not JSON: {error}") from error


def _verify(blob: BinaryIO, digest: str, place: str) -> None:
    kind, _, value = digest.partition(":")
    total = hashlib.new(kind)
    while block := blob.read(1 << 20):
        total.update(block)
    if total.hexdigest() != value:
        raise ImageError(f"{place} does not have its digest: it is damaged", next_step="export the image again")


def _uncompressed(blob: BinaryIO) -> BinaryIO:
    """By its first bytes, whatever its media type says."""
    head = blob.read(6)
    blob.seek(0)
    if head.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=blob)  # type: ignore[return-value]
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        raise ImageError(
            "the image's layers are compressed with zstd, which this Python cannot read",
            next_step="export it with gzip: `skopeo copy --dest-compress-format gzip …`, or `docker image save`",
        )
    return blob


class _Hashed:
    """A stream that compares the digest of everything that went through it with the expected one at its end."""

    def __init__(self, stream: BinaryIO, digest: str) -> None:
        kind, _, self._expected = digest.partition(":")
        self._stream, self._total = stream, hashlib.new(kind)

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._total.update(data)
        return data

    def finish(self) -> None:
        """Read what is left, and raise `ImageError` if the digest is another one."""
        while self.read(1 << 20):
            pass
        if self._total.hexdigest() != self._expected:
            raise ImageError("a layer does not uncompress to what the image's configuration says: it is damaged")


def _tidy(place: str) -> str:
    parts: list[str] = []
    for part in place.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


def _checked(stream: Any) -> BinaryIO:
    assert stream is not None
    return stream
