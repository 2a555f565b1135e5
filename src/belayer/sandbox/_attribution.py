"""Whose doing was it? What a command ran into, read from the sandbox's own limits on the host.

A command that is killed for its sandbox's lack of memory, that may start no more processes, or that has filled its
disk share did that itself: its result says so, and nobody restores anything. The death of the init is the one thing
that no command inside can bring about (signals from inside do not reach it), with one exception: when memory runs out
and nothing else is left to kill.
"""

from __future__ import annotations

from contextlib import suppress

from belayer.sandbox import _btrfs
from belayer.sandbox._place import Place
from belayer.sandbox._session import ExecResult

DISK_SLACK = 1 << 20  # a share with less than this left counts as full: the file system needs some of it itself


class Limits:
    """The limits of one generation, and how often each was hit so far."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._oom_kills = 0
        self._refused = 0

    def explain(self, result: ExecResult) -> ExecResult:
        """`result` with what its command ran into. Looks only at commands that did not succeed."""
        if result.ok:
            return result
        found = {
            "oom": self._was_out_of_memory(),
            "process_limit": self._hit_process_limit(),
            "disk_full": self._disk_is_full(),
        }
        if not any(found.values()):
            return result
        fields = {name: getattr(result, name) for name in result.__struct_fields__}
        return ExecResult(**{**fields, **found})

    def ran_out_of_memory(self) -> bool:
        """Has the kernel killed something here, for lack of memory, since the last command that was told so?"""
        return self._place.cgroup.oom_kills() > self._oom_kills

    def _was_out_of_memory(self) -> bool:
        kills = self._place.cgroup.oom_kills()
        before, self._oom_kills = self._oom_kills, max(kills, self._oom_kills)
        return kills > before

    def _hit_process_limit(self) -> bool:
        refused = self._place.cgroup.refused_processes()
        before, self._refused = self._refused, max(refused, self._refused)
        return refused > before

    def _disk_is_full(self) -> bool:
        with suppress(OSError):  # not on btrfs, or without quotas: there is no share that could be full
            left = _btrfs.quota_left(self._place.root)
            return left is not None and left < DISK_SLACK
        return False
