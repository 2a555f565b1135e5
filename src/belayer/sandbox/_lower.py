"""Checkpoints without CRIU: the file system, and at `fs+shell` what the shell says of itself."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

from belayer.checkpoint.manifest import Level
from belayer.errors import CheckpointRefused, SandboxLost, StorageFull
from belayer.sandbox import _cgroup
from belayer.sandbox._shell_state import save_shell
from belayer.sandbox._trees import Trees
from belayer.sandbox.container import Sandbox
from belayer.sandbox.store import storage_errors

SHELL_FILE = "shell.img"  # in the folder where process images would be
FREEZE_TIMEOUT_S = 5.0
_MOST_LOST = 20


async def take_without_processes(
    sandbox: Sandbox, level: Level, trees: Trees, *, images: Path, snapshot: Path, shell_pid: int
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Capture the file system, and at `fs+shell` the state of the shell, as a file in the empty folder `images`.

    Returns seconds as `Timings` has them, and what a restore will not bring back. Raises `CheckpointRefused`,
    `StorageFull`, `SandboxLost`.
    """
    begun = time.perf_counter()
    lost = await asyncio.to_thread(_processes, sandbox, shell_pid)
    if level == "fs":
        lost = (*lost, "the state of the shell") if shell_pid else lost
    elif shell_pid:
        script, unheard = await save_shell(sandbox.session, sandbox.name)
        sandbox.say_later(unheard)
        with storage_errors(f"no description of the shell of sandbox {sandbox.name}"):
            (images / SHELL_FILE).write_bytes(script)
    frozen = time.perf_counter()
    async with _frozen(sandbox, needed=not trees.instant):
        at = time.perf_counter()
        try:
            with storage_errors(f"no snapshot of sandbox {sandbox.name}"):
                await asyncio.to_thread(trees.snapshot, sandbox.place.tree, snapshot)
        except StorageFull:
            raise
        except OSError as error:
            raise CheckpointRefused(
                f"the file system of sandbox {sandbox.name} cannot be captured: {error}",
                kept="the sandbox and its earlier checkpoints",
            ) from error
        fs_s = time.perf_counter() - at
    return {"dump_s": frozen - begun, "frozen_s": time.perf_counter() - frozen, "fs_s": fs_s}, lost


def _processes(sandbox: Sandbox, shell_pid: int) -> tuple[str, ...]:
    """What runs in the sandbox beside its init and its shell, in words."""
    found = []
    for pid in sandbox.processes():
        with contextlib.suppress(OSError, StopIteration, IndexError):
            status = Path(f"/proc/{pid}/status").read_text()
            inside = int(next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1])
            if inside in (1, shell_pid):
                continue
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if command == "belayer init":  # watches over a command that is just ending
                continue
            found.append(f"process {inside}: {(command or status.split()[1])[:120]}")
    more = len(found) - _MOST_LOST
    return tuple(found[:_MOST_LOST]) + ((f"{more} more processes",) if more > 0 else ())


@contextlib.asynccontextmanager
async def _frozen(sandbox: Sandbox, *, needed: bool) -> AsyncIterator[None]:
    """Nothing runs in the sandbox meanwhile. Without a freezer: refused if `needed`, else as it is."""
    switch = next((folder for folder in sandbox.place.cgroup.folders if (folder / "cgroup.freeze").exists()), None)
    if switch is None:
        if needed:
            raise CheckpointRefused(
                f"sandbox {sandbox.name} cannot be frozen: there is no cgroup v2, and the store copies file by file",
                next_step="mount cgroup2, or use a btrfs store",
            )
        yield
        return
    try:
        try:
            await asyncio.to_thread(_cgroup.freeze, switch, FREEZE_TIMEOUT_S)
        except TimeoutError as error:
            raise CheckpointRefused(f"sandbox {sandbox.name} cannot be frozen: {error}") from error
        except OSError as error:
            raise SandboxLost(f"sandbox {sandbox.name} went away before it was checkpointed: {error}") from error
        yield
    finally:
        with contextlib.suppress(OSError):  # it died, and is gone
            (switch / "cgroup.freeze").write_text("0")
