"""Protocol-buffer messages as lists of fields: enough to change a CRIU image file and leave the rest as it was.

Wire format: protobuf.dev/programming-guides/encoding. Image file format: criu.org/Images, two magic words and then
messages, each behind its length in four bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

_LENGTH = struct.Struct("<I")
_MAGICS = 8  # bytes

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

Field = tuple[int, int, "int | bytes"]
"""Field number, wire type, value (fixed ones as bytes)."""


def parse(data: bytes) -> list[Field]:
    """The fields of one message, in their order. Raises `ValueError` for what is not a message."""
    fields: list[Field] = []
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= len(data) or shift > 63:
                raise ValueError("a number is cut off")
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        wire = key & 7
        if wire == VARINT:
            fields.append((key >> 3, wire, varint()))
            continue
        sizes = {BYTES: None, FIXED64: 8, FIXED32: 4}
        if wire not in sizes:
            raise ValueError(f"unknown wire type {wire}")
        size = sizes[wire]
        length = varint() if size is None else size
        if at + length > len(data):
            raise ValueError("a field is cut off")
        fields.append((key >> 3, wire, data[at : at + length]))
        at += length
    return fields


def build(fields: Iterable[Field]) -> bytes:
    """The message with these fields."""
    out = bytearray()
    for number, wire, value in fields:
        out += _varint(number << 3 | wire)
        if isinstance(value, int):
            out += _varint(value & (1 << 64) - 1)
        else:
            if wire == BYTES:
                out += _varint(len(value))
            out += value
    return bytes(out)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def numbers(fields: list[Field]) -> dict[int, int]:
    """The numbers of a message by field; of a repeated one the last."""
    return {number: value for number, _wire, value in fields if isinstance(value, int)}


def messages(fields: list[Field], number: int) -> list[bytes]:
    """What the repeated or single field `number` holds."""
    return [value for found, _wire, value in fields if found == number and isinstance(value, bytes)]


def read_image(path: Path) -> tuple[bytes, list[bytes]]:
    """The magic words of an image file, and its messages. Raises `ValueError` when it is cut off."""
    data = path.read_bytes()
    entries = []
    at = _MAGICS
    while at < len(data):
        if at + _LENGTH.size > len(data):
            raise ValueError(f"{path.name} is cut off")
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            raise ValueError(f"{path.name} is cut off")
        entries.append(data[at : at + length])
        at += length
    return data[:_MAGICS], entries


def write_image(path: Path, magics: bytes, entries: Iterable[bytes]) -> None:
    path.write_bytes(magics + b"".join(_LENGTH.pack(len(entry)) + entry for entry in entries))
