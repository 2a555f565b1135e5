"""What the memory suite needs: other processes that map what is handed to them, and an owner of its own.

python tests/contract/memory_kit.py SOCKET_FD DEVICE      (a peer; it does what it is told and answers)
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from belayer.engine import memory
from belayer.engine._wire import receive_with_fds, send_with_fds
from belayer.engine.owner.client import OwnerClient
from belayer.ownership import RunLabel

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0  # the first CUDA context of a process on a busy machine


class Order(msgspec.Struct):
    what: str  # place, read, write, checksum
    writable: bool = False
    offset: int = 0
    nbytes: int = 0
    data: bytes = b""


class Answer(msgspec.Struct):
    data: bytes = b""
    value: int = 0
    error: str = ""


class Peer:
    """A process with one region of `nbytes` on `device`."""

    def __init__(self, device: str, nbytes: int, label: RunLabel) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(START_S)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), device, str(nbytes)],
                pass_fds=[theirs.fileno()],
                env=os.environ
                | label.env
                | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])},
                stderr=subprocess.DEVNULL,
            )

    def ask(self, order: Order, fds: list[int] | None = None) -> Answer:
        """Raises `EOFError` when the peer dies of it."""
        send_with_fds(self._socket, order, fds or [])
        return receive_with_fds(self._socket, Answer)[0]

    def place(self, fd: int, *, writable: bool) -> None:
        answer = self.ask(Order("place", writable=writable), [fd])
        assert not answer.error, answer.error

    def read(self, offset: int, nbytes: int) -> bytes:
        return self.ask(Order("read", offset=offset, nbytes=nbytes)).data

    def write(self, offset: int, data: bytes) -> Answer:
        return self.ask(Order("write", offset=offset, data=data))

    def close(self) -> None:
        self._socket.close()
        self.process.kill()
        self.process.wait()


def _be_a_peer(channel: socket.socket, device: str, nbytes: int) -> None:
    region = memory.of(device).reserve(nbytes, memory.Scratch.NONE)
    while True:
        order, fds = receive_with_fds(channel, Order)
        answer: Any = Answer()
        try:
            if order.what == "place":
                region.place(fds[0], writable=order.writable)
                os.close(fds[0])
            elif order.what == "write":
                region.copy_in(order.offset, order.data)
            elif order.what == "read":
                answer.data = region.copy_out(order.offset, order.nbytes)
            else:
                answer.value = region.checksum(order.offset, order.nbytes)
        except OSError as error:  # a GPU says no; on the host a forbidden write ends the process
            answer.error = str(error)
        send_with_fds(channel, answer, [])


@contextlib.contextmanager
def running_owner(device: str, label: RunLabel) -> Iterator[tuple[OwnerClient, int]]:
    """An owner of `device`, the way the engine starts one: its client and its process id."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "belayer.engine.owner.server",
                str(label.dir / "owner.sock"),
                str(os.getpid()),
                str(theirs.fileno()),
                device,
            ],
            pass_fds=[theirs.fileno()],
            env=os.environ
            | label.env
            | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])},
        )
    client = OwnerClient(ours, timeout_s=START_S)
    try:
        client.state()
        yield client, process.pid
    finally:
        client.close()
        process.kill()
        process.wait()
        (label.dir / "owner.sock").unlink(missing_ok=True)


if __name__ == "__main__":
    with contextlib.suppress(EOFError):
        _be_a_peer(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], int(sys.argv[3]))
