"""Ending tasks whose code is not ours."""

from __future__ import annotations

import asyncio

END_S = 60.0  # a rollout that was cancelled has so long to end


async def end(tasks: set[asyncio.Task[None]]) -> None:
    """Cancel them. A function that does not let itself be cancelled is left behind: its next call fails."""
    for task in tasks:
        task.cancel()
    if tasks:
        ended, _ = await asyncio.wait(tasks, timeout=END_S)
        for task in ended:
            if not task.cancelled():
                task.exception()  # seen already, or of no interest any more
