"""The host's end of the session with a container's init. The wire format is described in native/init.c.

One connection per request. Closing it cancels the request, and the init kills what the request started.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from belayer.errors import SandboxError, SandboxLost, StaleSandbox
from belayer.faults import failpoints

Fence = tuple[int, int]
_T = TypeVar("_T")

DEFAULT_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
_STATE = struct.Struct("<QQQQII")
_RESULT = struct.Struct("<iiIQQ")
_JOB = struct.Struct("<IIQ")
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_CHUNK = 1 << 18
_LARGEST_FRAME = 1 << 20  # of an answer: the init reads 64 KiB at a time
_END_OF_INPUT = b"\0\0\0\0I"
_TIMED_OUT, _TRUNCATED, _SHELL_ENDED, _WAS_QUIET = 1, 2, 4, 8
_STALE, _BUSY = 1, 2


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one command did. A non-zero exit, a timeout or an out-of-memory kill is a result, not an error.

    `exit_code` is None when a signal ended the command (then `signal` is its number) or the timeout did. `dropped`
    bytes of output beyond the limit were thrown away (`truncated`). `shell_ended` says that the persistent shell itself
    ended, so that the next command meets a fresh one. Of a command that did not succeed, three flags say which limit of
    the sandbox it ran into: `oom` (a process was killed for lack of memory), `process_limit`, `disk_full`.
    """

    exit_code: int | None
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False
    truncated: bool = False
    wall_s: float = 0.0
    signal: int | None = None
    oom: bool = False
    dropped: int = 0
    was_quiet: bool = False
    shell_ended: bool = False
    process_limit: bool = False
    disk_full: bool = False

    @property
    def text(self) -> str:
        """Output and error output, decoded; undecodable bytes are replaced."""
        return (self.stdout + self.stderr).decode(errors="replace")

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


class InitState(msgspec.Struct, frozen=True):
    """What the init says of itself. `nonce` is drawn at its start and lives in its memory only."""

    nonce: int
    attempt: int
    generation: int
    jobs_started: int
    shell_pid: int
    jobs: int


class _Busy(SandboxError):
    """The init cannot take this request just now."""


