"""Memory, threads, process trees, and programs that run an event loop."""

from __future__ import annotations

import mmap
import os
import queue
import signal
import socket
import threading
import time
import zlib
from typing import Any

from .kit import Resource, digest, fork, require, resource, rest, wait_until


@resource("memory")
class Memory(Resource):
    def setup(self) -> None:
        self.data = bytearray(os.urandom(4 << 20))
        self.mapped = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.mapped[:] = os.urandom(1 << 20)
        self.turn = 0

    def probe(self) -> Any:
        return [digest(self.data), digest(self.mapped), self.turn]

    def use(self) -> None:
        self.turn += 1
        self.data[self.turn * 4096] ^= 0xFF
        self.mapped[self.turn * 8192] ^= 0xFF

    def damage(self) -> None:
        self.data[:] = bytes(len(self.data))


@resource("big process")
class BigProcess(Resource):
    """Memory of CONFORMANCE_BIG_MB megabytes, every page different."""

    group = "big"

    def setup(self) -> None:
        size = int(os.environ.get("CONFORMANCE_BIG_MB", "256")) << 20
        self.data = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block = os.urandom(1 << 20)
        for number in range(size >> 20):
            self.data[number << 20 : number + 1 << 20] = block
        for page in range(0, size, 4096):
            self.data[page : page + 8] = page.to_bytes(8, "little")

    def probe(self) -> Any:
        return [len(self.data), zlib.crc32(self.data)]

    def use(self) -> None:
        at = len(self.data) // 2 + 100
        self.data[at] ^= 1


@resource("threads")
class Threads(Resource):
    """Their ids, names, what only their stacks know, a lock that one holds, and one that waits."""

    def setup(self) -> None:
        self.asked: list[queue.Queue[str]] = []
        self.answers: queue.Queue[Any] = queue.Queue()
        self.lock = threading.Lock()
        self.event = threading.Event()
        for number in range(4):
            self.asked.append(queue.Queue())
            threading.Thread(target=self._live, args=(number,), name=f"thread {number}", daemon=True).start()
        threading.Thread(target=self.event.wait, name="waits", daemon=True).start()
        self._all("look")

    def _live(self, number: int) -> None:
        secret, count = os.urandom(8).hex(), 0
        if number == 0:
            self.lock.acquire()
        while True:
            if self.asked[number].get() == "count":
                count += 1
            self.answers.put([number, threading.get_native_id(), threading.current_thread().name, secret, count])

    def _all(self, what: str) -> list[Any]:
        for box in self.asked:
            box.put(what)
        return sorted(self.answers.get(timeout=10) for _ in self.asked)

    def probe(self) -> Any:
        return [self._all("look"), self.lock.locked(), sorted(thread.name for thread in threading.enumerate())]

    def use(self) -> None:
        before = self._all("look")
        after = self._all("count")
        require([row[-1] + 1 for row in before] == [row[-1] for row in after], f"{before} became {after}")


