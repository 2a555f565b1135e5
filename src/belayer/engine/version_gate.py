"""Which policy versions may meet in one trajectory, when weights change while trajectories are being made.

    allow           requests in flight go on with the new weights; each token says which version made it
    finish_on_old   the update waits until every open trajectory has ended; new trajectories wait for the update
    restart_turn    a turn in flight is given up and generated again with the new weights; finished turns stay

The gate only lets in and holds back; writing and switching weights is the engine's business.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from belayer.config import VersionPolicy
from belayer.errors import WeightsError


class VersionGate:
    """One per engine. A request without the name of a trajectory is a trajectory of its own."""

    def __init__(self, policy: VersionPolicy) -> None:
        self.policy = policy
        self._open: Counter[str] = Counter()  # trajectories that have begun, and their requests in flight
        self._closed = False  # an update is under way that new turns must not meet
        self._changed = asyncio.Condition()

    async def enter(self, trajectory: str) -> None:
        """Begin a request of `trajectory`; waits while an update of the weights may not be met."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._closed or self._may_finish(trajectory))
            self._open[trajectory] += 1

    def _may_finish(self, trajectory: str) -> bool:
        return self.policy == "finish_on_old" and trajectory in self._open

    async def leave(self, trajectory: str, *, ended: bool) -> None:
        """A request of `trajectory` is over; `ended`: and so is the trajectory."""
        async with self._changed:
            self._open[trajectory] -= 1
            if ended and self._open[trajectory] <= 0:
                del self._open[trajectory]
            self._changed.notify_all()

    async def end(self, trajectory: str) -> None:
        """`trajectory` makes no more requests; unknown ones are ignored."""
        async with self._changed:
            self._open.pop(trajectory, None)
            self._changed.notify_all()

    @asynccontextmanager
    async def update(self, deadline: float) -> AsyncIterator[None]:
        """Hold back what the policy says, for the time of an update. `deadline` is on the event loop's clock.

        Raises `WeightsError` when trajectories that must finish first do not do so in time.
        """
        if self.policy == "allow":
            yield
            return
        self._closed = True
        try:
            if self.policy == "finish_on_old":
                await self._drained(deadline)
            yield
        finally:
            self._closed = False
            async with self._changed:
                self._changed.notify_all()

    async def _drained(self, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline), self._changed:
                await self._changed.wait_for(lambda: not self._open)
        except TimeoutError:
            names = ", ".join(sorted(self._open)[:5])
            raise WeightsError(
                f"{len(self._open)} trajectories did not end before the update's deadline ({names})",
                next_step="end them (Engine.end_trajectory), or give engine.update_timeout_s more time",
            ) from None
