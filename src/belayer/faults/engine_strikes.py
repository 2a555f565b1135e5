"""The hand that strikes an engine's processes: real signals, and only to processes of this very engine."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

NURSERY_MODULE = b"belayer.engine.workers.nursery"


class EngineTarget(Protocol):
    @property
    def worker_pid(self) -> int | None: ...

    @property
    def shadow_pid(self) -> int | None: ...

    @property
    def owner_pid(self) -> int: ...


class Striker:
    """Sends signals to an engine's processes by their role. `mine(pid)`: whether a process belongs to that engine."""

    def __init__(self, engine: EngineTarget, mine: Callable[[int], bool]) -> None:
        self._engine = engine
        self._mine = mine

    def pid(self, role: str) -> int | None:
        """Of `worker`, `shadow`, `owner` or `nursery`; None while there is none."""
        if role == "worker":
            return self._engine.worker_pid
        if role == "shadow":
            return self._engine.shadow_pid
        if role == "owner":
            return self._engine.owner_pid
        if role == "nursery":
            return next((pid for pid in children() if self._mine(pid) and NURSERY_MODULE in _command(pid)), None)
        raise ValueError(f"no process has the role {role}")

    def strike_pid(self, pid: int, name: str) -> bool:
        """Send the signal called `name` (`sigkill`). False: there is no such process of ours, or it has just ended."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        try:
            if not self._mine(pid):  # the number went to somebody else
                return False
            signal.pidfd_send_signal(fd, signal.Signals[name.upper()])
        except ProcessLookupError:
            return False
        finally:
            os.close(fd)
        return True


def children() -> list[int]:
    """Living children of this process, whichever thread started them."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that thread has ended
            found += map(int, (task / "children").read_text().split())
    return found


def parent(pid: int) -> int:
    """Of a process; 0 when that is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""
