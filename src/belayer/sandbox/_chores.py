"""What is done in the background of one run's sandboxes, and waited for at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from belayer import events as names
from belayer.events import Event, EventSink


class Chores:
    """Background work that nobody waits for just now. Belongs to one event loop."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Let it run."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def do(self, work: Callable[..., object], *args: Any) -> None:
        """Let it run in a thread; a leftover of it is an event."""
        self.start(self.tried(work, *args))

    async def tried(self, work: Callable[..., object], *args: Any) -> None:
        """In a thread. What fails is found again by its label; it must not fail a rollout that is already over."""
        try:
            await asyncio.to_thread(work, *args)
        except OSError as error:
            data = {"fault": "clean-up", "how": str(error)}
            self._sink(Event(kind=names.FAULT_DETECTED, subject="sandbox", data=data))

    async def done(self) -> None:
        """Wait for what is under way just now."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def end(self) -> None:
        """Wait until nothing is under way any more."""
        while self._tasks:
            await self.done()
