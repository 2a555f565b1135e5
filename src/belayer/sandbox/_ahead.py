"""The place of the next restore, made ahead of it: one for each sandbox, of its newest checkpoint.

A root is a snapshot, and the kernel commits a transaction of the store for each: 9 ms, and 25 where the store has to
survive a power failure (docs/decisions/0010). A restore after a death had to wait for that. Now it is done a moment
after a checkpoint was published, when nobody waits, and thrown away when the next one is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from belayer.errors import BelayerError
from belayer.sandbox._chores import Chores
from belayer.sandbox._place import Place
from belayer.sandbox._trees import Trees
from belayer.sandbox._warm import mapped, read_ahead

DELAY_S = 0.01  # whoever has waited for the checkpoint goes on first
BUSY_S = 1.0  # at most so long it waits for checkpoints and restores of others


class _Spare:
    """One that is made, or will be."""

    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = checkpoint
        self.wanted = True
        self.begun = False
        self.made: asyncio.Task[Place | None] | None = None
        self.identity = ""


class Ahead:
    """At most one place ahead for each name. Belongs to one event loop."""

    def __init__(
        self,
        prepare: Callable[[str, Path], Place],
        remove: Callable[[Place], None],
        trees: Trees,
        chores: Chores,
        busy: Callable[[], bool],
    ) -> None:
        """`prepare` makes one from (key, source), `remove` deletes it; both block. `busy`: not just now."""
        self._prepare = prepare
        self._remove = remove
        self._trees = trees
        self._chores = chores
        self._busy = busy
        self._spares: dict[str, _Spare] = {}
        self._used: dict[str, tuple[str, Callable[[], list[int]]]] = {}  # by name: checkpoint, who uses its files
        self._made = 0
        self._closed = False

    def want(self, name: str, checkpoint: str, source: Path, processes: Callable[[], list[int]]) -> None:
        """Make one of `checkpoint`, whose snapshot is `source`; what was made for `name` before is removed.

        `processes`: those of the sandbox that the checkpoint is of; the files that they use are read ahead.
        Only where a root costs the same whatever is in it. That none can be made is not said: the restore will say it.
        """
        if self._closed or not self._trees.instant:
            return
        self.drop(name)
        self._used[name] = (checkpoint, processes)
        self._made += 1
        spare = self._spares[name] = _Spare(checkpoint)
        spare.made = asyncio.create_task(self._make(spare, f"ahead-{self._made}", source, processes))

    async def take(self, checkpoint: str) -> Place | None:
        """The one of `checkpoint`, if there is one and nobody has changed it. The caller owns it."""
        name = next((name for name, spare in self._spares.items() if spare.checkpoint == checkpoint), None)
        if name is None:
            return None
        spare = self._spares.pop(name)
        place = await self._settled(spare)
        if place is None:
            return None
        try:
            same = await asyncio.to_thread(self._trees.identity, place.tree.path) == spare.identity
        except OSError:
            same = False
        if not same:
            self._chores.start(self._throw_away(place))
            return None
        return place

    def warm(self, place: Place, checkpoint: str) -> None:
        """Read ahead in a place that was made just now, as in one made ahead. Blocking."""
        for known, processes in list(self._used.values()):
            if known == checkpoint:
                with suppress(OSError):  # it helps, and no more
                    read_ahead(place.root, place.agent, mapped(processes()))

    def drop(self, name: str) -> None:
        """Remove, in the background, what was made for `name`."""
        self._used.pop(name, None)
        spare = self._spares.pop(name, None)
        if spare is not None:
            self._chores.start(self._let_go(spare))

    async def close(self) -> None:
        """Remove all, and make no more."""
        self._closed = True
        for name in list(self._spares):
            self.drop(name)
        await self._chores.end()

    async def _make(self, spare: _Spare, key: str, source: Path, processes: Callable[[], list[int]]) -> Place | None:
        await asyncio.sleep(DELAY_S)
        end = time.monotonic() + BUSY_S
        while spare.wanted and self._busy() and time.monotonic() < end:
            await asyncio.sleep(0.02)
        if not spare.wanted:
            return None
        spare.begun = True
        try:
            return await asyncio.to_thread(self._build, spare, key, source, processes)
        except (OSError, BelayerError):
            return None

    def _build(self, spare: _Spare, key: str, source: Path, processes: Callable[[], list[int]]) -> Place:
        place = self._prepare(key, source)
        try:
            spare.identity = self._trees.identity(place.tree.path)
            read_ahead(place.root, place.agent, mapped(processes()))
        except BaseException:
            self._remove(place)
            raise
        return place

    async def _settled(self, spare: _Spare) -> Place | None:
        """What became of it; not begun, it never will be."""
        spare.wanted = False
        if not spare.begun or spare.made is None:
            return None
        return await asyncio.shield(spare.made)

    async def _let_go(self, spare: _Spare) -> None:
        place = await self._settled(spare)
        if place is not None:
            await self._throw_away(place)

    async def _throw_away(self, place: Place) -> None:
        end = time.monotonic() + BUSY_S
        while self._busy() and not self._closed and time.monotonic() < end:
            await asyncio.sleep(0.02)
        with suppress(OSError):  # it lies among the roots of this run, which are removed with it
            await asyncio.to_thread(self._remove, place)
