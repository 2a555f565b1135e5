"""Talking to the owner: blocking calls with a deadline, from the driver and from workers."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

from belayer.engine._wire import (
    Arena,
    Attach,
    Begin,
    Commit,
    Define,
    Epoch,
    FromOwner,
    Hello,
    OwnerState,
    Refused,
    ToOwner,
    receive_with_fds,
    send_with_fds,
)
from belayer.engine.weights.layout import Layout
from belayer.errors import OwnerLost, WeightsError


class OwnerClient:
    """One connection to the owner. Every call raises `OwnerLost` when it does not answer within its deadline."""

    def __init__(self, connection: socket.socket, timeout_s: float = 5.0) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._lock = threading.Lock()

    @classmethod
    def connect(cls, path: Path) -> OwnerClient:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(5.0)
        try:
            connection.connect(str(path))
        except OSError as error:
            raise OwnerLost(f"the owner does not listen on {path}: {error}") from None
        return cls(connection)

    def state(self, timeout_s: float | None = None) -> OwnerState:
        return self._call(Hello(), timeout_s)[0]

    def define(self, layout: Layout) -> None:
        self._call(Define(layout))

    def begin(self, after: int = 0) -> Epoch:
        dirty = self._call(Begin(after))[0].dirty
        assert dirty is not None
        return dirty

    def commit(self, number: int, digest: str, policy_version: int) -> Epoch:
        clean = self._call(Commit(number, digest, policy_version))[0].clean
        assert clean is not None
        return clean

    def weights(self, *, when_clean: bool, timeout_s: float | None = None) -> tuple[OwnerState, list[int]]:
        """The owner's state and the descriptors of the weights slots, which the caller closes."""
        return self._call(Attach(when_clean), timeout_s)

    def arena(self, nbytes: int, *, fresh: bool) -> int:
        """Descriptor of the KV arena, which the caller closes; `fresh`: of one that nobody else has mapped."""
        return self._call(Arena(nbytes, fresh))[1][0]

    def sealed_arena(self, nbytes: int, seal_bytes: int) -> tuple[int, int]:
        """Descriptors of the KV arena as the last worker left it and of its seal table; the caller closes them."""
        arena, seals = self._call(Arena(nbytes, False, seal_bytes))[1]
        return arena, seals

    def close(self) -> None:
        self._connection.close()

    def _call(self, request: ToOwner, timeout_s: float | None = None) -> tuple[OwnerState, list[int]]:
        with self._lock:
            try:
                # on a client that was closed meanwhile, because the owner is being replaced, this fails already
                self._connection.settimeout(timeout_s or self._timeout_s)
                send_with_fds(self._connection, request, [])
                answer, fds = receive_with_fds(self._connection, FromOwner)
            except (OSError, EOFError) as error:
                # a late answer would be taken for the answer to the next question
                self._connection.close()
                raise OwnerLost(f"the owner did not answer {type(request).__name__}: {error}") from None
        for fd in fds:
            os.set_inheritable(fd, False)
        if isinstance(answer, Refused):
            raise WeightsError(f"the owner refused {type(request).__name__}: {answer.reason}")
        return answer, fds
