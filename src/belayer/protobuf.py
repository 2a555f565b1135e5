"""Protocol-buffer messages as lists of fields: enough to talk to CRIU, and to read and change its image files.

The messages are few and small, so no library of generated classes is needed.
Wire format: protobuf.dev/programming-guides/encoding. Image file format: criu.org/Images, two magic words and then
messages, each behind its length in four bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

_LENGTH = struct.Struct("<I")
_MAGICS = 8  # bytes

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

Field = tuple[int, int, "int | bytes"]
"""Field number, wire type, value (fixed ones as bytes)."""


def places(data: bytes, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int, int, int]]:
    """The fields of the message in `data[start:end]`: number, wire type, where the value begins, and the value.

    Of a fixed field or one of bytes, instead of the value, how long it is. Raises `ValueError` for what is no message.
    """
    end = len(data) if end is None else end
    at = start

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= end or shift > 63:
                raise ValueError("a number is cut off")
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < end:
        key = varint()
        wire, begun = key & 7, at
        if wire == VARINT:
            yield key >> 3, wire, begun, varint()
            continue
        size = {BYTES: None, FIXED64: 8, FIXED32: 4}.get(wire, -1)
        if size == -1:
            raise ValueError(f"unknown wire type {wire}")
        length = varint() if size is None else size
        if at + length > end:
            raise ValueError("a field is cut off")
        yield key >> 3, wire, at, length
        at += length


def parse(data: bytes) -> list[Field]:
    """The fields of one message, in their order. Raises `ValueError` for what is not a message."""
    return [
        (number, wire, value if wire == VARINT else data[start : start + value])
        for number, wire, start, value in places(data)
    ]


def fields(data: bytes) -> dict[int, int | bytes]:
    """Fields of one message by number; of a repeated field the last one. Raises `ValueError`."""
    return {number: value for number, _wire, value in parse(data)}


def number(field: int, value: int) -> bytes:
    """A field that holds a number."""
    return build([(field, VARINT, value)])


def content(field: int, value: bytes) -> bytes:
    """A field that holds bytes, a text or a message."""
    return build([(field, BYTES, value)])


def build(message: Iterable[Field]) -> bytes:
    """The message with these fields."""
    out = bytearray()
    for field, wire, value in message:
        out += _varint(field << 3 | wire)
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


def numbers(message: list[Field]) -> dict[int, int]:
    """The numbers of a message by field; of a repeated one the last."""
    return {field: value for field, _wire, value in message if isinstance(value, int)}


def messages(message: list[Field], field: int) -> list[bytes]:
    """What the repeated or single field `field` holds."""
    return [value for found, _wire, value in message if found == field and isinstance(value, bytes)]


def entries(data: bytes) -> Iterator[tuple[int, int]]:
    """Where each message of an image file begins and ends. Raises `ValueError` when it is cut off."""
    at = _MAGICS
    while at < len(data):
        if at + _LENGTH.size > len(data):
            raise ValueError("it is cut off")
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            raise ValueError("it is cut off")
        yield at, at + length
        at += length


def read_image(path: Path) -> tuple[bytes, list[bytes]]:
    """The magic words of an image file, and its messages. Raises `ValueError` when it is cut off, and `OSError`."""
    data = path.read_bytes()
    try:
        return data[:_MAGICS], [data[start:end] for start, end in entries(data)]
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error


def write_image(path: Path, magics: bytes, found: Iterable[bytes]) -> None:
    """What `read_image` returned, changed."""
    path.write_bytes(magics + b"".join(_LENGTH.pack(len(entry)) + entry for entry in found))
