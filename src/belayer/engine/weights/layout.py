"""Where every tensor of a checkpoint lies inside a weights epoch.

A layout is recorded once, while the first worker loads the model: for each checkpoint tensor the byte range that the
model's own loading code filled with it (fused projections simply give neighbouring ranges). With it an update is one
memcpy per tensor, and neither the trainer nor the owner needs the inference engine's loading code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from belayer.engine.memory import Region

ALIGNMENT = 256  # cache line and vector width of every CPU and GPU in sight


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """One checkpoint tensor's place: bytes [offset, offset + nbytes) hold it, row-major, as `dtype`."""

    name: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


class Layout(msgspec.Struct, frozen=True):
    """All places of one model. `aliases` are checkpoint names that fill nothing (a tied head)."""

    nbytes: int
    slices: tuple[Slice, ...]
    aliases: tuple[str, ...] = ()

    def hash(self) -> str:
        """Identity of the layout: names, offsets, sizes, dtypes and shapes."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=16).hexdigest()


def align(offset: int, to: int = ALIGNMENT) -> int:
    return -(-offset // to) * to


def digest(layout: Layout, memory: Region | memoryview) -> str:
    """Content digest of an epoch: the checksum of every tensor (host memory: CRC32C), bound to its name.

    It finds damage and mix-ups, not forgery: every writer is one of our own processes.
    """
    total = hashlib.blake2b(digest_size=16)
    for entry in layout.slices:
        if isinstance(memory, memoryview):
            from belayer.engine.memory.host import checksum

            value = checksum(memory[entry.offset : entry.offset + entry.nbytes])
        else:
            value = memory.checksum(entry.offset, entry.nbytes)
        total.update(f"{entry.name}\0{value:08x}\n".encode())
    return total.hexdigest()


def first_unfilled(wanted: Iterable[tuple[str, int, int]], filled: Iterable[tuple[int, int]]) -> str | None:
    """Name the first parameter, of (name, offset, nbytes), that the ranges [start, end) leave partly unfilled."""
    ranges = sorted(filled)
    for name, offset, nbytes in wanted:
        position = offset
        for start, end in ranges:
            if start <= position < end:
                position = end
        if position < offset + nbytes:
            return name
    return None
