"""Actions as data: what a rollout asked of its sandbox, such that it can be asked again from the journal alone."""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
from pathlib import Path
from typing import Any

import msgspec

from belayer.errors import JournalCorrupt, SandboxLost
from belayer.journal import result_gone
from belayer.sandbox import ExecResult, Sandbox


class Exec(msgspec.Struct, frozen=True, kw_only=True, tag="exec", omit_defaults=True):
    """One command in a fresh process."""

    command: str | list[str]
    timeout_s: float | None = None
    cwd: str | None = None
    env: dict[str, str] | None = None
    stdin: bytes = b""


class Shell(msgspec.Struct, frozen=True, kw_only=True, tag="shell", omit_defaults=True):
    """One command in the persistent session."""

    command: str
    timeout_s: float | None = None


class Read(msgspec.Struct, frozen=True, kw_only=True, tag="read"):
    path: str


class Write(msgspec.Struct, frozen=True, kw_only=True, tag="write", omit_defaults=True):
    path: str
    data: bytes
    mode: int = 0o644


class Exists(msgspec.Struct, frozen=True, kw_only=True, tag="exists"):
    path: str


class Upload(msgspec.Struct, frozen=True, kw_only=True, tag="upload"):
    """A tar archive that the run keeps on the host, unpacked into a folder. `digest`: of the archive, SHA-256."""

    path: str
    archive: str
    digest: str


class Failed(msgspec.Struct, frozen=True):
    """Result of a file call that the agent's file system refuses (no such file, a folder, …)."""

    path: str
    errno: int


class Interrupted(msgspec.Struct, frozen=True):
    """Result of an action that was cut off by who asked for it."""


Action = Exec | Shell | Read | Write | Exists | Upload

# what an action observed that was cut off: equal to nothing that a replay could observe
INTERRUPTED = "interrupted"

_encode = msgspec.json.Encoder(order="deterministic").encode
_decode = msgspec.json.Decoder(Action).decode


def asked(action: Action) -> str:
    """The canonical text of an action: equal text means the same action."""
    return _encode(action).decode()


def action_of(text: str) -> Action:
    return _decode(text)


async def perform(sandbox: Sandbox, action: Action, fence: tuple[int, int]) -> Any:
    """Do it. Returns the live result; raises `SandboxLost` where the environment failed."""
    match action:
        case Exec():
            return await sandbox.exec(
                action.command,
                timeout_s=action.timeout_s,
                cwd=action.cwd,
                env=action.env,
                stdin=action.stdin,
                fence=fence,
            )
        case Shell():
            return await sandbox.shell(action.command, timeout_s=action.timeout_s, fence=fence)
        case Read() | Write() | Exists() | Upload():
            try:
                return await _file_call(sandbox, action)
            except (ConnectionError, TimeoutError) as error:
                raise SandboxLost(f"sandbox {sandbox.name} broke off in a file call: {error}") from error
            except OSError as error:
                return Failed(action.path, error.errno or errno.EIO)


async def perform_until(
    sandbox: Sandbox, action: Action, fence: tuple[int, int], interrupt: asyncio.Event | None
) -> Any:
    """`perform`, or a result that says `interrupted` when `interrupt` is set before it is done."""
    if interrupt is None:
        return await perform(sandbox, action, fence)
    working = asyncio.ensure_future(perform(sandbox, action, fence))
    told = asyncio.ensure_future(interrupt.wait())
    try:
        await asyncio.wait((working, told), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()  # which kills what the command started
            await asyncio.gather(working, return_exceptions=True)
            if working.cancelled():
                return Interrupted()
        return working.result()
    finally:
        working.cancel()
        told.cancel()
        await asyncio.gather(working, told, return_exceptions=True)


async def _file_call(sandbox: Sandbox, action: Read | Write | Exists | Upload) -> bytes | bool | None:
    match action:
        case Read():
            return await sandbox.read(action.path)
        case Write():
            return await sandbox.write(action.path, action.data, mode=action.mode)
        case Exists():
            return await sandbox.exists(action.path)
        case Upload():
            if await asyncio.to_thread(file_digest, action.archive) != action.digest:
                raise JournalCorrupt(f"{action.archive} is not what was uploaded", next_step="restore the run's folder")
            await sandbox.upload_tar(action.archive, action.path)


def to_journal(result: Any) -> Any:
    """A result as plain MessagePack-able data."""
    if isinstance(result, ExecResult):
        return {"exec": msgspec.to_builtins(result, builtin_types=(bytes,))}
    if isinstance(result, Failed):
        return {"failed": [result.path, result.errno]}
    if isinstance(result, Interrupted):
        return {"interrupted": True}
    return {"value": result}


def from_journal(data: Any) -> Any:
    """The inverse of `to_journal`; a `Gone` where retention took the result away."""
    if (gone := result_gone(data)) is not None:
        return gone
    if "exec" in data:
        return msgspec.convert(data["exec"], ExecResult, builtin_types=(bytes,))
    if "failed" in data:
        return Failed(*data["failed"])
    if "interrupted" in data:
        return Interrupted()
    return data["value"]


def observed(result: Any) -> str:
    """Digest of everything in a result that the agent can see, but not of how long it took.

    Nor of the limits that were near when it failed: what the agent sees of those is in the output.
    """
    if isinstance(result, Interrupted):
        return INTERRUPTED
    data = to_journal(result)
    if "exec" in data:
        data = {k: v for k, v in data["exec"].items() if k not in ("wall_s", "process_limit", "disk_full")}
        data["oom"] = False  # in its place, so that the digest of other results is what it always was
    text = repr(sorted(data.items())).encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def describe(action: Action, limit: int = 120) -> str:
    """One short line for people."""
    match action:
        case Exec() | Shell():
            command = action.command if isinstance(action.command, str) else " ".join(action.command)
            text = f"{type(action).__name__.lower()}: {command}"
        case Write():
            text = f"write {action.path}: {base64.b85encode(action.data[:24]).decode()}… ({len(action.data)} bytes)"
        case _:
            text = f"{type(action).__name__.lower()} {action.path}"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def host_file(path: str | Path) -> bytes:
    """Content of a file on the host, for `upload`."""
    return Path(path).read_bytes()


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file on the host."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
