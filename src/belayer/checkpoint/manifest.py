"""The manifest of a checkpoint: what was captured, of which sandbox, at which point of the rollout.

A checkpoint exists when its manifest does. It is written last and appears atomically under its name, so a reader sees a
whole checkpoint or none. The file is JSON; its last member is the CRC-32C of all bytes before that member.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import google_crc32c
import msgspec

from belayer.checkpoint.host import Host
from belayer.errors import CheckpointDamaged
from belayer.faults import failpoints
from belayer.files import sync_folder

FORMAT = 2
Durability = Literal["process", "host"]
Level = Literal["full", "fs+shell", "fs"]
_CHECKSUM = b',\n "crc32c": "'


class ImageFile(msgspec.Struct, frozen=True):
    """One file of the process images: its size in bytes and the CRC-32C of its content."""

    size: int
    crc32c: int


class ProcessState(msgspec.Struct, frozen=True):
    """What the container's init said of itself right before the dump; a restored init must say the same.

    `nonce` is drawn when the init starts and lives in its memory only, so the right one proves the right memory image.
    """

    nonce: int
    jobs_started: int
    shell_pid: int


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds: `dump_s` in CRIU, `frozen_s` processes stopped, `fs_s` file-system snapshot (inside frozen)."""

    dump_s: float
    frozen_s: float
    fs_s: float
    total_s: float


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One published checkpoint.

    `action` is the number k of the last action that it contains, `generation` and `attempt` those of the sandbox when
    it was taken, `context_hash` that of the token ids up to observation k. `fs_identity` names the snapshot and its
    exact state, `images` the process images, `netns` the inode of the network namespace they refer to, `runtime` what
    made them and alone can restore them. Of a level below `full`, `reason` says why, `lost` what was there and will not
    come back; `images` holds at most the state of the shell then. `parent` is the checkpoint from which this generation
    of the sandbox was restored, None if it was created. `sequence` orders the checkpoints of a run.
    """

    format: int = FORMAT
    id: str
    sandbox: str
    rollout: str
    attempt: int
    generation: int
    action: int
    context_hash: str
    level: Level
    image: str
    image_digest: str
    hostname: str
    fs_identity: str
    process: ProcessState
    images: dict[str, ImageFile]
    netns: int
    parent: str | None
    created: float
    sequence: int
    image_bytes: int
    timings: Timings
    durability: Durability = "process"
    host: Host | None = None
    runtime: str = "native"
    reason: str = ""
    lost: list[str] = []


def write_manifest(path: Path, manifest: Manifest, *, durable: bool) -> None:
    """Publish `manifest` at `path` atomically; `durable`: the file survives a reboot (fsync of file and folder)."""
    fresh = path.with_suffix(".tmp")
    try:
        with open(fresh, "wb") as file:
            file.write(encode_manifest(manifest))
            if durable:
                file.flush()
                os.fsync(file.fileno())
        failpoints.hit("checkpoint.publish.written", manifest.sandbox)
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    failpoints.hit("checkpoint.publish.renamed", manifest.sandbox)
    if durable:
        sync_folder(path.parent)


def read_manifest(path: Path) -> Manifest:
    """Read a manifest. Raises `CheckpointDamaged` when it is missing, damaged or of another format."""
    try:
        return decode_manifest(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise CheckpointDamaged(f"there is no checkpoint {path.stem}") from None
    except OSError as error:
        raise CheckpointDamaged(f"the manifest {path} cannot be read: {error}") from error


def encode_manifest(manifest: Manifest) -> bytes:
    """The content of a manifest's file."""
    body = msgspec.json.format(msgspec.json.encode(manifest), indent=1).removesuffix(b"\n}")
    return body + _CHECKSUM + f'{google_crc32c.value(body):08x}"\n}}\n'.encode()


def decode_manifest(data: bytes, where: str) -> Manifest:
    """What `encode_manifest` wrote; `where` names the place in errors. Raises `CheckpointDamaged`."""
    try:
        fields = msgspec.json.decode(data, type=dict)
        found = fields.get("format")
        if found != FORMAT:
            raise CheckpointDamaged(f"the checkpoint {where} has format {found}; this version reads {FORMAT}")
        if fields.get("crc32c") != f"{google_crc32c.value(data.rpartition(_CHECKSUM)[0]):08x}":
            raise CheckpointDamaged(f"the manifest {where} is not what was written: its checksum differs")
        return msgspec.convert(fields, Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointDamaged(f"the manifest {where} is damaged: {error}") from error