class Session:
    """Talks to the init whose socket is in `folder`. Holds no connection between requests.

    `init_pid`: only to a socket on which this process listens, so that nobody can answer in the init's place.
    """

    def __init__(self, folder: Path, name: str, init_pid: int = 0) -> None:
        # a path through a descriptor: socket addresses end at 107 bytes, folders of runs need not
        self._folder = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._address = f"/proc/self/fd/{self._folder}/agent.sock"
        self._name = name
        self._init_pid = init_pid

    def close(self) -> None:
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    async def ping(self, timeout_s: float = 2.0) -> InitState:
        """Ask the init for its state. Raises `SandboxLost` when it does not answer in time."""
        return await self._state(b"P", b"", timeout_s)

    async def fence(self, fence: Fence, timeout_s: float = 2.0) -> InitState:
        """Tell the init the newest (attempt, generation); it refuses older ones from now on."""
        return await self._state(b"F", struct.pack("<QQ", *fence), timeout_s)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        timeout_s: float,
        grace_s: float,
        limit: int,
        stdin: bytes | memoryview = b"",
        fence: Fence | None = None,
        builtin: bool = False,
        quiet_s: float = 0.0,
        sink: Callable[[bytes], object] | None = None,
    ) -> ExecResult:
        """Run one command in a fresh process. Raises `SandboxLost` after `timeout_s + grace_s` without an answer.

        `sink` takes the output as it comes, instead of the result.
        """
        parts = [_job(fence, timeout_s, quiet_s, limit), bytes([builtin]), _text(cwd), _texts(argv)]
        parts.append(_texts([f"{key}={value}" for key, value in env.items()]))
        return await self._run(b"X", b"".join(parts), stdin, timeout_s + grace_s, limit, sink)

    async def shell(
        self,
        command: str,
        *,
        timeout_s: float,
        grace_s: float,
        limit: int,
        fence: Fence | None = None,
        quiet_s: float = 0.0,
    ) -> ExecResult:
        """Run a command in the persistent shell."""
        if "\0" in command:
            raise ValueError("a shell command cannot contain NUL")
        payload = _job(fence, timeout_s, quiet_s, limit) + os.fsencode(command)
        # the shell is busy for a moment after a cancelled command
        deadline = asyncio.get_running_loop().time() + grace_s
        while True:
            try:
                return await self._run(b"S", payload, b"", timeout_s + grace_s, limit)
            except _Busy:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(0.02)

    # -- one request ---------------------------------------------------------------------------------------------------
    async def _state(self, kind: bytes, payload: bytes, timeout_s: float) -> InitState:
        try:
            return await _within(timeout_s, self._ask_state(kind, payload))
        except TimeoutError:
            raise SandboxLost(f"sandbox {self._name} does not answer within {timeout_s:.1f} s") from None
        except OSError as error:
            raise SandboxLost(f"sandbox {self._name} cannot be reached: {error}") from error
        except struct.error as error:
            raise SandboxLost(f"sandbox {self._name} answers with nonsense: {error}") from error

    async def _ask_state(self, kind: bytes, payload: bytes) -> InitState:
        connection = await self._connect()
        try:
            await connection.send(kind, payload)
            async for answer, data in connection:
                if answer == b"p":
                    await connection.drain()
                    return InitState(*_STATE.unpack(data))
                self._refused(answer, data)
        finally:
            connection.close()
        raise SandboxLost(f"sandbox {self._name} closed the connection without an answer")

    async def _run(
        self,
        kind: bytes,
        payload: bytes,
        stdin: bytes | memoryview,
        deadline_s: float,
        limit: int,
        sink: Callable[[bytes], object] | None = None,
    ) -> ExecResult:
        try:
            return await _within(deadline_s, self._ask_run(kind, payload, stdin, limit, sink))
        except TimeoutError:
            raise SandboxLost(
                f"sandbox {self._name} is silent {deadline_s:.1f} s after a command was sent",
                next_step="restore it from its newest checkpoint",
            ) from None
        except OSError as error:
            raise SandboxLost(f"sandbox {self._name} broke off in the middle of a command: {error}") from error
        except struct.error as error:
            raise SandboxLost(f"sandbox {self._name} answers with nonsense: {error}") from error

    async def _ask_run(
        self,
        kind: bytes,
        payload: bytes,
        stdin: bytes | memoryview,
        limit: int,
        sink: Callable[[bytes], object] | None,
    ) -> ExecResult:
        out, err = bytearray(), bytearray()
        taken = 0
        connection = await self._connect()
        feeder: asyncio.Task[None] | None = None
        try:
            # without input, its end goes along in the same message: the answer may come, and the init close, any moment
            await connection.send(kind, payload, after=b"" if stdin or kind != b"X" else _END_OF_INPUT)
            failpoints.hit("action.sent", self._name)
            if stdin:
                feeder = asyncio.create_task(connection.feed(stdin))
            async for answer, data in connection:
                if answer == b"o" and sink is not None:
                    taken += len(data)
                    sink(data)
                elif answer == b"o":
                    out += data
                elif answer == b"e":
                    err += data
                elif answer == b"x":
                    await connection.drain()
                    return _result(data, bytes(out), bytes(err))
                else:
                    self._refused(answer, data)
                if taken + len(out) + len(err) > limit:
                    raise SandboxLost(f"the init of sandbox {self._name} sends more than it was asked for")
        finally:
            if feeder is not None:
                feeder.cancel()
                await asyncio.gather(feeder, return_exceptions=True)  # a command need not read its input
            connection.close()
        raise SandboxLost(f"sandbox {self._name} died in the middle of a command")

    def _refused(self, answer: bytes, data: bytes) -> None:
        if answer != b"E":
            raise SandboxLost(f"sandbox {self._name} answers with unknown frame {answer!r}")
        code = struct.unpack_from("<I", data)[0]
        text = data[4:].decode(errors="replace")
        if code == _STALE:
            raise StaleSandbox(f"sandbox {self._name}: {text}")
        if code == _BUSY:
            raise _Busy(f"sandbox {self._name}: {text}")
        raise SandboxError(f"sandbox {self._name} refused a request: {text}")

    async def _connect(self) -> _Connection:
        if self._folder < 0:
            raise StaleSandbox(f"this handle of sandbox {self._name} is closed")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            while True:
                try:
                    sock.connect(self._address)
                    self._check_peer(sock)
                    return _Connection(sock)
                except BlockingIOError:
                    await asyncio.sleep(0.001)  # the backlog is full
        except BaseException:
            sock.close()
            raise

    def _check_peer(self, sock: socket.socket) -> None:
        if not self._init_pid:
            return
        pid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
        if pid != self._init_pid:
            raise SandboxLost(f"in sandbox {self._name} process {pid} listens in the place of the init")


