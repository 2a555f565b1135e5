"""What a run says of the retention of its journal, which works in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec

from belayer import events
from belayer.journal import Compacted


def tell_compacted(sink: Callable[[], events.EventSink]) -> Callable[[Compacted], None]:
    """What the journal's own thread calls after a pass of its retention; `sink` gives the one that listens by then."""
    loop = asyncio.get_running_loop()

    def tell(done: Compacted) -> None:
        if done.error:
            how = f"results of acknowledged rollouts were not removed from the journal: {done.error}"
            event = events.Event(kind=events.FAULT_DETECTED, subject="journal", data={"fault": "journal", "how": how})
        elif done.results:
            event = events.Event(kind=events.JOURNAL_COMPACTED, data=msgspec.to_builtins(done))
        else:
            return
        with suppress(RuntimeError):  # the loop has ended: nobody waits to hear of it
            loop.call_soon_threadsafe(lambda: sink()(event))

    return tell
