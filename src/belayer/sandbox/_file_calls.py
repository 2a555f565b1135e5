"""Files of a sandbox: read, write, and copy in and out. Part of `Sandbox`."""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import BinaryIO

from belayer.errors import SandboxError
from belayer.sandbox import _copying
from belayer.sandbox._copying import Copied
from belayer.sandbox._session import ExecResult, Session

GRACE_S = 5.0  # silence past a command's own timeout after which the sandbox counts as lost
FILE_TIMEOUT_S = 60.0
COPY_TIMEOUT_S = 600.0
FILE_LIMIT = 1 << 30
_READING = ("read", "stat", "pack")  # done by the init's own code, which changes nothing


class FileCalls:
    """What a sandbox can be asked about its files. Every path is resolved inside the container, and only there."""

    name: str
    session: Session

    def _in_use(self, *, changes: bool = True) -> AbstractAsyncContextManager[None]:
        raise NotImplementedError

    async def read(self, path: str) -> bytes:
        """Content of a regular file. Raises the `OSError` that the container saw (`FileNotFoundError` …)."""
        result = await self._file("read", path)
        if result.truncated:
            raise SandboxError(f"{path} in sandbox {self.name} is larger than {FILE_LIMIT >> 20} MB")
        return result.stdout

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file, making missing folders. Raises the `OSError` that the container saw."""
        await self._file("write", path, f"{mode:o}", stdin=data)

    async def exists(self, path: str) -> bool:
        """Is there anything at `path`?"""
        try:
            await self._file("stat", path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    async def upload(self, host_path: str | Path, path: str, *, limit_bytes: int = FILE_LIMIT) -> Copied:
        """Copy a file or a whole folder of the host to `path` in the sandbox, with permission bits.

        Links are copied as links and none is followed, neither here nor there. Raises `SandboxError` when it is larger
        than `limit_bytes`, and the `OSError` that the host or the container saw.
        """
        source = Path(host_path)
        if source.is_dir():
            return await self._take_in(lambda out: _copying.write_folder(source, out, limit_bytes), path)
        if source.stat().st_size > limit_bytes:
            raise SandboxError(f"{source} is larger than {limit_bytes >> 20} MB", next_step="allow more: limit_bytes")
        data = await asyncio.to_thread(source.read_bytes)
        await self.write(path, data, mode=source.stat().st_mode & 0o777)
        return Copied(1, len(data))

    async def upload_tar(self, archive: str | Path, path: str, *, limit_bytes: int = FILE_LIMIT) -> Copied:
        """Unpack a tar archive of the host (plain, gzip, bzip2 or xz) into the folder `path` of the sandbox.

        Raises `SandboxError` for an archive with paths that lead out of that folder, or larger than `limit_bytes`.
        """

        def write(out: BinaryIO) -> Copied:
            with open(archive, "rb") as file:
                return _copying.write_archive(file, out, limit_bytes)

        return await self._take_in(write, path)

    async def download(self, path: str, host_path: str | Path, *, limit_bytes: int = FILE_LIMIT) -> Copied:
        """Copy a file or a whole folder of the sandbox to `host_path`, which appears when it is complete.

        A folder goes to a path that does not exist yet or is an empty folder. Of links only those are made that stay
        inside it. Raises the `OSError` that the container saw (EFBIG: larger than `limit_bytes`), or the host's.
        """
        with tempfile.TemporaryFile() as stream:
            await self._bring_out(path, stream, limit_bytes)
            return await asyncio.to_thread(_copying.read_into, stream, Path(host_path).absolute(), limit_bytes)

    async def download_tar(self, path: str, host_file: str | Path, *, limit_bytes: int = FILE_LIMIT) -> Copied:
        """Write a folder (or a file) of the sandbox as an uncompressed tar archive. Raises as `download`."""
        with tempfile.TemporaryFile() as stream:
            await self._bring_out(path, stream, limit_bytes)
            with open(host_file, "wb") as out:
                return await asyncio.to_thread(_copying.read_as_archive, stream, out, limit_bytes)

    async def _take_in(self, write: Callable[[BinaryIO], Copied], path: str) -> Copied:
        with tempfile.TemporaryFile() as stream:
            copied = await asyncio.to_thread(write, stream)
            stream.flush()
            data = memoryview(mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ))
            await self._file("unpack", path, stdin=data, timeout_s=COPY_TIMEOUT_S)
            return copied

    async def _bring_out(self, path: str, stream: BinaryIO, limit: int) -> None:
        room = limit + _copying.STREAM_OVERHEAD
        counts = (str(limit), str(_copying.MOST_ENTRIES))
        result = await self._file("pack", path, *counts, sink=stream.write, limit=room, timeout_s=COPY_TIMEOUT_S)
        if result.truncated:
            raise SandboxError(f"{path} in sandbox {self.name} is larger than {limit >> 20} MB")
        stream.flush()
        stream.seek(0)

    async def _file(
        self,
        action: str,
        path: str,
        *more: str,
        stdin: bytes | memoryview = b"",
        sink: Callable[[bytes], object] | None = None,
        limit: int = FILE_LIMIT,
        timeout_s: float = FILE_TIMEOUT_S,
    ) -> ExecResult:
        if not path.startswith("/"):
            path = f"/root/{path}"
        async with self._in_use(changes=action not in _READING):
            result = await self.session.exec(
                [action, path, *more],
                cwd="/",
                env={},
                timeout_s=timeout_s,
                grace_s=GRACE_S,
                limit=limit,
                stdin=stdin,
                builtin=True,
                sink=sink,
            )
        if result.timed_out or result.signal or result.exit_code is None:
            raise SandboxError(f"{action} {path} in sandbox {self.name} did not finish: {result.text or result.signal}")
        if result.exit_code:
            raise OSError(result.exit_code, os.strerror(result.exit_code), path)
        return result
