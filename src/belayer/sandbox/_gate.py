"""A lock for many users at once, or for one that has it alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Many users, or one that has it alone; who wants it alone holds newcomers back."""

    def __init__(self) -> None:
        self._users = 0
        self._alone = asyncio.Lock()
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        async with self._alone:
            self._users += 1
            self._empty.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._empty.set()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        async with self._alone:
            await self._empty.wait()
            yield
