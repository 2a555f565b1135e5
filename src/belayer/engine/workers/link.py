"""One worker process and the channel to it, seen from the driver."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from belayer.engine._wire import Epoch, FromWorker, Spec, Tokens, ToWorker, Unpacker, pack
from belayer.engine.lifecycle import PROCESS, Lifecycle, ProcessState
from belayer.engine.workers.child import Child
from belayer.engine.workers.lifeline import Lifeline
from belayer.engine.workers.nursery_link import WorkerSource
from belayer.engine.workers.progress import Progress


class WorkerLink:
    """Messages of one generation. After `fence` nothing that it sent before reaches anybody; it is counted."""

    @classmethod
    async def start(cls, source: WorkerSource, spec: Callable[[], Spec], log: Path) -> WorkerLink:
        """Have a worker made. `spec` is asked for when it runs, which may be a while: a nursery first imports."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        page = Progress.create()
        try:
            child = await source.fork(theirs.fileno(), page, log)
            return cls(spec(), child, ours, page)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(page)

    def __init__(self, spec: Spec, child: Child, channel: socket.socket, page: int) -> None:
        """Not for callers: use `start`."""
        self.generation = spec.generation
        self.epoch: Epoch | None = None  # the one it looks at, as far as it has said
        self.life = Lifecycle(PROCESS, time.monotonic)
        self.role = "worker" if spec.fill else "shadow"
        self.on_message: Callable[[FromWorker], None] | None = None
        self._stale = 0
        self._out = bytearray()
        self._in: Unpacker[FromWorker] = Unpacker(FromWorker)
        self._loop = asyncio.get_running_loop()
        self.child = child
        self.progress = Progress(page)
        self.on_death: Callable[[], None] | None = None  # called as soon as it can send nothing more
        self._lifeline = Lifeline(page, self._lifeline_broke)
        self._watched = False
        self._dead = asyncio.Event()
        self._socket = channel
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._receive)
        self._write(pack(spec))

    @property
    def ready(self) -> bool:
        """Warmed up and not fenced."""
        return self.life.state in (ProcessState.READY, ProcessState.ACTIVATING, ProcessState.SERVING)

    @property
    def fenced(self) -> bool:
        return self.life.state in (ProcessState.FENCED, ProcessState.REAPED)

    def send(self, message: ToWorker) -> None:
        """Queue a message; a worker that does not read is the hang detector's business.

        What callers send in one turn of the loop travels together: requests that come together are prefilled together.
        """
        if not self.fenced:
            self._write(pack(message))

    def _write(self, data: bytes) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out += data

    def _flush(self) -> None:
        if self._socket.fileno() < 0:
            self._out.clear()  # fenced meanwhile
            return
        try:
            while self._out:
                sent = self._socket.send(self._out)
                del self._out[:sent]
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._flush)
            return
        except OSError:
            self._out.clear()  # the peer is dead: its pidfd tells
        self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._socket)  # dead, or about to be: its pidfd tells
            return
        self._deliver(data)

    def _deliver(self, data: bytes) -> None:
        for message in self._in.feed(data):
            if self.fenced:
                if isinstance(message, Tokens):
                    self._stale += sum(len(chunk.token_ids) for chunk in message.chunks)
            elif self.on_message is not None:
                self.on_message(message)

    def _lifeline_broke(self) -> None:
        """In the lifeline's own thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left who wants to know
            self._loop.call_soon_threadsafe(self._died)

    def _died(self) -> None:
        self._dead.set()
        if self.on_death is not None and not self.fenced:
            self.on_death()

    def became_ready(self, epoch: Epoch) -> None:
        """It said so: from now on its death is noticed at once, not only when the kernel has taken it apart."""
        self.life.to(ProcessState.READY)
        self.epoch = epoch
        self._watched = True
        self._lifeline.watch()

    async def fence(self, timeout_s: float, *, apart: bool = False) -> int | None:
        """Kill the cohort and wait until nothing it does counts. Returns the number of tokens sent that nobody read.

        That is when it is reaped, or, if what it can write is `apart` from all that its successor uses, already when
        its main thread is dead; `reaped` tells the rest. None: neither came in time, and it may still write.
        """
        if not self.fenced:
            self.life.to(ProcessState.FENCED)
        self.child.kill()
        signs = [asyncio.ensure_future(self.child.gone(timeout_s))]
        if apart and self._watched:
            signs.append(asyncio.ensure_future(self._dead.wait()))
        try:
            done, _ = await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for sign in signs[1:]:
                sign.cancel()
        if not any(sign.result() for sign in done):
            return None
        self._drain()
        return self._stale

    async def reaped(self, timeout_s: float) -> bool:
        """Wait until nothing is left of it, its memory included."""
        gone = await self.child.gone(timeout_s)
        if gone and self.life.state is ProcessState.FENCED:
            self.life.to(ProcessState.REAPED)
        return gone

    def _drain(self) -> None:
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        while True:
            try:
                data = self._socket.recv(1 << 20)
            except OSError:  # nothing left
                break
            if not data:
                break
            self._deliver(data)
        self._socket.close()
        self._lifeline.close()
        self.progress.close()
