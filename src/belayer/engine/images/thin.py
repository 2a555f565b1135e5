"""Turns the copied memory of a dumped process into mapped memory: a restore then reads nothing.

CRIU copies every page of an image into the new process: 0.3 s for the 430 MB of a warmed-up vLLM, and 430 MB of memory
for every process that is restored. Most of those pages are never written again, many never read (imported modules).
So after the dump the anonymous memory is moved into one sparse file, `memory.img`, and the image is changed to say
that those ranges were private mappings of that file all along. The kernel then maps it from the page cache: a page is
read when it is touched, copied when it is written, and shared between all processes that come from the image.

What this changes for the process: `madvise(MADV_DONTNEED)` on such a range brings back what the image holds instead of
zeros. glibc's malloc uses it on freed chunks only, and clears what it hands out by calloc unless it is fresh from the
kernel, which goes through brk or mmap. The file must never be written again, for it is the processes' memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from belayer import protobuf as pb

MEMORY = "memory.img"
SMALLEST = 64 << 10  # bytes in a range below which copying is as good as mapping
_PAGE = 4096
_PRIVATE, _ANONYMOUS, _GROWSDOWN = 0x02, 0x20, 0x100
_REGULAR, _HEAP, _FILE_PRIVATE, _ANON_PRIVATE = 1 << 0, 1 << 5, 1 << 6, 1 << 9  # criu/include/image.h
_PLAIN = (_REGULAR | _ANON_PRIVATE, _REGULAR | _ANON_PRIVATE | _HEAP)
_REG = 1  # fd_types
_MM_VMA, _MADV, _FDFLAGS = 14, 9, 10


def make_thin(images: Path, published: Path, pid: int) -> int:
    """Change the image of process `pid` (its number inside) in the folder `images`. Returns the bytes moved.

    `published` is the folder from which the image will be restored. Raises `ValueError` when the image is not as
    expected; it may then be half changed and is of no use.
    """
    magics, (mm,) = pb.read_image(images / f"mm-{pid}.img")
    fields = pb.parse(mm)
    map_magics, (head, *entries) = pb.read_image(images / f"pagemap-{pid}.img")
    pages_file = images / f"pages-{pb.numbers(pb.parse(head))[1]}.img"
    runs = _runs(entries)
    chosen = _choose([pb.numbers(pb.parse(vma)) for vma in pb.messages(fields, _MM_VMA)], runs)
    offsets: dict[tuple[int, int], int] = {}
    position = 0
    for start, end in chosen:
        offsets[start, end] = position
        position += end - start
    file_id = _add_file(images / "files.img", published / MEMORY, position)
    kept, moved = _move(pages_file, images / MEMORY, runs, offsets)
    new_fields = [
        (number, wire, _mapped(value, offsets, file_id) if number == _MM_VMA and isinstance(value, bytes) else value)
        for number, wire, value in fields
    ]
    pb.write_image(images / f"mm-{pid}.img", magics, [pb.build(new_fields)])
    pb.write_image(images / f"pagemap-{pid}.img", map_magics, [head, *kept])
    return moved


@dataclass(frozen=True)
class _Run:
    """Consecutive pages in the image; a run may reach over several mappings."""

    start: int
    nbytes: int
    fields: list[pb.Field]

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    def pieces(self, cuts: list[int]) -> list[tuple[int, int]]:
        """Start and bytes of its parts, cut at `cuts`."""
        edges = [self.start, *(cut for cut in cuts if self.start < cut < self.end), self.end]
        return [(start, end - start) for start, end in pairwise(edges)]

    def part(self, start: int, nbytes: int) -> bytes:
        """The message of a part of it."""
        new = {1: start, 2: nbytes // _PAGE, 5: nbytes // _PAGE}
        return pb.build([(number, wire, new.get(number, value)) for number, wire, value in self.fields])


def _runs(entries: list[bytes]) -> list[_Run]:
    """The runs of pages in the order in which the pages file holds them."""
    runs = []
    for entry in entries:
        fields = pb.parse(entry)
        numbers = pb.numbers(fields)
        if numbers.get(3):
            raise ValueError("the image builds on another one")
        runs.append(_Run(numbers[1], numbers.get(5, numbers[2]) * _PAGE, fields))
    return runs


def _choose(ranges: list[dict[int, int]], runs: list[_Run]) -> list[tuple[int, int]]:
    """Start and end of the mappings to move: plain private anonymous memory with enough in it."""
    chosen = []
    for vma in ranges:
        start, end, flags, status = vma[1], vma[2], vma[6], vma[7]
        inside = sum(max(0, min(end, run.end) - max(start, run.start)) for run in runs)
        plain = status in _PLAIN and flags & _ANONYMOUS and flags & _PRIVATE and not flags & _GROWSDOWN
        if plain and inside >= SMALLEST:
            chosen.append((start, end))
    return sorted(chosen)


def _move(source: Path, target: Path, runs: list[_Run], offsets: dict[tuple[int, int], int]) -> tuple[list[bytes], int]:
    """Put the pages of the chosen mappings into `target`, keep the others; returns the runs kept, and bytes moved."""
    kept: list[bytes] = []
    moved = 0
    rest = source.with_suffix(".rest")
    cuts = sorted({edge for bounds in offsets for edge in bounds})
    with open(source, "rb") as pages, open(target, "wb") as memory, open(rest, "wb") as left:
        memory.truncate(sum(end - start for start, end in offsets))
        for run in runs:
            for start, nbytes in run.pieces(cuts):
                data = pages.read(nbytes)
                if len(data) != nbytes:
                    raise ValueError(f"{source.name} is cut off")
                place = next((bounds for bounds in offsets if bounds[0] <= start < bounds[1]), None)
                if place is None:
                    left.write(data)
                    kept.append(run.part(start, nbytes))
                else:
                    memory.seek(offsets[place] + start - place[0])
                    memory.write(data)
                    moved += nbytes
    os.replace(rest, source)
    return kept, moved


def _mapped(vma: bytes, offsets: dict[tuple[int, int], int], file_id: int) -> bytes:
    """The mapping's message, now of the memory file if it was chosen."""
    fields = pb.parse(vma)
    numbers = pb.numbers(fields)
    bounds = numbers[1], numbers[2]
    if bounds not in offsets:
        return vma
    new = {
        3: offsets[bounds],
        4: file_id,
        6: numbers[6] & ~_ANONYMOUS,
        7: numbers[7] & ~_ANON_PRIVATE | _FILE_PRIVATE,
        _FDFLAGS: os.O_RDONLY,
    }
    changed = [(number, wire, new.pop(number, value)) for number, wire, value in fields]
    return pb.build([*changed, *((number, pb.VARINT, value) for number, value in sorted(new.items()))])


def _add_file(files: Path, path: Path, nbytes: int) -> int:
    """Add a regular file to the image's table of files; returns its id."""
    magics, entries = pb.read_image(files)
    file_id = 1 + max(pb.numbers(pb.parse(entry))[2] for entry in entries)
    owner = pb.build([(1, pb.VARINT, 0), (2, pb.VARINT, 0), (3, pb.VARINT, 0), (4, pb.VARINT, 0), (5, pb.VARINT, 0)])
    regular = pb.build(
        [
            (1, pb.VARINT, file_id),
            (2, pb.VARINT, os.O_RDONLY),
            (3, pb.VARINT, 0),
            (5, pb.BYTES, owner),
            (6, pb.BYTES, os.fsencode(path)),
            (8, pb.VARINT, nbytes),
        ]
    )
    entry = pb.build([(1, pb.VARINT, _REG), (2, pb.VARINT, file_id), (3, pb.BYTES, regular)])
    pb.write_image(files, magics, [*entries, entry])
    return file_id
