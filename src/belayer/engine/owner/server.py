"""The owner: a small process that holds the weights epochs and the KV arena, and nothing else.

    python -m belayer.engine.owner.server SOCKET DRIVER_PID CONTROL_FD [DEVICE]

It imports neither torch nor an inference engine, runs no user code and touches no tensor, so what kills workers does
not kill it. For memory of a GPU (DEVICE "cuda") it imports the driver's bindings and nothing more, and has no context
that an error on the device could destroy. Memory lives as long as it holds the descriptors. It dies with the driver.

The epoch table is the whole state: at most one clean epoch, which may serve, and at most one dirty epoch, which is
being written in the other slot. `Commit` turns the dirty one into the clean one in one step, so a writer that dies
half-way leaves the clean epoch as it was.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import sys
from pathlib import Path

from belayer.engine._wire import (
    Arena,
    Attach,
    Begin,
    Commit,
    Define,
    Hello,
    OwnerState,
    Refused,
    ToOwner,
    receive_with_fds,
    send_with_fds,
)
from belayer.engine.memory import Allocation, of
from belayer.engine.memory.host import die_with_parent, memfd
from belayer.engine.owner.table import SLOTS, EpochTable


class Owner:
    """Answers requests on any number of connections, one at a time."""

    def __init__(self, listener: socket.socket, control: socket.socket, device: str = "cpu") -> None:
        self._memory = of(device)
        self._memory.rounded(1)  # a GPU's driver may take seconds to come up: before anybody waits for an answer
        self.table = EpochTable()
        self._boot_id = secrets.token_hex(8)
        self._seals: tuple[int, int] | None = None
        self._weights: list[Allocation] = []
        self._arena: tuple[int, Allocation] | None = None
        self._waiting: list[socket.socket] = []  # attach requests that wait for a clean epoch
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(control, selectors.EVENT_READ)

    def serve(self) -> None:
        while True:
            for key, _events in self._selector.select():
                if key.fileobj is self._listener:
                    connection, _address = self._listener.accept()
                    connection.settimeout(5.0)  # a stuck peer must not stop the owner
                    self._selector.register(connection, selectors.EVENT_READ)
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._answer(key.fileobj)

    def _answer(self, connection: socket.socket) -> None:
        try:
            request, _fds = receive_with_fds(connection, ToOwner)
            self._dispatch(connection, request)
        except (OSError, EOFError):
            self._selector.unregister(connection)
            with contextlib.suppress(ValueError):
                self._waiting.remove(connection)
            connection.close()

    def _dispatch(self, connection: socket.socket, request: ToOwner) -> None:
        fds: list[int] = []
        try:
            match request:
                case Hello():
                    pass
                case Define(layout):
                    self.table.define(layout)
                    if not self._weights:
                        self._weights = [
                            self._memory.allocate(f"belayer-weights-{slot}", layout.nbytes) for slot in range(SLOTS)
                        ]
                case Begin(after):
                    self.table.begin(after)
                case Commit(number, digest, policy_version):
                    self.table.commit(number, digest, policy_version)
                case Attach(when_clean):
                    if when_clean and self.table.clean is None:
                        self._waiting.append(connection)
                        return
                    fds = [slot.fd for slot in self._weights]
                case Arena(nbytes, fresh, seal_bytes):
                    fds = [self._arena_of(nbytes, fresh)]
                    if seal_bytes:
                        fds.append(self._seals_of(seal_bytes, fresh))
        except (ValueError, OSError) as error:
            send_with_fds(connection, Refused(str(error)), [])
            return
        send_with_fds(connection, self._state(), fds)
        if self.table.clean is not None:
            waiting, self._waiting = self._waiting, []
            for waiter in waiting:
                # a waiter that is gone is cleaned up when the selector reports its end of stream
                with contextlib.suppress(OSError):
                    send_with_fds(waiter, self._state(), [slot.fd for slot in self._weights])

    def _state(self) -> OwnerState:
        return OwnerState(self._boot_id, os.getpid(), self.table.layout, self.table.clean, self.table.dirty)

    def _arena_of(self, nbytes: int, fresh: bool) -> int:
        if fresh and self._arena is not None:
            self._arena[1].close()  # a worker that is being taken apart may hold its mapping a little longer
            self._arena = None
        if self._arena is None:
            self._arena = (nbytes, self._memory.allocate("belayer-kv-arena", nbytes))
        if self._arena[0] != nbytes:
            raise ValueError(f"the KV arena has {self._arena[0]} bytes, not {nbytes}")
        return self._arena[1].fd

    def _seals_of(self, nbytes: int, fresh: bool) -> int:
        """The arena's seal table. One of another size, or of another arena, says nothing about this one."""
        if self._seals is not None and (fresh or self._seals[0] != nbytes):
            os.close(self._seals[1])
            self._seals = None
        if self._seals is None:
            self._seals = (nbytes, memfd("belayer-kv-seals", nbytes))
        return self._seals[1]


def main(argv: list[str]) -> None:
    path, driver, control_fd = Path(argv[0]), int(argv[1]), int(argv[2])
    die_with_parent(driver)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle; it closes us
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(16)
    control = socket.socket(fileno=control_fd)
    Owner(listener, control, *argv[3:4]).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