@resource("asyncio server")
class AsyncioServer(Resource):
    """A server with one client that stays connected and others that come and go."""

    def setup(self) -> None:
        import asyncio  # here, and not above: every holder is dumped with all that it has imported

        self.asyncio = asyncio
        self.count = 0
        self.port = 0
        threading.Thread(target=lambda: self.asyncio.run(self._serve()), daemon=True).start()
        wait_until("the server listens", lambda: self.port)
        self.client = socket.create_connection(("127.0.0.1", self.port), 10)
        self._say(self.client, b"count\n")

    async def _serve(self) -> None:
        server = await self.asyncio.start_server(self._talk, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self.ticks = 0
        async with server:
            while True:
                await self.asyncio.sleep(0.02)
                self.ticks += 1

    async def _talk(self, reader: Any, writer: Any) -> None:
        while line := await reader.readline():
            self.count += line == b"count\n"
            writer.write(b"%d\n" % self.count)
            if line == b"bye\n":
                break
        writer.close()

    def _say(self, client: socket.socket, line: bytes) -> int:
        client.sendall(line)
        answer = b""
        while not answer.endswith(b"\n"):
            block = client.recv(100)
            require(block, "the server hung up")
            answer += block
        return int(answer)

    def probe(self) -> Any:
        return [self.port, self._say(self.client, b"look\n"), self.client.getsockname()]

    def use(self) -> None:
        before, ticks = self._say(self.client, b"look\n"), self.ticks
        require(self._say(self.client, b"count\n") == before + 1, "the count is wrong")
        with socket.create_connection(("127.0.0.1", self.port), 10) as other:
            require(self._say(other, b"count\n") == before + 2, "a new client is served wrongly")
            self._say(other, b"bye\n")
            require(other.recv(1) == b"", "no end")
        wait_until("the event loop's timers go on", lambda: self.ticks > ticks)


@resource("process tree")
class ProcessTree(Resource):
    """A child, a grandchild in a session of its own, an orphan, a stopped one, a dead one that nobody waited for."""

    def setup(self) -> None:
        read, write = os.pipe()
        self.child = fork(lambda: self._parent(write))
        self.stopped = fork(self._rest)
        self.dead = fork(lambda: os._exit(7))
        os.kill(self.stopped, signal.SIGSTOP)
        wait_until("one is stopped", lambda: self._look(self.stopped)[1] == "T")
        wait_until("one is dead", lambda: self._look(self.dead)[1] == "Z")
        self.grandchild, self.orphan = (int(text) for text in os.read(read, 100).split())
        os.close(read)
        os.close(write)

    def _rest(self) -> None:
        while True:
            signal.pause()

    def _parent(self, write: int) -> None:
        grandchild = fork(lambda: (os.setsid(), self._rest())[1])
        read, inner = os.pipe()

        def between() -> None:
            orphan = fork(lambda: (os.setpgid(0, 0), self._rest())[1])
            os.write(inner, str(orphan).encode())

        os.waitpid(fork(between), 0)
        time.sleep(0.05)
        os.write(write, b"%d %s" % (grandchild, os.read(read, 50)))
        self._rest()

    def _look(self, pid: int) -> list[Any]:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return [pid, fields[0], *(int(field) for field in fields[1:4])]  # state, parent, group, session

    def probe(self) -> Any:
        return [self._look(pid) for pid in (self.child, self.grandchild, self.orphan, self.stopped, self.dead)]

    def use(self) -> None:
        os.kill(self.stopped, signal.SIGCONT)
        wait_until("the stopped one goes on", lambda: self._look(self.stopped)[1] == "S")
        os.kill(self.stopped, signal.SIGSTOP)
        wait_until("it stops again", lambda: self._look(self.stopped)[1] == "T")
        pid, how = os.waitpid(self.dead, 0)
        require((pid, os.waitstatus_to_exitcode(how)) == (self.dead, 7), f"{pid} {how}")
        self.dead = fork(lambda: os._exit(7))
        wait_until("one is dead", lambda: self._look(self.dead)[1] == "Z")


@resource("running process")
class Ticker(Resource):
    """Sleeps in short system calls and counts: goes on without a gap and without a repetition."""

    def setup(self) -> None:
        self.child = fork(self._tick)

    def _tick(self) -> None:
        with open("ticks", "w") as file:
            for number in range(1 << 40):
                file.write(f"{number}\n")
                file.flush()
                time.sleep(0.02)

    def _ticks(self) -> list[int]:
        with open("ticks") as file:
            return [int(line) for line in file.read().splitlines()[:-1]]

    def probe(self) -> Any:
        seen = self._ticks()
        return ["gapless", seen == list(range(len(seen)))]

    def use(self) -> None:
        before = len(self._ticks())
        wait_until("it goes on", lambda: len(self._ticks()) > before)


@resource("pidfd")
class Pidfd(Resource):
    def setup(self) -> None:
        self.child = fork(rest)
        self.fd = os.pidfd_open(self.child)

    def probe(self) -> Any:
        with open(f"/proc/self/fdinfo/{self.fd}") as file:
            lines = dict(line.split(":\t") for line in file.read().splitlines())
        return [self.child, int(lines["Pid"])]

    def use(self) -> None:
        import select

        signal.pidfd_send_signal(self.fd, 0)
        require(not select.select([self.fd], [], [], 0)[0], "the child seems dead")
        signal.pidfd_send_signal(self.fd, signal.SIGKILL)
        require(select.select([self.fd], [], [], 10)[0], "the child's death is not seen")
        os.waitpid(self.child, 0)
        os.close(self.fd)
        self.setup()


@resource("multiprocessing")
class Multiprocessing(Resource):
    """Workers with a lock, a queue with something in it, a shared value, and shared memory by name."""

    def setup(self) -> None:
        import multiprocessing
        from multiprocessing.shared_memory import SharedMemory

        context = multiprocessing.get_context("fork")
        self.lock, self.value = context.Lock(), context.Value("q", 0)
        self.orders, self.done = context.Queue(), context.Queue()
        self.memory = SharedMemory(create=True, size=1 << 16)
        assert self.memory.buf is not None
        self.memory.buf[:] = os.urandom(1 << 16)
        self.worker = context.Process(target=self._work, daemon=True)
        self.worker.start()
        self.lock.acquire()
        for number in range(3):
            self.orders.put(number)

    def _work(self) -> None:
        while True:
            order = self.orders.get()
            with self.lock:
                self.value.value += 1
                self.done.put([order, digest(self.memory.buf)])

    def probe(self) -> Any:
        free = self.lock.acquire(block=False)
        if free:
            self.lock.release()
        return [free, self.value.value, digest(self.memory.buf), self.worker.pid]

    def use(self) -> None:
        self.lock.release()
        wanted = digest(self.memory.buf)
        got = [self.done.get(timeout=10) for _ in range(3)]
        require(got == [[number, wanted] for number in range(3)], f"the worker said {got}")
        self.lock.acquire()
        for number in range(3):
            self.orders.put(number)
