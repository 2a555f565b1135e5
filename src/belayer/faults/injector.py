"""Carries out a plan of faults against the run's own engine and sandboxes, with real signals and real deletions."""

from __future__ import annotations

import asyncio
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
TARGET_DEADLINE_S = 30.0


class SandboxTarget(Protocol):
    @property
    def root(self) -> Path: ...

    @property
    def init_pid(self) -> int: ...


class FaultInjector:
    """Waits for each fault's moment and strikes.

    `progress()` is the share of work done, `worker_pid()` the serving worker (None while there is none),
    `standby()` whether a shadow stands by, `sandboxes()` the living sandboxes with the rollouts
    they serve. A fault without a target after 30 s is reported as skipped, never counted as injected.
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
        self._sink = sink

    async def run(self) -> None:
        """Until the plan is done; cancel it to stop early."""
        while self.pending:
            fault = self.pending[0]
            while self._progress() < fault.progress:
                await asyncio.sleep(0.02)
            await asyncio.sleep(fault.delay_s)
            self.pending.pop(0)
            try:
                async with asyncio.timeout(TARGET_DEADLINE_S):
                    target = await (self._hit_worker(fault) if fault.kind.startswith("worker") else self._hit(fault))
            except TimeoutError:
                self.skipped.append(fault.kind)
                continue
            self.injected.append(fault.kind)
            subject, name = target
            self._sink(
                events.Event(kind=events.FAULT_INJECTED, subject=subject, data={"fault": fault.kind, "target": name})
            )

    async def _hit_worker(self, fault: Fault) -> tuple[str, str]:
        while True:
            pid = self._worker_pid()
            if pid is not None and self._standby():
                break
            await asyncio.sleep(0.02)
        os.kill(pid, signal.SIGKILL if fault.kind == "worker.sigkill" else signal.SIGSTOP)
        return "worker", f"pid {pid}"

    async def _hit(self, fault: Fault) -> tuple[str, str]:
        while True:
            alive = self._sandboxes()
            if alive:
                break
            await asyncio.sleep(0.002)
        rollout, target = alive[self._rng.randrange(len(alive))]
        if fault.kind == "sandbox.kill":
            os.kill(target.init_pid, signal.SIGKILL)
            return rollout, f"init {target.init_pid}"
        folder = self._rng.choice([name for name in SYSTEM_FOLDERS if (target.root / name).is_dir()] or ["usr"])
        await asyncio.to_thread(damage, target.root, folder)
        return rollout, f"rm -rf /{folder}"


def damage(root: Path, folder: str) -> None:
    """Delete a top-level folder of a sandbox from outside. Refuses anything that could lie outside the sandbox."""
    path = root / folder
    if os.path.ismount("/") and Path(os.path.realpath(root)) == Path("/"):
        raise ValueError("refusing to damage the host's root")
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
