"""Shared memory, semaphores and message queues: POSIX and System V."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
from contextlib import suppress
from typing import Any

from .kit import LIBC, Resource, call, digest, fork, require, resource, wait_until


@resource("/dev/shm and POSIX semaphores")
class PosixShared(Resource):
    """A file in /dev/shm, mapped by two; a named semaphore, one process waiting on it."""

    def setup(self) -> None:
        with open("/dev/shm/conformance", "w+b") as file:
            file.write(os.urandom(1 << 17))
            file.flush()
            self.area = mmap.mmap(file.fileno(), 1 << 17)
        self.area[0] = 0
        LIBC.sem_open.restype = ctypes.c_void_p
        self.counted, self.waited = (
            ctypes.c_void_p(LIBC.sem_open(name, os.O_CREAT, 0o600, count))
            for name, count in ((b"/conformance-3", 3), (b"/conformance-0", 0))
        )
        self.child = fork(self._wait)

    def _wait(self) -> None:
        while True:
            call("sem_wait", self.waited)
            self.area[0] = (self.area[0] + 1) % 256

    def probe(self) -> Any:
        value = ctypes.c_int()
        call("sem_getvalue", self.counted, ctypes.byref(value))
        return [digest(self.area), value.value, sorted(os.listdir("/dev/shm"))[:3]]

    def use(self) -> None:
        before = self.area[0]
        call("sem_post", self.waited)
        wait_until("the waiting process wakes", lambda: self.area[0] == (before + 1) % 256)
        other = ctypes.c_void_p(LIBC.sem_open(b"/conformance-3", 0))
        call("sem_wait", other)
        call("sem_post", self.counted)

    def damage(self) -> None:
        for name in os.listdir("/dev/shm"):
            os.unlink(f"/dev/shm/{name}")


@resource("System V shared memory")
class SystemVMemory(Resource):
    def setup(self) -> None:
        self.id = call("shmget", 4711, 1 << 17, 0o1600)
        LIBC.shmat.restype = ctypes.c_void_p
        self.address = LIBC.shmat(self.id, None, 0)
        ctypes.memmove(self.address, os.urandom(1 << 17), 1 << 17)
        self.detached = call("shmget", 4712, 1 << 16, 0o1600)
        address = LIBC.shmat(self.detached, None, 0)
        ctypes.memmove(address, b"nobody is attached", 18)
        call("shmdt", ctypes.c_void_p(address))

    def probe(self) -> Any:
        address = LIBC.shmat(self.detached, None, 0)
        text = ctypes.string_at(address, 18).decode()
        call("shmdt", ctypes.c_void_p(address))
        return [self.id, call("shmget", 4711, 0, 0), digest(ctypes.string_at(self.address, 1 << 17)), text]

    def use(self) -> None:
        other = LIBC.shmat(self.id, None, 0)
        ctypes.memmove(other, b"written", 7)
        require(ctypes.string_at(self.address, 7) == b"written", "not shared any more")
        call("shmdt", ctypes.c_void_p(other))

    def damage(self) -> None:
        call("shmctl", self.id, 0, 0)
        call("shmctl", self.detached, 0, 0)


@resource("System V semaphores")
class SystemVSemaphores(Resource):
    """A set with values, and a process that waits for one of them."""

    def setup(self) -> None:
        self.id = call("semget", 4713, 3, 0o1600)
        for number, value in enumerate((5, 0, 7)):
            call("semctl", self.id, number, 16, value)
        self.read, self.write = os.pipe()
        self.child = fork(self._wait)

    def _wait(self) -> None:
        while True:
            with suppress(InterruptedError):  # the kernel never goes on with a semop by itself: not after a dump either
                call("semop", self.id, struct.pack("Hhh", 1, -1, 0), 1)
                os.write(self.write, b"x")

    def probe(self) -> Any:
        return [self.id, *(call("semctl", self.id, number, 12) for number in range(3))]

    def use(self) -> None:
        call("semop", self.id, struct.pack("Hhh", 1, 1, 0), 1)
        require(os.read(self.read, 1) == b"x", "the waiting process did not wake")
        call("semop", self.id, struct.pack("Hhh", 2, 1, 0), 1)

    def damage(self) -> None:
        os.kill(self.child, signal.SIGKILL)
        call("semctl", self.id, 0, 0)


@resource("System V messages")
class SystemVMessages(Resource):
    def setup(self) -> None:
        self.id = call("msgget", 4714, 0o1600)
        for kind, text in ((2, b"second"), (1, b"first"), (2, b"third")):
            self._send(kind, text)

    def _send(self, kind: int, text: bytes) -> None:
        call("msgsnd", self.id, struct.pack("q", kind) + text, len(text), 0)

    def _take(self, kind: int) -> bytes:
        message = ctypes.create_string_buffer(100)
        size = call("msgrcv", self.id, message, 92, kind, 0o4000)
        return message.raw[8 : 8 + size]

    def probe(self) -> Any:
        state = ctypes.create_string_buffer(256)
        call("msgctl", self.id, 2, state)
        return [self.id, struct.unpack_from("QQ", state, 72)[1], call("msgget", 4714, 0)]

    def use(self) -> None:
        got = [self._take(2), self._take(2), self._take(1)]
        require(got == [b"second", b"third", b"first"], f"messages: {got}")
        for kind, text in ((2, b"second"), (1, b"first"), (2, b"third")):
            self._send(kind, text)

    def damage(self) -> None:
        call("msgctl", self.id, 0, 0)
