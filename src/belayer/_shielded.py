"""Work that goes to its end although whoever waits for it is cancelled."""

from __future__ import annotations

import asyncio
from typing import TypeVar

Outcome = TypeVar("Outcome")


async def shielded(work: asyncio.Future[Outcome]) -> Outcome:
    """The outcome of `work`, which goes on when the caller is cancelled.

    Its error is raised here. After a cancellation nobody is here to hear it, and asyncio would print it as one that was
    never retrieved, with a traceback, whenever `work` is collected. So use this only where the caller's withdrawal is
    all that there is to say: a failure that others have to know of is told by `work` itself.
    """
    work.add_done_callback(heard)
    return await asyncio.shield(work)


def heard(work: asyncio.Future[Outcome]) -> None:
    """As a done callback: whoever awaits `work` sees its error, and where nobody does it is not printed either."""
    if not work.cancelled():
        work.exception()
