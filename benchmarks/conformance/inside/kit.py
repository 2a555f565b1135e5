"""What all resources share: the base class, the registry, and a way to the C library's calls."""

from __future__ import annotations

import ctypes
import hashlib
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
REGISTRY: dict[str, type[Resource]] = {}


class Resource:
    """One thing that a checkpoint must capture.

    `probe` describes its state as JSON and leaves it as it is. `use` works with it like a program would, raises when it
    does not work, and may change the state. `damage` is what happens between checkpoint and kill. `level` is the lowest
    level of checkpoint at which the resource survives. One of level `fs` has no process: every call is a new one's.
    """

    level = "full"
    group = "main"  # resources of one group share a sandbox
    needs: tuple[str, ...] = ()  # programs

    def setup(self) -> None:
        raise NotImplementedError

    def probe(self) -> Any:
        raise NotImplementedError

    def use(self) -> None:
        """Nothing to do beyond looking."""

    def damage(self) -> None:
        """The process that holds it ends, and its folder is emptied, whatever else is done here."""


def resource(name: str) -> Callable[[type[Resource]], type[Resource]]:
    def register(cls: type[Resource]) -> type[Resource]:
        assert name not in REGISTRY, name
        REGISTRY[name] = cls
        return cls

    return register


def call(name: str, *args: Any) -> int:
    """A function of the C library; raises `OSError` when it returns -1."""
    function = getattr(LIBC, name)
    function.restype = ctypes.c_int  # as a long, -1 would be 4294967295
    ctypes.set_errno(0)
    result = function(*args)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def digest(data: Any) -> str:
    """Of anything that is bytes in memory."""
    return hashlib.sha256(data).hexdigest()[:16]


def wait_until(what: str, check: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    end = time.monotonic() + timeout_s
    while not (found := check()):
        if time.monotonic() > end:
            why = f"; a child failed: {content('child-failed')}" if os.path.exists("child-failed") else ""
            raise TimeoutError(f"not within {timeout_s} s: {what}{why}")
        time.sleep(0.01)
    return found


def status(pid: int | str, *names: str) -> dict[str, str]:
    """Lines of /proc/PID/status."""
    with open(f"/proc/{pid}/status") as file:
        lines = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    return {name: lines[name] for name in names}


own_fds: set[int] = set()  # the holder's socket and the connection on which it is asked; no child may keep them open


def fork(body: Callable[[], Any]) -> int:
    """Run `body` in a child that never comes back; what it raises is in the file `child-failed`."""
    pid = os.fork()
    if pid:
        return pid
    try:
        for fd in own_fds:
            os.close(fd)
        own_fds.clear()
        body()
    except BaseException as error:
        with open("child-failed", "w") as file:
            file.write(repr(error))
    finally:
        os._exit(0)


def rest() -> None:
    while True:
        signal.pause()


def content(path: str) -> str:
    with open(path) as file:
        return file.read()


def in_child(body: Callable[[], str]) -> str:
    """The answer of `body`, run in a child: what another process sees."""
    read, write = os.pipe()
    pid = fork(lambda: (os.write(write, _safely(body).encode()), None)[1])
    os.close(write)
    text = b""
    poll = select.poll()
    poll.register(read, select.POLLIN)
    try:
        while True:
            # not a plain read: a signal that comes just before it blocks has its handler run only when it returns
            if poll.poll(50):
                block = os.read(read, 1 << 16)
                if not block:
                    break
                text += block
    finally:
        os.close(read)
    os.waitpid(pid, 0)
    return text.decode()


def _safely(body: Callable[[], str]) -> str:
    try:
        return body()
    except OSError as error:
        return f"{type(error).__name__} {error.errno}"


def require(condition: object, what: str) -> None:
    """`assert` that stays under -O."""
    if not condition:
        raise AssertionError(what)
