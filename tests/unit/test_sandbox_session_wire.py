"""What the driver makes of an init that says nonsense: a lost sandbox, never a crash, a hang or a full memory."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from belayer.errors import SandboxError, SandboxLost
from belayer.sandbox._session import Session

pytestmark = pytest.mark.unit


def frame(kind: bytes, data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + kind + data


RESULT = struct.pack("<iiIQQ", 0, 0, 0, 0, 0)
NONSENSE = {
    "nothing": b"",
    "half a head": b"\x05\0",
    "a short state": frame(b"p", b"abc"),
    "a short result": frame(b"x", b"abc"),
    "a short refusal": frame(b"E", b"a"),
    "an unknown frame": frame(b"?", b""),
    "a frame without end": struct.pack("<I", 1000) + b"o" + b"x" * 10,
    "a huge frame": struct.pack("<I", 0xFFFFFFFF) + b"o",
    "random bytes": os.urandom(4096),
}


@contextmanager
def init_that_says(folder: Path, answer: bytes, *, for_ever: bool = False) -> Iterator[None]:
    """Listens as the init does and gives every connection the same answer."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "agent.sock"))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.recv(65536)
                    connection.sendall(answer)
                    while for_ever:
                        connection.sendall(answer)
                except OSError:
                    continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


async def exec_in(session: Session, limit: int = 1000):
    return await session.exec(["true"], cwd="/", env={}, timeout_s=2, grace_s=1, limit=limit)


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_means_a_lost_sandbox(tmp_path, name):
    async def body() -> None:
        session = Session(tmp_path, "s")
        try:
            with pytest.raises(SandboxLost):
                await session.ping(timeout_s=1)
            with pytest.raises(SandboxLost):
                await exec_in(session)
        finally:
            session.close()

    with init_that_says(tmp_path, NONSENSE[name]):
        asyncio.run(body())


def test_more_output_than_asked_for(tmp_path):
    async def body() -> None:
        session = Session(tmp_path, "s")
        try:
            with pytest.raises(SandboxLost, match="more than it was asked for"):
                await exec_in(session, limit=100_000)
        finally:
            session.close()

    with init_that_says(tmp_path, frame(b"o", b"x" * 60_000), for_ever=True):
        asyncio.run(body())


def test_only_the_init_is_believed(tmp_path):
    async def body() -> None:
        good, bad = Session(tmp_path, "s", os.getpid()), Session(tmp_path, "s", os.getppid())
        try:
            assert (await exec_in(good)).ok
            with pytest.raises(SandboxLost, match="in the place of the init"):
                await exec_in(bad)
            with pytest.raises(SandboxLost, match="in the place of the init"):
                await bad.ping()
        finally:
            good.close()
            bad.close()

    with init_that_says(tmp_path, frame(b"x", RESULT)):
        asyncio.run(body())


def test_a_refusal_is_an_error_with_its_text(tmp_path):
    async def body() -> None:
        session = Session(tmp_path, "s")
        try:
            with pytest.raises(SandboxError, match="no such thing") as caught:
                await exec_in(session)
            assert not isinstance(caught.value, SandboxLost)
        finally:
            session.close()

    with init_that_says(tmp_path, frame(b"E", struct.pack("<I", 3) + b"no such thing")):
        asyncio.run(body())
