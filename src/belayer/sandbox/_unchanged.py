"""Is a sandbox still exactly in the state that its newest checkpoint holds? May never say yes wrongly.

The answer rests on an argument, not on a comparison of everything. A checkpoint is a *still life* if at that moment the
container has only its init and its shell, both wait for the host without a deadline, no timer runs, no signal is
pending, and neither holds anything that the kernel could change (a socket to somebody, an event or timer descriptor).
From there on nothing can happen until the host sends a command. The host's own reading of files and folders runs no
code of the agent and changes nothing (the root is mounted without access times). Every other command counts as a
change: what a command did cannot be found out for less than a checkpoint, since written data, shared memory,
namespaces and the memory of the shell would all have to be looked at. Unsure means changed.

On top of that, what would be different had the argument a hole is compared: the processes, how long the shell has run
and where it waits, signals, and the file system's last transaction.
"""

from __future__ import annotations

import asyncio
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from belayer import protobuf as pb
from belayer.checkpoint.manifest import Manifest
from belayer.sandbox import _btrfs

if TYPE_CHECKING:
    from belayer.sandbox.container import Sandbox

LOOKS, LOOK_AGAIN_S = 8, 0.01  # each pause is twice the one before
_READ = {"x86_64": "0", "aarch64": "63"}
_PPOLL = {"x86_64": "271", "aarch64": "73"}
_TASK, _TIMERS, _POSIX = 3, 7, 4  # fields of CRIU's core_entry, task_core_entry, task_timers_entry (core.proto)
_SIGNALS = ("SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt")
_UNDER_WAY = "does not wait"
_STILL = ("/", "pipe:")  # what a descriptor of a still life may refer to


class Process(msgspec.Struct, frozen=True):
    """What would be different if a process had run: its start, its time on a CPU, where it waits, its signals."""

    start: str
    ran: str
    waits: str
    signals: tuple[str, ...]


class StillLife(msgspec.Struct, frozen=True):
    """A checkpoint from which nothing can happen by itself. `commands`: sent so far that may change something."""

    checkpoint: str
    commands: int
    init: int
    shell: Process
    files: str


def still_life(
    checkpoint: str, *, pids: list[int], init: int, shell_inside: int, images: Path, root: Path, commands: int
) -> StillLife | str:
    """What `changed` compares with, or why the state of this checkpoint may change by itself.

    For the time after the dump, before any command. `shell_inside`: pid of the shell in the container.
    """
    others = [pid for pid in pids if pid != init]
    if init not in pids or len(others) != 1:
        return f"{max(0, len(pids) - 2)} processes run in the background"
    try:
        if _inner_pid(others[0]) != shell_inside:
            return "another process than the shell runs"
        if len(_processes(images)) != 2:
            return "another process ran when it was taken"
        if timers(images):
            return "a timer runs"
        for pid, what in ((others[0], "the shell"), (init, "the init")):
            if why := _may_move(pid, is_init=pid == init):
                return f"{what} {why}"
        return StillLife(checkpoint, commands, init, _look(others[0]), _btrfs.identity(root))
    except (OSError, ValueError, IndexError) as error:
        return f"not known: {error}"


def find_still_life(sandbox: Sandbox, manifest: Manifest, images: Path) -> None:
    """Set `sandbox.still` for its newest checkpoint, taken a moment ago: as soon as its processes wait again."""
    commands = sandbox.commands
    loop = asyncio.get_running_loop()

    def look(tries: int) -> None:
        sandbox.still = found = still_life(
            manifest.id,
            pids=sandbox.processes(),
            init=sandbox.init_pid,
            shell_inside=manifest.process.shell_pid,
            images=images,
            root=sandbox.root,
            commands=commands,
        )
        if isinstance(found, str) and _UNDER_WAY in found and tries:
            # they were let go a moment ago, and have not all come back to where they wait
            loop.call_later(LOOK_AGAIN_S * 2 ** (LOOKS - tries), again, tries - 1, found)

    def again(tries: int, found: str) -> None:
        # what is seen now counts for the moment of the checkpoint only if nothing was asked of it since
        if not sandbox.dead and sandbox.commands == commands and sandbox.still is found:
            look(tries)

    look(LOOKS)


def changed(still: StillLife, pids: list[int], *, root: Path, commands: int) -> str:
    """Why the sandbox may be in another state than then; empty: it is in exactly that state. Takes about 0.2 ms."""
    if commands != still.commands:
        return f"{commands - still.commands} commands ran"
    others = [pid for pid in pids if pid != still.init]
    if len(others) != 1 or len(pids) != 2:
        return "there are other processes"
    try:
        if _look(others[0]) != still.shell:
            return "the shell has run"
        if _btrfs.identity(root) != still.files:
            return "the file system has changed"
    except (OSError, ValueError, IndexError) as error:
        return f"not known: {error}"
    return ""


def timers(images: Path) -> bool:
    """Does any process of this dump have an interval or POSIX timer that is armed? Raises `OSError`, `ValueError`."""
    for path in _processes(images):
        _, found = pb.read_image(path)
        task = pb.fields(found[0]).get(_TASK)
        if not isinstance(task, bytes):
            continue  # a thread that is not the first of its process
        of = pb.fields(task).get(_TIMERS)
        if not isinstance(of, bytes):
            raise ValueError(f"{path.name} does not speak of timers")
        each = pb.fields(of)
        if _POSIX in each or any(any(pb.fields(part).values()) for part in each.values() if isinstance(part, bytes)):
            return True
    return False


def _processes(images: Path) -> list[Path]:
    found = list(images.glob("core-*.img"))
    if not found:
        raise ValueError(f"no process in {images}")
    return found


def _may_move(pid: int, *, is_init: bool) -> str:
    """Why a process could go on by itself, or ""."""
    process = _look(pid)
    machine = platform.machine()
    number, *arguments = process.waits.split()
    if is_init and (number != _PPOLL.get(machine) or int(arguments[2], 16)):
        return f"{_UNDER_WAY} for the host alone"
    if not is_init and number != _READ.get(machine):
        return f"{_UNDER_WAY} for a command"
    if any(int(value, 16) for value in process.signals[:2]):
        return "has a signal pending"
    status = _status(pid)
    if status["Threads"] != "1":
        return "has threads"
    links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
    moving = [link for link in links if not link.startswith(_STILL)]
    if is_init and len(moving) == 1 and moving[0].startswith("socket:"):
        return ""  # on which it listens to the host
    return f"holds {moving[0]}" if moving else ""


def _look(pid: int) -> Process:
    folder = f"/proc/{pid}"
    status = _status(pid)
    return Process(
        start=_text(f"{folder}/stat").rpartition(")")[2].split()[19],
        ran=_text(f"{folder}/schedstat"),
        waits=_text(f"{folder}/syscall"),
        signals=tuple(status[name] for name in _SIGNALS),
    )


def _status(pid: int) -> dict[str, str]:
    lines = (line.partition(":") for line in _text(f"/proc/{pid}/status").splitlines())
    return {name: value.strip() for name, _, value in lines}


def _inner_pid(pid: int) -> int:
    return int(_status(pid)["NSpid"].split()[-1])


def _text(path: str) -> str:
    with open(path) as file:
        return file.read().strip()