class _Connection:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()

    async def send(self, kind: bytes, payload: bytes | memoryview, after: bytes = b"") -> None:
        await self._loop.sock_sendall(self._sock, struct.pack("<I", len(payload)) + kind + payload + after)

    async def feed(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _CHUNK):
            await self.send(b"i", view[start : start + _CHUNK])
        await self._loop.sock_sendall(self._sock, _END_OF_INPUT)

    async def __aiter__(self):
        while True:
            while len(self._buffer) >= 5:
                length = int.from_bytes(self._buffer[:4], "little")
                if length > _LARGEST_FRAME:
                    raise SandboxLost(f"a frame of {length} bytes from an init, which sends at most {_LARGEST_FRAME}")
                if len(self._buffer) < 5 + length:
                    break
                kind, data = bytes(self._buffer[4:5]), bytes(self._buffer[5 : 5 + length])
                del self._buffer[: 5 + length]
                yield kind, data
            received = await self._loop.sock_recv(self._sock, _CHUNK)
            if not received:
                return
            self._buffer += received

    async def drain(self) -> None:
        """Read to the end: the init has then closed its side, and nothing of ours is left in the container."""
        try:
            while await self._loop.sock_recv(self._sock, 4096):
                pass
        except ConnectionResetError:
            pass  # closed too, with input of ours unread: the command had ended without it

    def close(self) -> None:
        self._sock.close()


async def _within(timeout_s: float, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, or `TimeoutError`.

    Time in which our own event loop stood still must not count against the sandbox: when the deadline is over, the
    answer may well have arrived without anybody having looked. So there is a second, shorter wait before giving up.
    """
    task = asyncio.ensure_future(work)
    try:
        for limit in (timeout_s, max(1.0, min(timeout_s / 2, 5.0))):
            done, _ = await asyncio.wait({task}, timeout=limit)
            if done:
                return task.result()
        raise TimeoutError
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _result(data: bytes, out: bytes, err: bytes) -> ExecResult:
    exit_code, signal, flags, dropped, wall_us = _RESULT.unpack(data)
    timed_out = bool(flags & _TIMED_OUT)
    return ExecResult(
        exit_code=None if timed_out or exit_code < 0 else exit_code,
        stdout=out,
        stderr=err,
        timed_out=timed_out,
        truncated=bool(flags & _TRUNCATED),
        wall_s=wall_us / 1e6,
        signal=signal or None,
        dropped=dropped,
        was_quiet=bool(flags & _WAS_QUIET),
        shell_ended=bool(flags & _SHELL_ENDED),
    )


def _job(fence: Fence | None, timeout_s: float, quiet_s: float, limit: int) -> bytes:
    head = b"\1" + struct.pack("<QQ", *fence) if fence is not None else b"\0"
    # 0 means "no limit" on the wire
    return head + _JOB.pack(max(1, round(timeout_s * 1000)), round(quiet_s * 1000), limit)


def _text(value: str) -> bytes:
    data = os.fsencode(value)
    if b"\0" in data:
        raise ValueError("commands, paths and variables cannot contain NUL")
    return struct.pack("<I", len(data)) + data


def _texts(values: Sequence[str]) -> bytes:
    return struct.pack("<I", len(values)) + b"".join(_text(value) for value in values)
