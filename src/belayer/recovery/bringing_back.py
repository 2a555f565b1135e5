"""A sandbox with the first actions of a rollout: from a checkpoint or the image, and the rest of them done anew."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from belayer import events
from belayer.errors import CheckpointDamaged, RestoreFailed, SandboxLost, StaleSandbox
from belayer.faults import failpoints
from belayer.journal import History
from belayer.recovery.actions import INTERRUPTED, action_of, observed, perform
from belayer.recovery.states import environment_name
from belayer.sandbox import Sandbox, Sandboxes


async def examine(sandbox: Sandbox) -> str | None:
    """What is wrong with the sandbox, if anything; a sandbox that cannot be asked is wrong too."""
    if sandbox.dead:
        return "the sandbox's init died"
    try:
        return await sandbox.healthy()
    except (SandboxLost, StaleSandbox) as error:
        return error.what


class BringingBack:
    """The steps of a recovery for one rollout. `emit` is given the kind of an event and its data."""

    def __init__(
        self,
        history: History,
        attempt: int,
        *,
        sandboxes: Sandboxes,
        image: str | None,
        timeout_s: float,
        emit: Callable[..., Any],
    ) -> None:
        self._history = history
        self._attempt = attempt
        self._name = environment_name(history.rollout, attempt)
        self._sandboxes = sandboxes
        self._image = image
        self._timeout_s = timeout_s
        self._emit = emit

    async def sandbox(self, target: int, fresh: bool) -> tuple[str, int, Sandbox]:
        """(checkpoint, actions it holds, sandbox): from the newest usable checkpoint, else ("") from the image.

        `fresh`: there cannot be one. Raises `SandboxLost`, `SandboxUnavailable`.
        """
        if not fresh:
            for checkpoint in reversed(self._history.checkpoints):
                if checkpoint.k > target or checkpoint.context_hash != self._history.context_hash(checkpoint.k):
                    continue
                try:
                    failpoints.hit("restore.begin", self._history.rollout)
                    async with asyncio.timeout(self._timeout_s):
                        sandbox = await self._sandboxes.restore(self._name, checkpoint.id)
                    return checkpoint.id, checkpoint.k, sandbox
                except (CheckpointDamaged, RestoreFailed) as error:
                    self._emit(events.FAULT_DETECTED, fault="checkpoint", how=error.what, checkpoint=checkpoint.id)
                except TimeoutError:
                    self._emit(events.FAULT_DETECTED, fault="checkpoint", how="restore passed its deadline")
            failpoints.hit("restore.fresh", self._history.rollout)
            await self._sandboxes.discard(self._name)
        try:
            async with asyncio.timeout(self._timeout_s):
                sandbox = await self._sandboxes.create(self._name, image=self._image)
        except TimeoutError:
            raise SandboxLost(f"a new container took more than {self._timeout_s:.0f} s") from None
        return "", 0, sandbox

    async def replay(self, sandbox: Sandbox, base: int, target: int) -> int | None:
        """Apply actions base+1 … target; the number of the first one whose observation differs, or None."""
        failpoints.hit("replay.begin", self._history.rollout)
        for call in self._history.actions()[base:target]:
            if call.observed == INTERRUPTED:
                return call.k
            result = await perform(sandbox, action_of(call.asked), (self._attempt, sandbox.generation))
            failpoints.hit("replay.action", self._history.rollout)
            if observed(result) != call.observed:
                return call.k
        return None

    async def settle_damage(self, sandbox: Sandbox, base: int, target: int) -> None:
        """System folders that a replayed action destroyed are its outcome again; any other damage is a failure."""
        problem = await examine(sandbox)
        if problem is None:
            return
        if sandbox.dead or not any(call.damage for call in self._history.actions()[base:target]):
            raise SandboxLost(problem)
        sandbox.accept()
