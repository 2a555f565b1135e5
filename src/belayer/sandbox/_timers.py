"""Periodic timerfds that had expired when they were dumped, put right in CRIU's images.

The kernel stops such a timer until somebody reads its ticks, and shows no time left; CRIU 4.2.1 takes that for a
disarmed timer and restores one that never fires again. With one nanosecond left instead of none it fires at once and
goes on at its interval. The value is one byte in the image either way, so that it can be changed in place.

Reference: images/fdinfo.proto and images/timerfd.proto of CRIU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_TIMERFD = 12  # field of a file entry
_TICKS, _SECONDS, _NANOSECONDS, _EVERY_SECONDS, _EVERY_NANOSECONDS = 5, 7, 8, 9, 10


def mend_timers(images: Path) -> int:
    """Change files.img where it is needed; returns the number of timers put right."""
    path = images / "files.img"
    if not path.exists():
        return 0
    data = path.read_bytes()
    at, places = 8, []  # behind two magic numbers
    while at + 4 <= len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        for field, start, value in _fields(data, at + 4, at + 4 + size):
            if field == _TIMERFD:
                timer = {number: (place, content) for number, place, content in _fields(data, start, start + value)}
                left = [timer.get(number, (0, 0)) for number in (_SECONDS, _NANOSECONDS)]
                every = [timer.get(number, (0, 0))[1] for number in (_EVERY_SECONDS, _EVERY_NANOSECONDS)]
                if left[0][1] == 0 == left[1][1] and any(every) and timer.get(_TICKS, (0, 0))[1] and left[1][0]:
                    places.append(left[1][0])
        at += 4 + size
    if places:
        with open(path, "r+b") as file:
            for place in places:
                file.seek(place)
                file.write(b"\1")
    return len(places)


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(number, where its value begins, value) of a message's fields; of a nested message its length."""
    while at < end:
        key, at = _number(data, at)
        start = at
        if key & 7 == 0:
            value, at = _number(data, at)
        elif key & 7 == 2:
            value, start = _number(data, at)
            at = start + value
        else:
            value, at = 0, at + {1: 8, 5: 4}[key & 7]
        yield key >> 3, start, value


def _number(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
