"""The nursery seen from the driver: asks for workers, and learns how they ended."""

from __future__ import annotations

import asyncio
import os
import select
import socket
from pathlib import Path
from typing import Protocol

import msgspec

from belayer.engine.workers.child import Child
from belayer.engine.workers.nursery import FORK, Exited, Forked, FromNursery

EXIT_CODE_WAIT_MS = 5


class WorkerSource(Protocol):
    """Where worker processes come from."""

    async def fork(self, channel: int, progress: int, log: Path) -> Child:
        """A worker with these descriptors; it waits for its `Spec` on `channel`."""
        ...


class NurseryLink:
    """A running nursery. `fork` raises `OSError` when it is dead."""

    def __init__(self, backend: str, env: dict[str, str], log: Path) -> None:
        # one message, one datagram: no frame is ever cut
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with theirs:
            self.child = Child.spawn(
                "belayer.engine.workers.nursery",
                [str(theirs.fileno()), str(os.getpid()), backend],
                [theirs.fileno()],
                env,
                log,
            )
        self._codes: dict[int, int] = {}
        self._forked: asyncio.Queue[tuple[int, int] | None] = asyncio.Queue()
        self._one_at_a_time = asyncio.Lock()
        self._decoder = msgspec.msgpack.Decoder(FromNursery)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._control, self._receive)

    async def fork(self, channel: int, progress: int, log: Path) -> Child:
        """Fork a worker with these descriptors; waits for the nursery to be ready."""
        async with self._one_at_a_time:
            log.parent.mkdir(parents=True, exist_ok=True)
            with open(log, "ab") as output:
                socket.send_fds(self._control, [FORK], [channel, progress, output.fileno()])
            answer = await self._forked.get()
        if answer is None:
            raise OSError(f"the nursery ended ({self.child.exit_text()})\n{self.child.log_tail()}")
        pid, pidfd = answer
        return Child(pid, pidfd, log, lambda: self._exit_code(pid))

    def _receive(self) -> None:
        while self._control.fileno() >= 0:
            try:
                data, fds, _flags, _address = socket.recv_fds(self._control, 4096, 1)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self._loop.remove_reader(self._control)
                self._control.close()
                self._forked.put_nowait(None)  # whoever waits for a fork waits in vain
                return
            match self._decoder.decode(data):
                case Forked(pid):
                    self._forked.put_nowait((pid, fds[0]))
                case Exited(pid, code):
                    self._codes[pid] = code

    def _exit_code(self, pid: int) -> int | None:
        """How a child ended. Its pidfd is faster than the nursery's message, so wait a moment for that; no longer."""
        if pid not in self._codes and self._control.fileno() >= 0:
            select.select([self._control], [], [], EXIT_CODE_WAIT_MS / 1000)
            self._receive()
        return self._codes.pop(pid, None)

    async def close(self) -> None:
        """End it; children that are left end with it."""
        self.child.kill()
        await self.child.gone(10.0)
        self._receive()
        while not self._forked.empty():
            if (unclaimed := self._forked.get_nowait()) is not None:
                os.close(unclaimed[1])
