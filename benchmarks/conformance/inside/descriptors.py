"""Descriptors that are no files and no sockets, and the ways in which processes share them."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import struct
import termios
from array import array
from typing import Any

from .kit import Resource, call, fork, in_child, require, resource, wait_until


def waiting(fd: int) -> int:
    """Bytes that can be read."""
    count = array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]


def turn_over(read: int, write: int) -> str:
    """What a pipe holds, which is put back as it was."""
    data = b""
    while left := waiting(read):
        data += os.read(read, left)
    os.write(write, data)
    return data.hex()[:64] + f" {len(data)}"


@resource("pipe")
class Pipe(Resource):
    """With something in it, larger than usual, one end shared with a child."""

    def setup(self) -> None:
        self.read, self.write = os.pipe()
        fcntl.fcntl(self.write, fcntl.F_SETPIPE_SZ, 1 << 18)
        os.set_blocking(self.read, False)
        os.write(self.write, os.urandom(100_000))
        self.child = fork(self._hold)

    def _hold(self) -> None:
        while True:
            signal.pause()

    def probe(self) -> Any:
        flags = [fcntl.fcntl(fd, fcntl.F_GETFL) for fd in (self.read, self.write)]
        return [turn_over(self.read, self.write), fcntl.fcntl(self.read, fcntl.F_GETPIPE_SZ), flags]

    def use(self) -> None:
        data = b""
        while waiting(self.read):
            data += os.read(self.read, 1 << 18)
        require(len(data) == 100_000, f"{len(data)} bytes")
        os.write(self.write, data[::-1])


@resource("blocked pipe reader and writer")
class BlockedPipes(Resource):
    """One process waits in read(), another in write() on a full pipe."""

    def setup(self) -> None:
        (self.a_read, self.a_write), (self.b_read, self.b_write) = os.pipe(), os.pipe()
        (self.c_read, self.c_write) = os.pipe()
        self.reader = fork(self._read)
        self.writer = fork(self._write)
        wait_until("the writer is stuck", lambda: waiting(self.b_read) == 65536)

    def _read(self) -> None:
        while True:
            os.write(self.c_write, os.read(self.a_read, 10).upper())

    def _write(self) -> None:
        while True:
            os.write(self.b_write, bytes(range(256)) * 1024)

    def probe(self) -> Any:
        return [waiting(self.b_read), waiting(self.a_read), waiting(self.c_read)]

    def use(self) -> None:
        os.write(self.a_write, b"text")
        require(os.read(self.c_read, 10) == b"TEXT", "the reader is wrong")
        data = b""
        while len(data) < 1 << 18:
            data += os.read(self.b_read, (1 << 18) - len(data))
        require(data == bytes(range(256)) * 1024, "the writer's bytes are wrong")
        wait_until("the writer is stuck again", lambda: waiting(self.b_read) == 65536)


@resource("fifo")
class Fifo(Resource):
    def setup(self) -> None:
        os.mkfifo("queue", 0o640)
        self.both = os.open("queue", os.O_RDWR | os.O_NONBLOCK)
        self.write = os.open("queue", os.O_WRONLY)
        os.write(self.write, b"in the queue " * 100)

    def probe(self) -> Any:
        return [turn_over(self.both, self.write), os.stat("queue").st_mode]

    def use(self) -> None:
        before = waiting(self.both)
        require(in_child(lambda: str(os.write(os.open("queue", os.O_WRONLY), b"more"))) == "4", "it cannot be opened")
        require(waiting(self.both) == before + 4, "what another process wrote did not come")


@resource("eventfd")
class Eventfd(Resource):
    def setup(self) -> None:
        self.count = os.eventfd(41, os.EFD_NONBLOCK)
        self.other = os.eventfd(3, os.EFD_CLOEXEC)
        os.eventfd_write(self.count, 1)

    def probe(self) -> Any:
        counts = []
        for fd in (self.count, self.other):
            with open(f"/proc/self/fdinfo/{fd}") as file:
                counts += [line.split()[1] for line in file if line.startswith("eventfd-count")]
        return counts

    def use(self) -> None:
        value = os.eventfd_read(self.count)
        os.eventfd_write(self.count, value + 1)
        require(os.eventfd_read(self.other) == 3, "the other counter")
        os.eventfd_write(self.other, 3)


@resource("timerfd")
class Timerfd(Resource):
    """One far in the future, one that fires every 10 ms, one whose ticks nobody has read."""

    def setup(self) -> None:
        self.far, self.near, self.over = (call("timerfd_create", clock, os.O_NONBLOCK) for clock in (1, 1, 0))
        call("timerfd_settime", self.far, 0, struct.pack("qqqq", 11, 5, 5000, 0), None)
        call("timerfd_settime", self.near, 0, struct.pack("qqqq", 0, 10**7, 0, 10**7), None)
        call("timerfd_settime", self.over, 0, struct.pack("qqqq", 0, 0, 0, 1), None)
        wait_until("the ticks are there", lambda: select.select([self.over], [], [], 1)[0])

    def probe(self) -> Any:
        import ctypes

        seen = []
        for fd in (self.far, self.near, self.over):
            now = ctypes.create_string_buffer(32)
            call("timerfd_gettime", fd, now)
            seconds, nanoseconds, left, _ = struct.unpack("qqqq", now.raw)
            seen.append([seconds, nanoseconds, left > 4000])
        with open(f"/proc/self/fdinfo/{self.over}") as file:
            return [seen, [line.split()[1] for line in file if line.startswith("ticks")]]

    def use(self) -> None:
        os.read(self.near, 8)
        require(select.select([self.near], [], [], 5)[0], "it does not fire any more")
        require(not select.select([self.far], [], [], 0)[0], "it fired too early")


@resource("signalfd")
class Signalfd(Resource):
    def setup(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGCHLD])
        mask = struct.pack("Q", 1 << signal.SIGUSR1 - 1 | 1 << signal.SIGCHLD - 1)
        self.fd = call("signalfd", -1, mask + bytes(120), os.O_NONBLOCK)
        os.kill(os.getpid(), signal.SIGUSR1)

    def probe(self) -> Any:
        with open(f"/proc/self/fdinfo/{self.fd}") as file:
            mask = [line for line in file if line.startswith("sigmask")]
        return [mask, bool(select.select([self.fd], [], [], 0)[0])]

    def use(self) -> None:
        info = os.read(self.fd, 128)
        number, _, _, pid = struct.unpack_from("IiiI", info)
        require((number, pid) == (signal.SIGUSR1, os.getpid()), f"signal {number} of {pid}")
        os.kill(os.getpid(), signal.SIGUSR1)


@resource("epoll")
class Epoll(Resource):
    """Level- and edge-triggered, one-shot, another epoll inside, and a member that is ready."""

    def setup(self) -> None:
        self.outer, self.inner = select.epoll(), select.epoll()
        self.level, self.edge, self.once = (os.eventfd(0, os.EFD_NONBLOCK) for _ in range(3))
        self.outer.register(self.level, select.EPOLLIN)
        self.outer.register(self.edge, select.EPOLLIN | select.EPOLLET)
        self.inner.register(self.once, select.EPOLLIN | select.EPOLLONESHOT)
        self.outer.register(self.inner, select.EPOLLIN)
        os.eventfd_write(self.level, 1)

    def probe(self) -> Any:
        members = []
        for epoll in (self.outer, self.inner):
            with open(f"/proc/self/fdinfo/{epoll.fileno()}") as file:
                members += sorted(line.split()[:6] for line in file if line.startswith("tfd"))
        return [members, sorted(self.outer.poll(0))]

    def use(self) -> None:
        os.eventfd_write(self.edge, 1)
        ready = {fd for fd, _ in self.outer.poll(1)}
        require(ready == {self.level, self.edge}, f"ready: {ready}")
        require({fd for fd, _ in self.outer.poll(0)} == {self.level}, "edge-triggered became level-triggered")
        os.eventfd_write(self.once, 1)
        require(self.inner.fileno() in {fd for fd, _ in self.outer.poll(1)}, "the inner one is not ready")
        require([fd for fd, _ in self.inner.poll(1)] == [self.once], "the one-shot did not come")
        require(self.inner.poll(0) == [], "it came twice")
        self.inner.modify(self.once, select.EPOLLIN | select.EPOLLONESHOT)
        for fd in (self.edge, self.once):
            os.eventfd_read(fd)


@resource("inotify")
class Inotify(Resource):
    """On a folder and a file."""

    def setup(self) -> None:
        self.fd = call("inotify_init1", os.O_NONBLOCK)
        os.mkdir("watched")
        open("single", "w").close()
        self.watches = [
            call("inotify_add_watch", self.fd, b"watched", 0x3C2),
            call("inotify_add_watch", self.fd, b"single", 0x2),
        ]
        self.turn = 0
        self._read()

    def _read(self) -> list[Any]:
        events = []
        while waiting(self.fd):
            data, at = os.read(self.fd, 1 << 16), 0
            while at < len(data):
                watch, mask, _, length = struct.unpack_from("iIII", data, at)
                events.append([watch, mask, data[at + 16 : at + 16 + length].rstrip(b"\0").decode()])
                at += 16 + length
        return events

    def probe(self) -> Any:
        with open(f"/proc/self/fdinfo/{self.fd}") as file:
            lines = [line.split() for line in file if line.startswith("inotify")]
        return [sorted([line[1], line[4]] for line in lines), waiting(self.fd)]

    def use(self) -> None:
        self.turn += 1
        with open(f"watched/{self.turn}", "w"), open("single", "a") as single:
            single.write("x")
        folder, single_ = self.watches
        events = self._read()
        wanted = [[folder, 0x100, str(self.turn)], [single_, 0x2, ""]]
        require(sorted(events) == sorted(wanted), f"events: {events}")


@resource("shared descriptors")
class SharedDescriptors(Resource):
    """Two numbers and two processes with one offset; a descriptor on its way through a socket."""

    def setup(self) -> None:
        with open("text", "w") as file:
            file.write("0123456789" * 10)
        self.fd = os.open("text", os.O_RDWR)
        self.twin = os.dup2(self.fd, 300)
        self.other = os.open("text", os.O_RDONLY | os.O_APPEND | os.O_CLOEXEC)
        (self.a, self.b) = socket.socketpair()
        self.ask, asked = os.pipe()
        self.asked, self.answer = asked, os.pipe()
        self.child = fork(self._serve)
        os.lseek(self.fd, 42, os.SEEK_SET)
        self._send()

    def _send(self) -> None:
        fd = os.open("text", os.O_RDONLY)
        os.lseek(fd, 17, os.SEEK_SET)
        socket.send_fds(self.a, [b"take it"], [fd])
        os.close(fd)

    def _serve(self) -> None:
        while True:
            os.read(self.ask, 1)
            os.write(self.answer[1], b"%d" % os.lseek(self.fd, 0, os.SEEK_CUR))

    def probe(self) -> Any:
        os.write(self.asked, b"?")
        seen = int(os.read(self.answer[0], 20))
        here = [os.lseek(fd, 0, os.SEEK_CUR) for fd in (self.fd, self.twin, self.other)]
        flags = [fcntl.fcntl(fd, fcntl.F_GETFD) for fd in (self.fd, self.twin, self.other)]
        return [seen, here, flags, waiting(self.b.fileno())]

    def use(self) -> None:
        before = os.lseek(self.fd, 0, os.SEEK_CUR)
        os.read(self.twin, 3)
        require(os.lseek(self.fd, 0, os.SEEK_CUR) == before + 3, "the offset is not shared any more")
        data, fds, _, _ = socket.recv_fds(self.b, 100, 1)
        require(data == b"take it" and os.read(fds[0], 3) == b"789", "the descriptor on its way is wrong")
        os.close(fds[0])
        self._send()


@resource("device descriptors")
class Devices(Resource):
    def setup(self) -> None:
        self.fds = {name: os.open(f"/dev/{name}", os.O_RDWR) for name in ("null", "zero", "full", "urandom")}
        self.folder = os.open("/srv", os.O_RDONLY | os.O_DIRECTORY)
        self.path = os.open("/usr/bin", os.O_PATH)
        self.proc = os.open("/proc/self/status", os.O_RDONLY)
        self.namespace = os.open("/proc/1/comm", os.O_RDONLY)

    def probe(self) -> Any:
        named = (*self.fds.values(), self.folder, self.path, self.proc, self.namespace)
        return [os.readlink(f"/proc/self/fd/{fd}") for fd in named]

    def use(self) -> None:
        require(os.read(self.fds["zero"], 3) == bytes(3), "zero")
        require(len(os.read(self.fds["urandom"], 3)) == 3, "urandom")
        require("conformance" in os.listdir(self.folder), "folder")
        os.lseek(self.proc, 0, os.SEEK_SET)
        require(b"Pid:" in os.read(self.proc, 4096), "proc")
