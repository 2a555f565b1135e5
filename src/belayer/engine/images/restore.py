"""A worker from an image: restored by CRIU as a child of this process, woken, and watched like any other.

`Restorer.fork` has the shape of `NurseryLink.fork`, so a `WorkerLink` does not know where its process came from.

What dies how: the restored init is this thread's child and, once it is told to, asks to be killed when the thread ends;
everything else is in its pid namespace and ends with it. Until it has been woken, the worker waits on a pipe of ours
and ends when that closes, and the init with it. CRIU itself carries the run's label while it works, and is not killed
with us: half-way it would leave processes behind that wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import signal
from pathlib import Path

from belayer.engine.images import _criu
from belayer.engine.images.store import Image
from belayer.engine.images.template import GO
from belayer.engine.workers.child import Child
from belayer.ownership import ENV_VAR, RunLabel

RESTORE_TIMEOUT_S = 30.0
NOBODY = "-" * 12
"""The label in an image; as long as every run's."""
DIE_WITH_PARENT = signal.SIGUSR1
"""What the init of an image takes as the request to do so; see `_init.py`."""
_INIT_WAIT_MS = 200
_restored: set[int] = set()  # inits of this process that are not reaped yet


def check_host() -> None:
    """Raises `EngineError` with the reason why no image can be restored on this host."""
    _criu.program()


class Restorer:
    """Makes workers from one image. `work` is a folder for CRIU's logs, one folder inside for each restore."""

    def __init__(self, image: Image, label: RunLabel, work: Path) -> None:
        self.image = image
        self._label = label
        self._work = work
        self._count = 0

    async def fork(self, channel: int, progress: int, log: Path) -> Child:
        """Restore a worker with these descriptors. Raises `CriuFailed`, `ImageRefused`, `OSError`, `TimeoutError`."""
        self._count += 1
        work = self._work / f"restore-{self._count}"
        work.mkdir(parents=True, exist_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        trigger, pull = os.pipe()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            fds = {"channel": channel, "progress": progress, "log": output, "trigger": trigger}
            init = await self._restore(fds, work)
            try:
                worker = _only_child(init)
                for pid in (init, worker):
                    set_label(pid, self._label.name)
                child = Child(worker, os.pidfd_open(worker), log, lambda: _end(init))
                os.kill(init, DIE_WITH_PARENT)
            except BaseException:
                _kill(init)
                raise
            os.write(pull, GO)
            return child
        finally:
            for fd in (trigger, pull, output):
                os.close(fd)

    async def _restore(self, fds: dict[str, int], work: Path) -> int:
        """Run CRIU; returns the pid of the restored init."""
        inherited = {self.image.meta.inherited[name]: fd for name, fd in fds.items()}
        command = _criu.restore_command(self.image.folder, work, inherited)
        env = {"PATH": os.environ.get("PATH", os.defpath), **self._label.env}
        try:
            with self.image.in_use():
                # a restore that is abandoned half-way cannot be undone from outside, so it is let finish
                running = asyncio.ensure_future(
                    _criu.run(command, timeout_s=RESTORE_TIMEOUT_S, fds=tuple(fds.values()), env=env)
                )
                try:
                    code, text = await asyncio.shield(running)
                except asyncio.CancelledError:
                    await asyncio.wait([running])
                    raise
            if code:
                why = _criu.reason(work / "restore.log", text)
                raise _criu.CriuFailed(f"CRIU cannot restore the engine image {self.image.folder.name}{why}")
            init = int((work / "pid").read_text())
        except BaseException:
            _kill_strays(work, self._label.name)
            raise
        shutil.rmtree(work, ignore_errors=True)
        _restored.add(init)
        return init


def _only_child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    if len(children) != 1:
        raise OSError(f"the restored init has {len(children)} children instead of one")
    return int(children[0])


def set_label(pid: int, label: str) -> None:
    """Write a run's label into the environment of a process, over the one that is there: the reaper looks there.

    Raises `OSError` when there is none of the same length.
    """
    start = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[47])  # env_start: proc(5), field 50
    content = Path(f"/proc/{pid}/environ").read_bytes()
    needle = f"{ENV_VAR}=".encode()
    at = content.find(needle) + len(needle)
    if needle not in content or content.find(b"\0", at) - at != len(label):
        raise OSError(f"there is no room for the label {label} in process {pid}")
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(start + at)
        memory.write(label.encode())


def _end(init: int) -> int:
    """The worker has ended: reap its init, and with it the namespace. Returns how the worker ended."""
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        pidfd = os.pidfd_open(init)
        try:
            # the init passes the worker's end on at once; one that does not is of no use any more
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(_INIT_WAIT_MS):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            _pid, status = os.waitpid(init, 0)
        finally:
            os.close(pidfd)
            _restored.discard(init)
        code = os.waitstatus_to_exitcode(status)
        return code if code <= 128 else 128 - code
    return -signal.SIGKILL


def _kill(init: int) -> None:
    """End a restored namespace that nobody watches."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(init, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(init, 0)
    _restored.discard(init)


def _kill_strays(work: Path, label: str) -> None:
    """After a restore that failed: end what it left as our child, the first process of a pid namespace."""
    mine = _depth("self")
    for thread in Path("/proc/self/task").iterdir():
        for pid in (thread / "children").read_text().split():
            if int(pid) not in _restored and _depth(pid) > mine and _is_stray(Path("/proc", pid), label):
                _kill(int(pid))
    shutil.rmtree(work, ignore_errors=True)


def _is_stray(process: Path, label: str) -> bool:
    """Whether a child is what a restore of this run left half-way, and not something of our caller's."""
    with contextlib.suppress(OSError):
        variables = (process / "environ").read_bytes().split(b"\0")
        if variables != [b""]:
            # CRIU's own environment, or already that of the image
            return any(f"{ENV_VAR}={name}".encode() in variables for name in (label, NOBODY))
        return (process / "comm").read_text() == "criu\n"  # it is dead, and only waits to be reaped
    return False


def _depth(pid: str) -> int:
    """In how many nested pid namespaces a process has a number."""
    try:
        status = Path("/proc", pid, "status").read_text()
    except FileNotFoundError:
        return 0
    return len(next(line for line in status.splitlines() if line.startswith("NSpid:")).split())
