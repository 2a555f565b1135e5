"""The seal table: what a worker swears about the KV blocks in its arena, in memory that outlives the worker.

A block's record says whose keys and values the block holds (the tokens and the chain of all tokens before them), which
weights epoch made them, and the CRC32C of the bytes. A successor adopts a block only after it has computed that
checksum over the bytes it is going to use.

A record is a log that only grows while the block lives: the head is written once, then one row for every token, then,
when the block is full, a checksum of all its bytes. Every part carries a check of its own that is bound to the block,
to its place and to a nonce of this one life of the block. So a part that was being written when its writer died, and
what is left of an earlier life, are simply not there; what was sworn before stays sworn. `void` comes before the block
is given to anybody else.

The checks find damage, torn writes and mix-ups, not forgery: every writer is one of our own processes, and only one of
them, the serving worker, writes at a time.
"""

from __future__ import annotations

import hashlib
import os
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import google_crc32c

ROOT = b"\0" * 16
"""The chain of a block that has nothing before it."""

_MAGIC = b"BLYSEAL1"
_HEADER = struct.Struct("<8s16sIII")  # magic, stamp, blocks, block size, check
_HEADER_ROOM = 64
_HEAD = struct.Struct("<QQ16sI")  # nonce, epoch, chain before the block, check
_FULL = struct.Struct("<II")  # checksum of the whole block, check
_FULL_AT = 40
_ROWS_AT = 48
_ROW = struct.Struct("<III")  # token, checksum of its keys and values, check
_NONCE = struct.Struct("<Q")
_BOUND = struct.Struct("<QIIII")  # nonce, block, place, token, checksum


def chain(before: bytes, tokens: Sequence[int]) -> bytes:
    """Identity of everything up to the end of `tokens`, which come after `before`: 16 bytes."""
    return hashlib.blake2b(before + array("I", tokens).tobytes(), digest_size=16).digest()


def stamp(*parts: object) -> bytes:
    """Identity of a geometry: a table with another stamp describes other memory and is not read."""
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=16).digest()


@dataclass(frozen=True)
class Seal:
    """What a record swears: for a full block `whole`, the checksum of all its bytes; for one that is still being
    filled (`whole` None) `rows`, one checksum for each token."""

    block: int
    epoch: int
    before: bytes
    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    whole: int | None


class SealTable:
    """Records of `blocks` blocks with `block_size` tokens each, in `memory`, which must have `size` bytes or more."""

    def __init__(self, memory: memoryview, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self._memory = memory
        self._record = _record_bytes(block_size)
        self._nonce = int.from_bytes(os.urandom(8), "little")
        if len(memory) < self.size(blocks, block_size):
            raise ValueError(f"{len(memory)} bytes are too few for the seals of {blocks} blocks")

    @staticmethod
    def size(blocks: int, block_size: int) -> int:
        """Bytes that a table needs."""
        return _HEADER_ROOM + blocks * _record_bytes(block_size)

    # -- the whole table ----------------------------------------------------------------------------------------------
    def format(self, geometry: bytes) -> None:
        """Make it a table without any seal, for memory of this `geometry` (see `stamp`)."""
        self._memory[:] = bytes(len(self._memory))
        body = (_MAGIC, geometry, self.blocks, self.block_size)
        _HEADER.pack_into(self._memory, 0, *body, _header_check(*body))

    def describes(self, geometry: bytes) -> bool:
        """Whether its seals are about memory of this geometry."""
        *body, check = _HEADER.unpack_from(self._memory, 0)
        return body == [_MAGIC, geometry, self.blocks, self.block_size] and check == _header_check(*body)

    def void_all(self) -> None:
        for block in range(self.blocks):
            self.void(block)

    # -- writing ------------------------------------------------------------------------------------------------------
    def void(self, block: int) -> None:
        """Nothing is sworn about this block any more."""
        _NONCE.pack_into(self._memory, self._at(block), 0)

    def open(self, block: int, epoch: int, before: bytes) -> None:
        """Begin a life of this block, without any token yet."""
        self.void(block)
        self._nonce = (self._nonce + 1) % (1 << 64) or 1
        at, nonce = self._at(block), self._nonce
        _FULL.pack_into(self._memory, at + _FULL_AT, 0, 0)
        _HEAD.pack_into(self._memory, at, nonce, epoch, before, _head_check(nonce, block, epoch, before))

    def append(self, block: int, first: int, tokens: Sequence[int], checksums: Sequence[int]) -> None:
        """Swear to more tokens of an open block; `first` is the place in the block of the first of them."""
        at = self._at(block)
        (nonce,) = _NONCE.unpack_from(self._memory, at)
        for place, (token, checksum) in enumerate(zip(tokens, checksums, strict=True), first):
            check = _row_check(nonce, block, place, token, checksum)
            _ROW.pack_into(self._memory, at + _ROWS_AT + place * _ROW.size, token, checksum, check)

    def complete(self, block: int, tokens: Sequence[int], checksum: int) -> None:
        """Swear to an open block as a whole: `tokens` fill it and `checksum` is that of all its bytes."""
        at = self._at(block)
        (nonce,) = _NONCE.unpack_from(self._memory, at)
        for place, token in enumerate(tokens):
            struct.pack_into("<I", self._memory, at + _ROWS_AT + place * _ROW.size, token)
        check = _full_check(nonce, block, tokens, checksum)
        _FULL.pack_into(self._memory, at + _FULL_AT, checksum, check)

    # -- reading ------------------------------------------------------------------------------------------------------
    def read(self, block: int) -> Seal | None:
        """What is sworn about this block, as far as it was written to the end; None: nothing."""
        at = self._at(block)
        nonce, epoch, before, check = _HEAD.unpack_from(self._memory, at)
        if nonce == 0 or check != _head_check(nonce, block, epoch, before):
            return None
        rows = bytes(self._memory[at + _ROWS_AT : at + _ROWS_AT + self.block_size * _ROW.size])
        entries = array("I", rows)
        tokens, checksums, checks = tuple(entries[0::3]), tuple(entries[1::3]), entries[2::3]
        whole, check = _FULL.unpack_from(self._memory, at + _FULL_AT)
        if check == _full_check(nonce, block, tokens, whole):
            return Seal(block, epoch, before, tokens, (), whole)
        count = 0
        while count < self.block_size and checks[count] == _row_check(
            nonce, block, count, tokens[count], checksums[count]
        ):
            count += 1
        return Seal(block, epoch, before, tokens[:count], checksums[:count], None) if count else None

    def _at(self, block: int) -> int:
        if not 0 <= block < self.blocks:
            raise IndexError(f"block {block} of {self.blocks}")
        return _HEADER_ROOM + block * self._record


def _record_bytes(block_size: int) -> int:
    return -(-(_ROWS_AT + block_size * _ROW.size) // 64) * 64


def _header_check(magic: bytes, geometry: bytes, blocks: int, block_size: int) -> int:
    return google_crc32c.value(magic + geometry + struct.pack("<II", blocks, block_size))


def _head_check(nonce: int, block: int, epoch: int, before: bytes) -> int:
    return google_crc32c.value(b"head" + struct.pack("<QIQ", nonce, block, epoch) + before)


def _row_check(nonce: int, block: int, place: int, token: int, checksum: int) -> int:
    return google_crc32c.value(_BOUND.pack(nonce, block, place, token, checksum))


def _full_check(nonce: int, block: int, tokens: Sequence[int], checksum: int) -> int:
    body = array("I", tokens).tobytes()
    return google_crc32c.value(b"full" + struct.pack("<QII", nonce, block, checksum) + body)
