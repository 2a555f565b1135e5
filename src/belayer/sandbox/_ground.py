"""The ground that a container stands on, a place and a slot: made, taken from what was made ahead, and removed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from belayer.sandbox._ahead import Ahead
from belayer.sandbox._chores import Chores
from belayer.sandbox._keeper import Keeper
from belayer.sandbox._place import Place, Places
from belayer.sandbox._runtime import Runtime
from belayer.sandbox._slots import Slot, Slots
from belayer.sandbox.store import Store

REMOVAL_WAITS_S = 2.0  # at most, for restores to end


class Ground:
    """All places and slots of one run. `close` it when no container of the run is left."""

    def __init__(
        self,
        places: Places,
        store: Store,
        runtime: Runtime,
        keeper: Callable[[], Keeper],
        chores: Chores,
        busy: Callable[[], bool],
    ) -> None:
        """`busy`: are checkpoints being taken? What is made ahead waits for them."""
        self._places = places
        self._runtime = runtime
        self._chores = chores
        self._restoring = 0
        self._closed = False
        limits = places.limits if runtime.name == "native" else None  # podman makes its own cgroups
        self.slots = Slots(places.label.name, keeper, limits=limits)
        self.ahead = Ahead(places.make, self.remove, store.trees, chores, lambda: self._restoring > 0 or busy())

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Removals wait for what happens in this block."""
        self._restoring += 1
        try:
            yield
        finally:
            self._restoring -= 1

    @asynccontextmanager
    async def taken(
        self, name: str, generation: int, source: Path, checkpoint: str = ""
    ) -> AsyncIterator[tuple[Place, Slot]]:
        """A place for this generation of `name`, whose root starts as `source`, and a slot for it.

        `checkpoint`: the one whose snapshot `source` is; a place that was made ahead of it will do. When the body fails
        or is cancelled, whatever was made in the place is killed and removed.
        """
        taken = asyncio.create_task(self.slots.take())
        made = asyncio.create_task(self._place(name, generation, source, checkpoint))
        adopted = False
        try:
            place, slot = await asyncio.shield(made), await asyncio.shield(taken)
            if slot.cgroup is None:
                await asyncio.to_thread(place.cgroup.make, **self._places.limits)
            else:
                place.cgroup, adopted = slot.cgroup, True
            yield place, slot
        except BaseException:
            # also when we are being cancelled: a half-made container must not stay
            await asyncio.shield(self._let_go(taken, adopted))
            await asyncio.shield(self._abandon(made))
            raise
        await asyncio.shield(self._let_go(taken, adopted))

    async def _place(self, name: str, generation: int, source: Path, checkpoint: str) -> Place:
        place = await self.ahead.take(checkpoint) if checkpoint else None
        if place is None:
            return await asyncio.to_thread(self._prepare, name, generation, source, checkpoint)
        place.generation = generation
        return place

    def _prepare(self, name: str, generation: int, source: Path, checkpoint: str) -> Place:
        place = self._places.prepare(name, generation, source)
        self.ahead.warm(place, checkpoint)
        return place

    async def _let_go(self, taken: asyncio.Task[Slot], adopted: bool) -> None:
        slot = (await asyncio.gather(taken, return_exceptions=True))[0]
        if isinstance(slot, Slot):
            await (slot.close() if adopted else slot.discard())

    async def _abandon(self, made: asyncio.Task[Place]) -> None:
        place = (await asyncio.gather(made, return_exceptions=True))[0]
        if isinstance(place, Place):
            await asyncio.to_thread(self.remove, place)

    def remove(self, place: Place) -> None:
        """Kill what runs there and delete it. Blocking."""
        place.cgroup.kill()
        self._runtime.remove(place)
        place.remove()

    async def remove_later(self, place: Place) -> None:
        """Not beside a restore: what it waits for is what the removal keeps busy."""
        end = time.monotonic() + REMOVAL_WAITS_S
        while self._restoring and not self._closed and time.monotonic() < end:
            await asyncio.sleep(0.02)
        await self._chores.tried(self.remove, place)

    def hurry(self) -> None:
        """The run ends: removals wait for nothing any more."""
        self._closed = True

    async def close(self) -> None:
        """Remove what was made ahead."""
        await self.ahead.close()
        await self.slots.close()
