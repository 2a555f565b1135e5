"""Two things in CRIU's images of open files that would not come back right: one is mended, the other refused.

A periodic timerfd that had expired when it was dumped: the kernel stops such a timer until somebody reads its ticks,
and shows no time left; CRIU 4.2.1 takes that for a disarmed timer and restores one that never fires again. With one
nanosecond left instead of none it fires at once and goes on at its interval. The value is one byte in the image either
way, so that it can be changed in place.

An inotify watch of which CRIU knows no path, only a file handle: the handle means nothing in the restored file system.

Reference: images/fdinfo.proto, images/timerfd.proto and images/fsnotify.proto of CRIU.
"""

from __future__ import annotations

from pathlib import Path

from belayer import protobuf as pb
from belayer.errors import CheckpointRefused

_TIMERFD, _INOTIFY = 12, 13  # fields of a file entry
_WATCH, _HANDLE, _PATH = 5, 7, 4  # of an inotify entry, of a watch, of a handle
_TICKS, _SECONDS, _NANOSECONDS, _EVERY_SECONDS, _EVERY_NANOSECONDS = 5, 7, 8, 9, 10


def mend_files(images: Path) -> None:
    """Change files.img where it is needed. Raises `CheckpointRefused`."""
    path = images / "files.img"
    if not path.exists():
        return
    try:
        _mend(path)
    except ValueError as error:
        raise CheckpointRefused(f"CRIU's list of open files cannot be read: {error}") from error


def _mend(path: Path) -> None:
    data = path.read_bytes()
    late = []
    for start, end in pb.entries(data):
        for field, _, inner, size in pb.places(data, start, end):
            if field == _TIMERFD:
                timer = {number: (place, value) for number, _, place, value in pb.places(data, inner, inner + size)}
                left = [timer.get(number, (0, 0)) for number in (_SECONDS, _NANOSECONDS)]
                every = [timer.get(number, (0, 0))[1] for number in (_EVERY_SECONDS, _EVERY_NANOSECONDS)]
                if left[0][1] == 0 == left[1][1] and any(every) and timer.get(_TICKS, (0, 0))[1] and left[1][0]:
                    late.append(left[1][0])
            elif field == _INOTIFY:
                for number, _, watch, length in pb.places(data, inner, inner + size):
                    if number == _WATCH and not _has_path(data, watch, watch + length):
                        raise CheckpointRefused("CRIU finds no path for a file that is watched by inotify")
    if late:
        with open(path, "r+b") as file:
            for place in late:
                file.seek(place)
                file.write(b"\1")


def _has_path(data: bytes, start: int, end: int) -> bool:
    for number, _, inner, length in pb.places(data, start, end):
        if number == _HANDLE:
            return any(field == _PATH and size for field, _, _, size in pb.places(data, inner, inner + length))
    return False
