"""Locks on files. Whether one is held is asked by another process."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from typing import Any

from .kit import Resource, call, fork, in_child, require, resource, rest, wait_until

OFD_SET, SET_LEASE, GET_LEASE = 37, 1024, 1025


def ask_flock(path: str, how: int) -> str:
    def body() -> str:
        fd = os.open(path, os.O_RDWR)
        fcntl.flock(fd, how | fcntl.LOCK_NB)
        return "free"

    return in_child(body)


def ask_posix(path: str, how: int, start: int, length: int) -> str:
    def body() -> str:
        fd = os.open(path, os.O_RDWR)
        fcntl.lockf(fd, how | fcntl.LOCK_NB, length, start)
        return "free"

    return in_child(body)


@resource("flock")
class Flock(Resource):
    """Exclusive and shared, one of them held by a descriptor that parent and child share, and one waited for."""

    def setup(self) -> None:
        self.fds = []
        for name, how in (("mine", fcntl.LOCK_EX), ("ours", fcntl.LOCK_SH), ("free", None)):
            fd = os.open(name, os.O_RDWR | os.O_CREAT)
            if how is not None:
                fcntl.flock(fd, how)
            self.fds.append(fd)
        self.child = fork(rest)

    def probe(self) -> Any:
        return [[ask_flock(n, how) for how in (fcntl.LOCK_EX, fcntl.LOCK_SH)] for n in ("mine", "ours", "free")]

    def use(self) -> None:
        fcntl.flock(self.fds[0], fcntl.LOCK_UN)
        require(ask_flock("mine", fcntl.LOCK_EX) == "free", "it cannot be released")
        fcntl.flock(self.fds[0], fcntl.LOCK_EX)


@resource("fcntl lock")
class PosixLock(Resource):
    def setup(self) -> None:
        self.fd = os.open("file", os.O_RDWR | os.O_CREAT)
        os.truncate(self.fd, 1000)
        fcntl.lockf(self.fd, fcntl.LOCK_EX, 100, 0)
        fcntl.lockf(self.fd, fcntl.LOCK_SH, 100, 500)

    def probe(self) -> Any:
        ranges = ((0, 100), (50, 10), (100, 100), (500, 100), (700, 0))
        return [[ask_posix("file", how, *r) for how in (fcntl.LOCK_EX, fcntl.LOCK_SH)] for r in ranges]

    def use(self) -> None:
        fcntl.lockf(self.fd, fcntl.LOCK_UN, 100, 0)
        require(ask_posix("file", fcntl.LOCK_EX, 0, 100) == "free", "it cannot be released")
        fcntl.lockf(self.fd, fcntl.LOCK_EX, 100, 0)


@resource("open file description lock")
class OfdLock(Resource):
    def setup(self) -> None:
        self.fd = os.open("file", os.O_RDWR | os.O_CREAT)
        os.truncate(self.fd, 1000)
        fcntl.fcntl(self.fd, OFD_SET, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 10, 20, 0))

    def probe(self) -> Any:
        return [ask_posix("file", fcntl.LOCK_EX, *r) for r in ((0, 10), (10, 20), (29, 1), (30, 0))]


@resource("waiting for a lock")
class WaitsForLock(Resource):
    """A process that stands in flock() gets the lock when it becomes free, and not before."""

    def setup(self) -> None:
        self.fd = os.open("file", os.O_RDWR | os.O_CREAT)
        fcntl.flock(self.fd, fcntl.LOCK_EX)
        self.child = fork(self._wait)

    def _wait(self) -> None:
        os.close(self.fd)
        while True:
            fd = os.open("file", os.O_RDWR)
            fcntl.flock(fd, fcntl.LOCK_EX)
            with open("got", "a") as file:
                file.write("x")
            while not os.path.exists("again"):
                signal.sigtimedwait([signal.SIGUSR1], 0.005)
            os.unlink("again")
            os.close(fd)
            open("released", "w").close()
            while os.path.exists("released"):
                signal.sigtimedwait([signal.SIGUSR1], 0.005)

    def _count(self) -> int:
        return os.path.getsize("got") if os.path.exists("got") else 0

    def probe(self) -> Any:
        return [self._count(), ask_flock("file", fcntl.LOCK_SH)]

    def use(self) -> None:
        before = self._count()
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        wait_until("the waiting one gets the lock", lambda: self._count() > before)
        open("again", "w").close()
        wait_until("it gives it back", lambda: os.path.exists("released"))
        fcntl.flock(self.fd, fcntl.LOCK_EX)
        os.unlink("released")


@resource("file lease")
class Lease(Resource):
    def setup(self) -> None:
        self.broken = 0
        signal.signal(signal.SIGIO, self._break)
        with open("leased", "w") as file:
            file.write("x")
        self.fd = os.open("leased", os.O_RDONLY)
        call("fcntl", self.fd, SET_LEASE, fcntl.F_RDLCK)

    def _break(self, *_: Any) -> None:
        self.broken += 1
        call("fcntl", self.fd, SET_LEASE, fcntl.F_UNLCK)

    def probe(self) -> Any:
        return [call("fcntl", self.fd, GET_LEASE, 0), self.broken]

    def use(self) -> None:
        before = self.broken
        in_child(lambda: str(os.open("leased", os.O_WRONLY)))
        require(self.broken == before + 1, "the lease was not broken")
        call("fcntl", self.fd, SET_LEASE, fcntl.F_RDLCK)
