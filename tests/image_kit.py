"""Makes small images for tests: layers as tar archives, OCI layouts and docker archives around them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from belayer.sandbox._layers import architecture


def entry(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """One entry of a layer."""
    member = tarfile.TarInfo(name)
    member.type, member.size, member.mode, member.mtime = (
        kind,
        len(data),
        0o755 if kind == tarfile.DIRTYPE else 0o644,
        7,
    )
    for field, value in fields.items():
        setattr(member, field, value)
    return member, data


def folder(name: str, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, tarfile.DIRTYPE, **fields)


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, kind, linkname=target)


def layer(entries: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, data in entries:
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def sha(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def configuration(layers: list[bytes], **config: Any) -> bytes:
    document = {
        "os": "linux",
        "architecture": config.pop("architecture", architecture()),
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [sha(item) for item in layers]},
    }
    return json.dumps(document).encode()


def oci_layout(place: Path, layers: list[bytes], *, ref: str = "", compress: bool = True, **config: Any) -> Path:
    """Add an image to the OCI layout at `place`, made if need be."""
    blobs = place / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def put(data: bytes, kind: str) -> dict[str, Any]:
        (blobs / hashlib.sha256(data).hexdigest()).write_bytes(data)
        return {"mediaType": kind, "digest": sha(data), "size": len(data)}

    kind = "application/vnd.oci.image.layer.v1.tar" + ("+gzip" if compress else "")
    manifest = {
        "schemaVersion": 2,
        "config": put(configuration(layers, **config), "application/vnd.oci.image.config.v1+json"),
        "layers": [put(gzip.compress(item, 1, mtime=0) if compress else item, kind) for item in layers],
    }
    descriptor = put(json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json")
    if ref:
        descriptor["annotations"] = {"org.opencontainers.image.ref.name": ref}
    (place / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    index = place / "index.json"
    before = json.loads(index.read_text())["manifests"] if index.exists() else []
    index.write_text(json.dumps({"schemaVersion": 2, "manifests": [*before, descriptor]}))
    return place


def archive_of(place: Path, file: Path) -> Path:
    with tarfile.open(file, "w") as archive:
        for path in sorted(place.rglob("*")):
            archive.add(path, str(path.relative_to(place)), recursive=False)
    return file


def docker_archive(file: Path, layers: list[bytes], tag: str = "small:latest", **config: Any) -> Path:
    """As `docker image save` writes it, with a link between equal layers."""
    data = configuration(layers, **config)
    name = hashlib.sha256(data).hexdigest() + ".json"
    manifest = [{"Config": name, "RepoTags": [tag], "Layers": [f"{n}/layer.tar" for n in range(len(layers))]}]
    with tarfile.open(file, "w") as archive:
        for number, item in enumerate(layers):
            first = layers.index(item)
            if first < number:
                archive.addfile(link(f"{number}/layer.tar", f"../{first}/layer.tar")[0])
            else:
                member, content = entry(f"{number}/layer.tar", data=item)
                archive.addfile(member, io.BytesIO(content))
        for path, content in ((name, data), ("manifest.json", json.dumps(manifest).encode())):
            archive.addfile(entry(path, data=content)[0], io.BytesIO(content))
    return file
