"""Checkpoints under inference bubbles: begun as the model's turn begins, settled before the next action.

A checkpoint that did not publish does not exist: whatever goes wrong here abandons it, and the older one still protects
the rollout.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from belayer import events
from belayer.checkpoint.policy import Policy, Situation
from belayer.errors import CheckpointRefused, SandboxLost, StaleSandbox, StorageFull
from belayer.faults import failpoints
from belayer.journal import Call, Journal
from belayer.journal.records import CheckpointPublished, CheckpointSkipped
from belayer.recovery.actions import from_journal
from belayer.sandbox import Sandbox


class BubbleCheckpoint:
    """The pending checkpoint of one rollout, if there is one.

    `examine(sandbox)` says what is wrong with it, `lose(sandbox, why)` gives it up, `dumping()` counts running dumps.
    """

    def __init__(
        self,
        rollout: str,
        attempt: int,
        *,
        journal: Journal,
        policy: Policy,
        dumping: Callable[[], int],
        examine: Callable[[Sandbox], Awaitable[str | None]],
        lose: Callable[[Sandbox, str], None],
        sink: events.EventSink,
    ) -> None:
        self.rollout, self.attempt = rollout, attempt
        self._journal = journal
        self._history = journal.history(rollout)
        self._policy = policy
        self._dumping = dumping
        self._examine = examine
        self._lose = lose
        self._sink = sink
        self._pending: asyncio.Task[dict[str, Any] | None] | None = None
        self._published_at = time.monotonic()

    def begin(self, sandbox: Sandbox, *, restore_s: float, must: str = "") -> None:
        """Start one, if the policy finds that it pays; `restore_s` is what bringing a sandbox back takes.

        `must` says why one is taken whatever the policy finds.
        """
        if self._pending is not None:
            return
        newest = self._history.checkpoints[-1].k if self._history.checkpoints else 0
        since = self._history.actions()[newest:]
        redo_s = restore_s + sum(_wall(call) for call in since)
        situation = Situation(
            actions_since=len(since),
            redo_s=redo_s,
            restore_s=restore_s,
            since_s=time.monotonic() - self._published_at,
            running=self._dumping(),
        )
        decision = self._policy.decide(situation)
        if decision.take or must:
            self._pending = asyncio.create_task(
                self._take(sandbox, must or decision.why), name=f"checkpoint {self.rollout}"
            )
        elif since:
            self._skip(len(self._history.actions()), decision.why)

    async def settle(self) -> None:
        """Wait until the pending one is published or abandoned (invariant 1)."""
        if self._pending is None:
            return
        task, self._pending = self._pending, None
        begun = time.perf_counter()
        was_done = task.done()
        details = await task
        if details is not None:
            exposed_s = 0.0 if was_done else time.perf_counter() - begun
            self._emit(events.CHECKPOINT, exposed_s=exposed_s, **details)

    async def cancel(self) -> None:
        if self._pending is not None and not self._pending.done():
            self._pending.cancel()
            await asyncio.gather(self._pending, return_exceptions=True)

    async def _take(self, sandbox: Sandbox, why: str) -> dict[str, Any] | None:
        """Details of the checkpoint for the timeline, or None if it was abandoned."""
        k = len(self._history.actions())
        context_hash = self._history.context_hash(k)
        started, begun = time.time(), time.perf_counter()
        failpoints.hit("checkpoint.begin", self.rollout)
        try:
            manifest = await sandbox.checkpoint(
                action=k, context_hash=context_hash, rollout=self.rollout, attempt=self.attempt
            )
        except (CheckpointRefused, StorageFull, SandboxLost, StaleSandbox) as error:
            self._skip(k, f"{type(error).__name__}: {error.what}", abandoned=True)
            self._emit(events.FAULT_DETECTED, fault="checkpoint", how=error.what)
            return None
        # damage from outside that came before the snapshot is in it, and a restore could not tell it from the agent's
        # own doing; damage does not heal, so a healthy sandbox now means a healthy snapshot
        problem = await self._examine(sandbox)
        if problem:
            self._skip(k, f"not trusted: {problem}", abandoned=True)
            self._lose(sandbox, problem)
            return None
        wall_s = time.perf_counter() - begun
        self._policy.cost(wall_s)
        self._published_at = time.monotonic()
        failpoints.hit("checkpoint.journal.before", self.rollout)
        self._journal.record(
            CheckpointPublished(
                rollout=self.rollout,
                attempt=self.attempt,
                k=k,
                g=sandbox.generation,
                id=manifest.id,
                level=manifest.level,
                context_hash=context_hash,
                why=why,
            )
        )
        failpoints.hit("checkpoint.journal.after", self.rollout)
        return {
            "action": k,
            "id": manifest.id,
            "level": manifest.level,
            "start": started,
            "wall_s": wall_s,
            "frozen_s": manifest.timings.frozen_s,
            "bytes": manifest.image_bytes,
        }

    def _skip(self, k: int, why: str, *, abandoned: bool = False) -> None:
        self._journal.record(CheckpointSkipped(rollout=self.rollout, attempt=self.attempt, k=k, why=why))
        self._emit(events.CHECKPOINT_SKIPPED, action=k, abandoned=abandoned, why=why)

    def _emit(self, kind: str, **data: Any) -> None:
        self._sink(events.Event(kind=kind, subject=self.rollout, data=data))


def _wall(call: Call) -> float:
    return getattr(from_journal(call.result), "wall_s", 0.0)
