"""Two things in CRIU's images of open files that would not come back right: one is mended, the other refused.

A periodic timerfd that had expired when it was dumped: the kernel stops such a timer until somebody reads its ticks,
and shows no time left; CRIU 4.2.1 takes that for a disarmed timer and restores one that never fires again. With one
nanosecond left instead of none it fires at once and goes on at its interval. The value is one byte in the image either
way, so that it can be changed in place.

An inotify watch of which CRIU knows no path, only a file handle: the handle means nothing in the restored file system.

Reference: images/fdinfo.proto, images/timerfd.proto and images/fsnotify.proto of CRIU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from belayer.errors import CheckpointRefused

_TIMERFD, _INOTIFY = 12, 13  # fields of a file entry
_WATCH, _HANDLE, _PATH = 5, 7, 4  # of an inotify entry, of a watch, of a handle
_TICKS, _SECONDS, _NANOSECONDS, _EVERY_SECONDS, _EVERY_NANOSECONDS = 5, 7, 8, 9, 10


def mend_files(images: Path) -> None:
    """Change files.img where it is needed. Raises `CheckpointRefused`."""
    path = images / "files.img"
    if not path.exists():
        return
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
            elif field == _INOTIFY:
                for number, inner, length in _fields(data, start, start + value):
                    if number == _WATCH and not _has_path(data, inner, inner + length):
                        raise CheckpointRefused("CRIU finds no path for a file that is watched by inotify")
        at += 4 + size
    if places:
        with open(path, "r+b") as file:
            for place in places:
                file.seek(place)
                file.write(b"\1")


def _has_path(data: bytes, start: int, end: int) -> bool:
    for number, inner, length in _fields(data, start, end):
        if number == _HANDLE:
            return any(field == _PATH and size for field, _, size in _fields(data, inner, inner + length))
    return False


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
