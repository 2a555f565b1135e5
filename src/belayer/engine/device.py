"""Whether the device that owner and workers share may be used again after a fault.

A worker's death can be its own doing, or the device's. Only after the device was found well are weights and arena on
it used again; a device that is not well is left, with everything that lies on it.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Protocol

EDAC = Path("/sys/devices/system/edac/mc")  # the kernel's counters of memory errors


class DeviceHealth(Protocol):
    """Asked after every fault of the serving worker, from a thread. It must answer within a second."""

    def check(self) -> str | None:
        """None: well. Otherwise why nothing on the device may be used again, for a person to read."""
        ...


class HostHealth:
    """The host as a device: uncorrectable memory errors since this object was made, and a canary computation.

    A machine without EDAC counters (most virtual ones) has the canary only; that is all that can be known there.
    """

    def __init__(self, edac: Path = EDAC) -> None:
        self._edac = edac
        self._before = self._uncorrectable()
        self._canary = _canary()

    def check(self) -> str | None:
        for controller, count in self._uncorrectable().items():
            new = count - self._before.get(controller, 0)
            if new > 0:
                return f"memory controller {controller} had {new} uncorrectable error(s) since the engine started"
        if _canary() != self._canary:
            return "the processor gave another result for the same computation than before"
        return None

    def _uncorrectable(self) -> dict[str, int]:
        counts = {}
        for path in sorted(self._edac.glob("mc*/ue_count")):
            text = path.read_text().strip()
            if text.isdigit():
                counts[path.parent.name] = int(text)
        return counts


def _canary() -> bytes:
    """The same integers, floating-point numbers and memory traffic every time; about half a millisecond."""
    state = 1.0
    values = []
    for step in range(1, 2000):
        state = (state * 1.000123 + 1.0 / step) % 7.0
        values.append(state)
    return hashlib.blake2b(struct.pack(f"<{len(values)}d", *values)).digest()


def health_of(device: str) -> DeviceHealth:
    """The health check of "cpu", "cuda" or "cuda:N". Raises `ValueError` for a device there is none for."""
    if device == "cpu":
        return HostHealth()
    if device.partition(":")[0] == "cuda":
        from belayer.engine.memory import cuda_health

        return cuda_health.CudaHealth(int(device.partition(":")[2] or 0))
    raise ValueError(f"there is no health check for device {device}")
