"""Belayer's own sandboxes as a runtime to be tried."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from itertools import count

from belayer.errors import CheckpointRefused
from belayer.sandbox import Sandbox, Sandboxes

from .protocol import Refused


class OwnBox:
    def __init__(self, sandbox: Sandbox, manager: Sandboxes) -> None:
        self.sandbox = sandbox
        self._manager = manager

    async def exec(self, argv: Sequence[str], *, timeout_s: float = 60.0) -> tuple[int, bytes]:
        result = await self.sandbox.exec(argv, timeout_s=timeout_s)
        code = -1 if result.exit_code is None else result.exit_code
        return code, result.stdout + (result.stderr if code else b"")

    async def shell(self, command: str) -> tuple[int, bytes]:
        result = await self.sandbox.shell(command, timeout_s=30.0)
        return (-1 if result.exit_code is None else result.exit_code), result.stdout

    async def write(self, path: str, data: bytes) -> None:
        await self.sandbox.write(path, data)

    async def checkpoint(self) -> str:
        try:
            return (await self.sandbox.checkpoint(action=0)).id
        except CheckpointRefused as error:
            raise Refused(error.what) from error

    async def kill(self) -> None:
        dead = asyncio.Event()
        self.sandbox.on_death(dead.set)
        os.kill(self.sandbox.init_pid, signal.SIGKILL)
        await asyncio.wait_for(dead.wait(), 10)

    async def restore(self, token: str) -> OwnBox:
        return OwnBox(await self.sandbox.restore(token), self._manager)

    async def fork(self) -> OwnBox:
        return OwnBox((await self.sandbox.fork(1))[0], self._manager)

    async def close(self) -> None:
        await self._manager.discard(self.sandbox.name)


class OwnRuntime:
    name = "belayer"
    level = "full"

    def __init__(self, manager: Sandboxes) -> None:
        self._manager = manager
        self._numbers = count(1)

    async def create(self) -> OwnBox:
        return OwnBox(await self._manager.create(f"conformance-{next(self._numbers)}"), self._manager)
