"""Carries out a plan of faults against the run's own engine and sandboxes, with real signals and real deletions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from belayer import events
from belayer.faults.schedule import Fault

SYSTEM_FOLDERS = ("usr", "bin", "lib", "etc")
TARGET_DEADLINE_S = 60.0
STANDBY_WAIT_S = 20.0


class SandboxTarget(Protocol):
    @property
    def root(self) -> Path: ...

    @property
    def init_pid(self) -> int: ...


class FaultInjector:
    """Waits for each fault's moment and strikes.

    `progress()` is the share of work done, `worker_pid()` the serving worker (None while there is none),
    `standby()` whether a shadow stands by, `sandboxes()` the living sandboxes with the rollouts
    they serve, `mine(pid)` whether a process is the run's own. Faults of workers and of sandboxes are two independent
    sequences. A worker's fault waits for a standby for at most 20 s, then strikes all the same (and costs a cold
    start). A fault without a target after 60 s is reported as skipped, never counted as injected.
    """

    def __init__(
        self,
        faults: list[Fault],
        *,
        seed: int,
        progress: Callable[[], float],
        worker_pid: Callable[[], int | None],
        standby: Callable[[], bool],
        sandboxes: Callable[[], Sequence[tuple[str, SandboxTarget]]],
        mine: Callable[[int], bool],
        sink: events.EventSink,
    ) -> None:
        self.pending = list(faults)
        self.injected: list[str] = []
        self.skipped: list[str] = []
        self._rng = random.Random(f"targets {seed}")
        self._progress = progress
        self._worker_pid = worker_pid
        self._standby = standby
        self._sandboxes = sandboxes
        self._mine = mine
        self._sink = sink

    async def run(self) -> None:
        """Until the plan is done; cancel it to stop early."""
        workers = [fault for fault in self.pending if fault.kind.startswith("worker")]
        others = [fault for fault in self.pending if not fault.kind.startswith("worker")]
        await asyncio.gather(self._sequence(workers), self._sequence(others))

    async def _sequence(self, faults: list[Fault]) -> None:
        for fault in faults:
            while self._progress() < fault.progress:
                await asyncio.sleep(0.02)
            await asyncio.sleep(fault.delay_s)
            self.pending.remove(fault)
            try:
                async with asyncio.timeout(TARGET_DEADLINE_S):
                    await (self._hit_worker(fault) if fault.kind.startswith("worker") else self._hit_sandbox(fault))
            except TimeoutError:
                self.skipped.append(fault.kind)

    async def _hit_worker(self, fault: Fault) -> None:
        number = signal.SIGKILL if fault.kind == "worker.sigkill" else signal.SIGSTOP
        patience = asyncio.get_running_loop().time() + STANDBY_WAIT_S
        while True:
            pid = self._worker_pid()
            prepared = self._standby() or asyncio.get_running_loop().time() > patience
            if pid is not None and prepared and self._signal(fault, "worker", pid, number):
                return
            await asyncio.sleep(0.02)

    async def _hit_sandbox(self, fault: Fault) -> None:
        while True:
            alive = self._sandboxes()
            if alive:
                rollout, target = alive[self._rng.randrange(len(alive))]
                if fault.kind == "sandbox.kill":
                    if self._signal(fault, rollout, target.init_pid, signal.SIGKILL):
                        return
                elif folders := [name for name in SYSTEM_FOLDERS if (target.root / name).is_dir()]:
                    folder = self._rng.choice(folders)
                    self._tell(fault, rollout, f"rm -rf /{folder}")
                    await asyncio.to_thread(damage, target.root, folder)
                    return
            await asyncio.sleep(0.002)

    def _signal(self, fault: Fault, subject: str, pid: int, number: signal.Signals) -> bool:
        """Send it, unless the process is gone already. Told before the blow: a recovery may be quicker than we are."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        try:
            if not self._mine(pid):  # the number went to somebody else
                return False
            self._tell(fault, subject, f"pid {pid}")
            with contextlib.suppress(ProcessLookupError):  # it ended by itself in this very moment
                signal.pidfd_send_signal(fd, number)
        finally:
            os.close(fd)
        return True

    def _tell(self, fault: Fault, subject: str, target: str) -> None:
        self.injected.append(fault.kind)
        self._sink(
            events.Event(kind=events.FAULT_INJECTED, subject=subject, data={"fault": fault.kind, "target": target})
        )


def damage(root: Path, folder: str) -> None:
    """Delete a top-level folder of a sandbox from outside. Refuses anything that could lie outside the sandbox."""
    path = root / folder
    if os.path.ismount("/") and Path(os.path.realpath(root)) == Path("/"):
        raise ValueError("refusing to damage the host's root")
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
