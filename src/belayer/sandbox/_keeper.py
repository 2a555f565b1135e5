"""The driver's side of the keeper process (native/keeper.c): starts helpers, outlives the driver just long enough."""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

from belayer.errors import SandboxUnavailable
from belayer.ownership import RunLabel

_CLOSE_DEADLINE_S = 15.0


class Keeper:
    """One per run. `run` starts a helper and waits for it; all containers become the keeper's children.

    Not thread-safe: belongs to one event loop.
    """

    def __init__(
        self, program: Path, process: subprocess.Popen[bytes], channel: socket.socket, on_death: Callable[[], None]
    ) -> None:
        self.program = program
        self.pid = process.pid
        self._process = process
        self._channel = channel
        self._waiting: dict[int, asyncio.Future[tuple[int, str]]] = {}
        self._next = 1
        self._on_death = on_death
        self._ended = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(channel, self._receive)

    @classmethod
    def start(
        cls,
        program: Path,
        label: RunLabel,
        *,
        cgroups: list[Path],
        store: tuple[int, Path, Path] | None,
        on_death: Callable[[], None],
    ) -> Keeper:
        """Start it. `store`: the shared lock's descriptor, the mount lock and the mount point of a mounted store."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        command = [str(program), "keeper", "--driver", str(theirs.fileno()), str(os.getpid())]
        for folder in cgroups:
            command += ["--cgroup", str(folder)]
        passed = [theirs.fileno()]
        if store is not None:
            users, lock, point = store
            command += ["--store", str(users), str(lock), str(point)]
            passed.append(users)
        with theirs:
            process = subprocess.Popen(
                command,
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PATH": os.environ.get("PATH", os.defpath), **label.env},
                cwd="/",
            )
        return cls(program, process, ours, on_death)

    async def run(self, command: list[str], *, fds: tuple[int, ...] = (), deadline_s: float | None) -> tuple[int, str]:
        """Run a helper on the host; returns (exit code, output). Past the deadline it is killed: `TimeoutError`.

        Without a deadline it lives until it ends, this call is cancelled or the keeper goes.
        """
        if self._ended:
            raise SandboxUnavailable("the keeper process of this run is gone", next_step="start the run again")
        number, self._next = self._next, self._next + 1
        message = struct.pack("<I", number) + b"".join(os.fsencode(part) + b"\0" for part in command)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        future: asyncio.Future[tuple[int, str]] = self._loop.create_future()
        self._waiting[number] = future
        try:
            self._channel.sendmsg([message], rights)
            async with asyncio.timeout(deadline_s):
                return await asyncio.shield(future)
        except BaseException:
            if not self._ended:
                # a late answer finds nobody waiting
                self._channel.send(struct.pack("<I", number))
            raise
        finally:
            self._waiting.pop(number, None)

    def _receive(self) -> None:
        while True:
            try:
                data = self._channel.recv(1 << 17)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._end()
                return
            number, status = struct.unpack_from("<Ii", data)
            future = self._waiting.get(number)
            if future is not None and not future.done():
                code = os.waitstatus_to_exitcode(status)
                future.set_result((code, data[8:].decode(errors="replace").strip()))

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._loop.remove_reader(self._channel)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxUnavailable("the keeper process of this run died"))
        self._process.poll()  # collect it
        self._on_death()

    async def close(self) -> None:
        """Let it kill whatever is left, remove the cgroups, unmount the store if it is the last user, and leave."""
        if not self._ended:
            self._ended = True
            self._loop.remove_reader(self._channel)
        self._channel.close()
        pidfd = os.pidfd_open(self._process.pid)
        try:
            gone = self._loop.create_future()
            self._loop.add_reader(pidfd, lambda: gone.done() or gone.set_result(None))
            try:
                async with asyncio.timeout(_CLOSE_DEADLINE_S):
                    await gone
            except TimeoutError:
                self._process.kill()
            finally:
                self._loop.remove_reader(pidfd)
        finally:
            os.close(pidfd)
        await asyncio.to_thread(self._process.wait)
