"""The host's end of native/gate.c: called while podman's runtime has a container frozen."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from belayer.sandbox import criu


class Gate:
    """What happened at the gate: whether its second stop was reached, how long the work took, and how it failed."""

    def __init__(
        self, programs: Path, before_images: Callable[[], None], while_frozen: Callable[[], Awaitable[None]]
    ) -> None:
        self.programs = programs  # a folder with a `criu` that stops at this gate
        self.reached = False
        self.seconds = 0.0
        self.failure: BaseException | None = None
        self._before_images = before_images
        self._while_frozen = while_frozen

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One stop at the gate."""
        try:
            stop = await reader.read(1)
            try:
                if stop == b"f":
                    await asyncio.to_thread(self._before_images)
                elif stop == b"d":
                    self.reached = True
                    begun = time.perf_counter()
                    await self._while_frozen()
                    self.seconds = time.perf_counter() - begun
            except BaseException as error:
                self.failure = error
            writer.write(b"k" if self.failure is None else b"n")
            await writer.drain()
        finally:
            writer.close()


@asynccontextmanager
async def gate(
    program: Path,
    folder: Path,
    address: Path,
    *,
    before_images: Callable[[], None],
    while_frozen: Callable[[], Awaitable[None]],
) -> AsyncIterator[Gate]:
    """A gate for the length of a block: `folder` for its program, `address` for its socket; both are removed again.

    `before_images` is called in a thread when all is frozen, `while_frozen` is awaited when the images are complete.
    If one raises, the dump fails, the processes go on, and `failure` says why.
    """
    folder.mkdir()
    server = None
    try:
        found = Gate(folder, before_images, while_frozen)
        words = [str(program), "gate", str(address), str(criu.find_criu())]
        script = folder / "criu"
        script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        script.chmod(0o700)
        server = await asyncio.start_unix_server(found.serve, path=address)
        yield found
    finally:
        if server is not None:
            server.close()
        address.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
