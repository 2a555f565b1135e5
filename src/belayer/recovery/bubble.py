"""Checkpoints under inference bubbles: begun as the model's turn begins, settled before the next action.

A checkpoint that did not publish does not exist: whatever goes wrong here abandons it, and the older one still protects
the rollout. A pending one is always in one of these states:

    HELD       it waits for a burst of memory to pass, no longer than it must to fit under the bubble
    QUEUED     it waits for its turn among the dumps of this host
    DUMPING    it has begun, and ends by itself
    DONE       published or not, and nobody has asked yet

When the reply arrives and it has not begun (HELD, QUEUED), everything it takes from here on is waited for. The policy
is asked again with that knowledge: either it goes first on this host (*promoted*), or it is given up (*abandoned*) and
the next action goes at once. Forbidden: DUMPING → abandoned.

When it has waited and its turn comes within the bubble, the policy is asked again as well: what is left of the bubble
is shorter than it was, and others may be dumping now.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from belayer import events
from belayer.checkpoint.moment import Moment
from belayer.checkpoint.policy import Policy, Situation
from belayer.checkpoint.turns import URGENT_PATIENCE_S, Turn
from belayer.errors import CheckpointAbandoned, CheckpointRefused, SandboxLost, StaleSandbox, StorageFull
from belayer.faults import failpoints
from belayer.journal import Call, Journal
from belayer.journal.records import CheckpointPublished, CheckpointSkipped, PolicyChanged
from belayer.recovery.actions import from_journal
from belayer.sandbox import Sandbox


class BubbleState(enum.Enum):
    HELD = "held"
    QUEUED = "queued"
    DUMPING = "dumping"
    DONE = "done"


ASK_AGAIN_S = 0.02  # so much of the bubble may pass before the decision is an old one


class _Pending:
    def __init__(self, situation: Situation, why: str, *, must: bool, at: float) -> None:
        self.situation = situation
        self.why = why
        self.must = must
        self.at = at
        self.held = True
        self.turn = Turn()
        self.reply = asyncio.Event()
        self.given_up = ""
        self.task: asyncio.Task[dict[str, Any] | None]

    @property
    def state(self) -> BubbleState:
        if self.task.done():
            return BubbleState.DONE
        if not self.turn.open:
            return BubbleState.DUMPING
        return BubbleState.HELD if self.held else BubbleState.QUEUED


async def reply_within(reply: asyncio.Event, seconds: float) -> None:
    """Wait until the reply is here, at most so long."""
    try:
        async with asyncio.timeout(seconds):
            await reply.wait()
    except TimeoutError:
        pass


class BubbleCheckpoint:
    """The pending checkpoint of one rollout, if there is one.

    `examine(sandbox)` says what is wrong with it, `lose(sandbox, why)` gives it up, `dumping()` counts running dumps.
    `clock` and `pause(reply, seconds)`, which waits for a reply but not longer, are there for tests.
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
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[asyncio.Event, float], Awaitable[None]] = reply_within,
    ) -> None:
        self.rollout, self.attempt = rollout, attempt
        self._journal = journal
        self._history = journal.history(rollout)
        self._policy = policy
        self._decides = policy.name
        self._dumping = dumping
        self._examine = examine
        self._lose = lose
        self._sink = sink
        self._clock = clock
        self._pause = pause
        self._moment = Moment()
        self._pending: _Pending | None = None
        self._published_at = clock()

    @property
    def state(self) -> BubbleState | None:
        """Of the pending checkpoint; None: there is none."""
        return self._pending.state if self._pending is not None else None

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
            since_s=self._clock() - self._published_at,
            nbytes=sandbox.resident_bytes(),
        )
        decision = self._policy.decide(situation)
        self._tell_policy()
        if decision.take or must:
            pending = _Pending(situation, must or decision.why, must=bool(must), at=self._clock())
            if must:
                pending.turn.promote()
            else:
                pending.turn.wanted = lambda beside: self._still_wanted(pending, beside)
            pending.task = asyncio.create_task(self._take(sandbox, pending), name=f"checkpoint {self.rollout}")
            self._pending = pending
        elif since:
            self._skip(len(self._history.actions()), decision.why)

    def bubble_over(self) -> None:
        """The reply is here. One that has not begun goes first now, or is given up."""
        pending = self._pending
        if pending is None or pending.reply.is_set():
            return
        pending.reply.set()
        if pending.must or not pending.turn.open or pending.task.done():
            return
        after_s = self._clock() - pending.at
        running, queue = self._dumping(), pending.turn.ahead()
        # who has waited for other runs so long will probably go on to; promoted, it does not for ever
        wait_s = 0.0 if pending.held or running else min(after_s, URGENT_PATIENCE_S)
        late = msgspec.structs.replace(pending.situation, bubble_over=True, wait_s=wait_s, queue=queue, running=running)
        decision = self._policy.decide(late)
        self._tell_policy()
        said = f"it had not begun when the reply came after {after_s:.3f} s; {decision.why}"
        if decision.take:
            pending.turn.promote()
            pending.why += f"; promoted: {said}"
        else:
            pending.given_up = f"abandoned: {said}; before: {pending.why}"
            pending.turn.abandon()

    def _still_wanted(self, pending: _Pending, beside: int) -> bool:
        """Its turn has come. Does it still pay, with what is left of the bubble and so many others dumping?"""
        passed_s = self._clock() - pending.at
        if not beside and passed_s < ASK_AGAIN_S:
            return True
        now = msgspec.structs.replace(pending.situation, passed_s=passed_s, running=beside)
        decision = self._policy.decide(now)
        if not decision.take and not beside:  # else it waits until it is alone
            pending.given_up = f"abandoned: its turn came after {passed_s:.3f} s; {decision.why}; before: {pending.why}"
        return decision.take

    async def settle(self) -> None:
        """Wait until the pending one is published or abandoned (invariant 1)."""
        if self._pending is None:
            return
        self.bubble_over()
        pending, self._pending = self._pending, None
        begun = time.perf_counter()
        was_done = pending.task.done()
        details = await pending.task
        if details is not None:
            exposed_s = 0.0 if was_done else time.perf_counter() - begun
            self._emit(events.CHECKPOINT, exposed_s=exposed_s, **details)

    async def cancel(self) -> None:
        if self._pending is not None and not self._pending.task.done():
            self._pending.task.cancel()
            await asyncio.gather(self._pending.task, return_exceptions=True)

    async def _take(self, sandbox: Sandbox, pending: _Pending) -> dict[str, Any] | None:
        """Details of the checkpoint for the timeline, or None if it was abandoned."""
        k = len(self._history.actions())
        context_hash = self._history.context_hash(k)
        failpoints.hit("checkpoint.begin", self.rollout)
        if not pending.must and await self._is_unchanged(sandbox, k):
            return None
        await self._hold(sandbox, pending)
        if pending.given_up:
            self._skip(k, pending.given_up, abandoned=True)
            return None
        started, begun = time.time(), time.perf_counter()
        resident = sandbox.resident_bytes()
        self._moment.begun(resident)
        dumps: list[None] = []
        pending.turn.began = lambda: (dumps.append(None), self._policy.contention.dump_begins())
        try:
            manifest = await sandbox.checkpoint(
                action=k, context_hash=context_hash, rollout=self.rollout, attempt=self.attempt, turn=pending.turn
            )
        except CheckpointAbandoned:
            self._skip(k, pending.given_up, abandoned=True)
            return None
        except (CheckpointRefused, StorageFull, SandboxLost, StaleSandbox) as error:
            self._skip(k, f"{type(error).__name__}: {error.what}", abandoned=True)
            self._emit(events.FAULT_DETECTED, fault="checkpoint", how=error.what)
            return None
        finally:
            if dumps:
                self._policy.contention.dump_ends()
        # damage from outside that came before the snapshot is in it, and a restore could not tell it from the agent's
        # own doing; damage does not heal, so a healthy sandbox now means a healthy snapshot
        problem = await self._examine(sandbox)
        if problem:
            self._skip(k, f"not trusted: {problem}", abandoned=True)
            self._lose(sandbox, problem)
            return None
        queued_s = pending.turn.waited_s
        wall_s = time.perf_counter() - begun - queued_s
        self._policy.cost(wall_s, resident)
        self._published_at = self._clock()
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
                why=pending.why,
            )
        )
        failpoints.hit("checkpoint.journal.after", self.rollout)
        return {
            "action": k,
            "id": manifest.id,
            "level": manifest.level,
            "start": started + queued_s,
            "wall_s": wall_s,
            "frozen_s": manifest.timings.frozen_s,
            "bytes": manifest.image_bytes,
            "queued_s": queued_s,
        }

    async def _is_unchanged(self, sandbox: Sandbox, k: int) -> bool:
        """Does the newest checkpoint hold exactly this state already?"""
        if not self._history.checkpoints:
            return False
        newest = self._history.checkpoints[-1]
        if await sandbox.changed_since(newest.id):
            return False
        self._skip(k, f"unchanged: {newest.id} of action {newest.k} holds exactly this state")
        return True

    async def _hold(self, sandbox: Sandbox, pending: _Pending) -> None:
        """Let a burst of memory pass, if there is time for that."""
        try:
            while not pending.must and not pending.reply.is_set():
                resident = sandbox.resident_bytes()
                passed_s, begin_by_s = self._clock() - pending.at, self._policy.begin_by(resident)
                pause_s = self._moment.hold_s(resident, passed_s, begin_by_s)
                if pause_s <= 0:
                    return
                await self._pause(pending.reply, pause_s)
        finally:
            pending.held = False

    def _tell_policy(self) -> None:
        was, self._decides = self._decides, self._policy.name
        if was != self._decides:
            k = len(self._history.actions())
            self._journal.record(
                PolicyChanged(rollout=self.rollout, attempt=self.attempt, k=k, policy=self._decides, was=was)
            )

    def _skip(self, k: int, why: str, *, abandoned: bool = False) -> None:
        self._journal.record(CheckpointSkipped(rollout=self.rollout, attempt=self.attempt, k=k, why=why))
        self._emit(events.CHECKPOINT_SKIPPED, action=k, abandoned=abandoned, why=why)

    def _emit(self, kind: str, **data: Any) -> None:
        self._sink(events.Event(kind=kind, subject=self.rollout, data=data))


def _wall(call: Call) -> float:
    return getattr(from_journal(call.result), "wall_s", 0.0)
