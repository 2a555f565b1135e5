"""Sockets: listening, connected, half closed, with bytes that nobody has read yet."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
from typing import Any

from .descriptors import waiting
from .kit import Resource, content, fork, in_child, require, resource, wait_until

V4, V6 = (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")


def listen(family: int, host: str) -> socket.socket:
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, 0))
    listener.listen(16)
    return listener


def pair(family: int, host: str) -> tuple[socket.socket, socket.socket]:
    with listen(family, host) as listener:
        client = socket.socket(family)
        client.settimeout(10)
        client.connect(listener.getsockname())
        served = listener.accept()[0]
        served.settimeout(10)
        return client, served


def receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        block = sock.recv(size - len(data))
        require(block, f"it ended after {len(data)} bytes")
        data += block
    return data


class TcpListen(Resource):
    where = V4

    def setup(self) -> None:
        self.listener = listen(*self.where)
        self.listener.settimeout(10)
        self.port = self.listener.getsockname()[1]
        self.waits = fork(self._serve)

    def _serve(self) -> None:
        """A second process that stands in accept() on a socket of its own."""
        with listen(*self.where) as other:
            with open("port.new", "w") as file:
                file.write(str(other.getsockname()[1]))
            os.rename("port.new", "port")
            while True:
                client = other.accept()[0]
                client.sendall(b"served")
                client.close()

    def probe(self) -> Any:
        wait_until("the second one listens", lambda: os.path.exists("port"))
        accepting = self.listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return [self.listener.getsockname(), accepting, content("port")]

    def use(self) -> None:
        client = socket.create_connection((self.where[1], self.port), 10)
        served = self.listener.accept()[0]
        served.sendall(b"hello")
        require(receive(client, 5) == b"hello", "hello")
        served.close()
        client.close()
        with socket.create_connection((self.where[1], int(content("port"))), 10) as client:
            require(receive(client, 6) == b"served", "served")


@resource("TCP listen v4")
class TcpListen4(TcpListen):
    pass


@resource("TCP listen v6")
class TcpListen6(TcpListen):
    where = V6


class TcpEstablished(Resource):
    """Both ends inside, with bytes unread in both directions, options set."""

    where = V4

    def setup(self) -> None:
        self.client, self.served = pair(*self.where)
        self.client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._fill()

    def _fill(self) -> None:
        self.client.sendall(b"to the server" * 1000)
        self.served.sendall(b"to the client" * 500)
        wait_until("all is there", lambda: self._there() == [13_000, 6500])

    def _there(self) -> list[int]:
        return [waiting(self.served.fileno()), waiting(self.client.fileno())]

    def probe(self) -> Any:
        options = [
            self.client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY),
            self.client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        ]
        return [self.client.getsockname(), self.client.getpeername(), self._there(), options]

    def use(self) -> None:
        require(receive(self.served, 13_000) == b"to the server" * 1000, "to the server")
        require(receive(self.client, 6500) == b"to the client" * 500, "to the client")
        for _ in range(20):
            self.client.sendall(b"ping" * 5000)
            receive(self.served, 20_000)
            self.served.sendall(b"pong")
            require(receive(self.client, 4) == b"pong", "pong")
        self._fill()


@resource("TCP established v4")
class TcpEstablished4(TcpEstablished):
    pass


@resource("TCP established v6")
class TcpEstablished6(TcpEstablished):
    where = V6


@resource("TCP between processes")
class TcpBetween(Resource):
    """Each end in a process of its own, one of them waiting in recv()."""

    def setup(self) -> None:
        self.client, served = pair(*V4)
        self.child = fork(lambda: self._echo(served))
        served.close()

    def _echo(self, served: socket.socket) -> None:
        self.client.close()
        served.settimeout(None)
        while data := served.recv(1 << 16):
            served.sendall(data.upper())

    def probe(self) -> Any:
        return [self.client.getsockname(), self.client.getpeername()]

    def use(self) -> None:
        for size in (5, 100_000):
            text = b"words" * (size // 5)
            self.client.sendall(text)
            require(receive(self.client, size) == text.upper(), f"{size} bytes")


@resource("UDP")
class Udp(Resource):
    """Bound and connected. What lies unread in the queue is lost, as UDP may lose it: see docs/sandbox.md."""

    def setup(self) -> None:
        self.bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.bound.bind(("127.0.0.1", 0))
        self.bound.settimeout(10)
        self.connected = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.connected.settimeout(10)
        self.connected.connect(self.bound.getsockname())

    def probe(self) -> Any:
        return [self.bound.getsockname(), self.connected.getsockname(), self.connected.getpeername()]

    def use(self) -> None:
        self.connected.send(b"question")
        data, sender = self.bound.recvfrom(100)
        require(data == b"question" and sender == self.connected.getsockname(), f"{data!r} of {sender}")
        self.bound.sendto(b"answer", sender)
        require(self.connected.recv(100) == b"answer", "answer")


@resource("unix sockets")
class UnixPairs(Resource):
    """Stream, datagram and sequenced pairs with messages unread; one end in another process."""

    def setup(self) -> None:
        self.pairs = {}
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
            a, b = socket.socketpair(socket.AF_UNIX, kind)
            b.settimeout(10)
            a.settimeout(10)
            self.pairs[int(kind)] = (a, b)
        self.ours, theirs = socket.socketpair()
        self.ours.settimeout(10)
        self.child = fork(lambda: self._echo(theirs))
        theirs.close()
        self._fill()

    def _echo(self, theirs: socket.socket) -> None:
        self.ours.close()
        while data := theirs.recv(1000):
            theirs.sendall(data.upper())

    def _fill(self) -> None:
        for a, b in self.pairs.values():
            for text in (b"one", b"three"):
                a.send(text)
            b.send(b"back")

    def probe(self) -> Any:
        return [[waiting(a.fileno()), waiting(b.fileno())] for a, b in self.pairs.values()]

    def use(self) -> None:
        for kind, (a, b) in self.pairs.items():
            got = [b.recv(100)] if kind == socket.SOCK_STREAM else [b.recv(100), b.recv(100)]
            require(got in ([b"onethree"], [b"one", b"three"]), f"kind {kind}: {got}")
            require(a.recv(100) == b"back", f"kind {kind}: back")
        self.ours.send(b"text")
        require(self.ours.recv(10) == b"TEXT", "the other process")
        self._fill()


@resource("unix sockets in files")
class UnixNamed(Resource):
    """Listening in a file, with one connected, one waiting to be accepted; an abstract name; a file that was deleted.

    One that waits to be accepted and has already sent something is refused: tests/.../test_refused.py.
    """

    def setup(self) -> None:
        self.listener = self._listen("in a file")
        self.client = self._connect("in a file")
        self.served = self.listener.accept()[0]
        self.served.settimeout(10)
        self.abstract = self._listen("\0conformance")
        self.gone = self._listen("deleted")
        self.gone_client = self._connect("deleted")
        self.gone_served = self.gone.accept()[0]
        os.unlink("deleted")
        self.datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.datagrams.settimeout(10)
        self.datagrams.bind("datagrams")
        self._knock()

    def _listen(self, name: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.settimeout(10)
        listener.bind(name)
        listener.listen(8)
        return listener

    def _connect(self, name: str) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(10)
        client.connect(name)
        return client

    def _knock(self) -> None:
        self.waits = self._connect("in a file")
        self.sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sender.sendto(b"lies in the queue", "datagrams")

    def probe(self) -> Any:
        names = [s.getsockname() for s in (self.listener, self.gone, self.datagrams)]
        return [names, os.path.exists("deleted"), os.stat("in a file").st_mode]

    def use(self) -> None:
        self.client.sendall(b"hello")
        require(receive(self.served, 5) == b"hello", "the connected one")
        accepted = self.listener.accept()[0]
        self.waits.sendall(b"now accepted")
        require(receive(accepted, 12) == b"now accepted", "the one that waited")
        require(self.datagrams.recv(100) == b"lies in the queue", "the datagram")
        self.gone_client.sendall(b"hello")
        require(receive(self.gone_served, 5) == b"hello", "the one whose file is deleted")
        other = self._connect("\0conformance")
        require(self.abstract.accept()[0] is not None, "the abstract one")
        for sock in (accepted, other, self.waits, self.sender):
            sock.close()
        self._knock()


@resource("peer of a unix socket")
class Credentials(Resource):
    """The process at the other end, and the name under which it was reached. Not kept: see docs/sandbox.md."""

    def setup(self) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind("door")
        self.listener.listen(1)
        self.child = fork(self._knock)
        self.served = self.listener.accept()[0]
        self.served.settimeout(10)

    def _knock(self) -> None:
        client = socket.socket(socket.AF_UNIX)
        client.connect("door")
        while True:
            signal.pause()

    def probe(self) -> Any:
        who = struct.unpack("iII", self.served.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return [who[0] == self.child, who[1:], self.served.getsockname()]


@resource("netlink")
class Netlink(Resource):
    def setup(self) -> None:
        self.sock = socket.socket(16, socket.SOCK_RAW, 0)
        self.sock.bind((0, 0))
        self.sock.settimeout(10)

    def probe(self) -> Any:
        return self.sock.getsockname()

    def use(self) -> None:
        # RTM_GETLINK, dump: the answer names the loopback device
        self.sock.send(struct.pack("=IHHIIBBHiII", 32, 18, 0x301, 1, 0, 0, 0, 0, 0, 0, 0))
        require(b"lo\0" in self.sock.recv(1 << 16), "no answer of the kernel")
        while select.select([self.sock], [], [], 0.05)[0]:
            self.sock.recv(1 << 16)


@resource("loopback is up")
class Loopback(Resource):
    def setup(self) -> None:
        self.turn = 0

    def probe(self) -> Any:
        with open("/proc/net/dev") as file:
            names = sorted(line.split(":")[0].strip() for line in file.readlines()[2:])
        return [names, in_child(lambda: str(socket.if_nameindex()))]

    def use(self) -> None:
        for where in (V4, V6):
            client, served = pair(*where)
            client.sendall(b"x")
            require(receive(served, 1) == b"x", where[1])
            client.close()
            served.close()
