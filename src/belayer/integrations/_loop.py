"""An event loop in a thread of its own, so that sandboxes serve callers of any kind.

Sandboxes belong to one event loop. Harnesses have loops that come and go, several of them, or none; here callers on
other loops await, and callers without one block, while the work is done on this loop.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")
_CLOSE_DEADLINE_S = 60.0


class LoopThread:
    """A running event loop. `close` ends it; what still runs on it is cancelled then."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name=name, daemon=True)
        self._thread.start()
        started.wait()

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(started.set)
        self._loop.run_forever()

    def block(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of `work`, for callers that may block. Ctrl-C meanwhile cancels it."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a blocking call from the loop that would have to answer it")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of `work`, for callers on any event loop. Cancelling the caller cancels it."""
        if asyncio.get_running_loop() is self._loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def call(self, function: Callable[[], object]) -> None:
        """Call `function` on the loop, soon."""
        self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """End the loop and its thread. Harmless when done twice."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(_CLOSE_DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_DEADLINE_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def before_exit(function: Callable[[], object]) -> None:
    """Call `function` when the interpreter ends, while threads can still be started.

    `atexit` is too late for that: thread pools refuse work by then.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is None:
        atexit.register(function)
    else:
        import concurrent.futures.thread  # its own hook must be older than ours: they are called newest first

        _ = concurrent.futures.thread
        register(function)
