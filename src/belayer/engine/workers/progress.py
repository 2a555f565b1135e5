"""One shared page in which a worker says what it is doing, readable even when it is stopped or stuck.

The second half of the page is the worker's lifeline (`belayer.engine.workers.lifeline`).
"""

from __future__ import annotations

import enum
import mmap
import struct

from belayer.engine.memory.host import PAGE, memfd
from belayer.engine.workers import lifeline

_LAYOUT = struct.Struct("<QQ")  # step counter, phase


class Phase(enum.IntEnum):
    """What the worker is doing right now. A prefill may take long; a decode step may not."""

    STARTING = 0
    IDLE = 1
    DECODE = 2
    PREFILL = 3


class Progress:
    """The page; the worker calls `mark`, the driver reads."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, PAGE)
        self._steps = 0

    @staticmethod
    def create() -> int:
        fd = memfd("belayer-progress", PAGE)
        lifeline.prepare(fd)
        return fd

    def mark(self, phase: Phase) -> None:
        self._steps += 1
        _LAYOUT.pack_into(self._page, 0, self._steps, phase)

    def read(self) -> tuple[int, Phase]:
        steps, phase = _LAYOUT.unpack_from(self._page, 0)
        return steps, Phase(phase)

    def close(self) -> None:
        self._page.close()
