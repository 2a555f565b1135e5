"""The keeper of one rollout's environment: whatever happens to the sandbox, it has exactly the journalled actions.

Its states, and what is forbidden, are in `states`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from belayer import events
from belayer._shielded import heard
from belayer.checkpoint.policy import Policy
from belayer.config import RecoveryConfig
from belayer.errors import BudgetSpent, RolloutFailed, SandboxLost, SandboxUnavailable, StaleSandbox
from belayer.faults import failpoints
from belayer.journal import Journal
from belayer.journal.records import DRIVER_RESTARTED, ActionCompleted, ActionIntended, ContextTruncated, EnvRestored
from belayer.recovery.actions import Action, asked, describe, observed, perform_until, to_journal
from belayer.recovery.breaker import CircuitBreaker
from belayer.recovery.bringing_back import BringingBack, examine
from belayer.recovery.bubble import BubbleCheckpoint
from belayer.recovery.states import EnvironmentState, RestartFunction, environment_name
from belayer.recovery.truncation import cut_before_action
from belayer.sandbox import Sandbox, Sandboxes

_T = TypeVar("_T")

DEATHS_IF_AMBIGUOUS = 2  # where the action itself may have killed the environment: one retry, then no more


class EnvironmentKeeper:
    """Performs a rollout's actions exactly once each, across any number of sandbox failures."""

    def __init__(
        self,
        rollout: str,
        attempt: int,
        *,
        sandboxes: Sandboxes,
        journal: Journal,
        policy: Policy,
        config: RecoveryConfig,
        breaker: CircuitBreaker,
        sink: events.EventSink,
        image: str | None = None,
    ) -> None:
        self.rollout = rollout
        self.attempt = attempt
        self.name = environment_name(rollout, attempt)
        self.state = EnvironmentState.ABSENT
        self.sandbox: Sandbox | None = None
        self._sandboxes = sandboxes
        self._journal = journal
        self._history = journal.history(rollout)
        self._policy = policy
        self._config = config
        self._breaker = breaker
        self._sink = sink
        self._recovery: asyncio.Task[None] | None = None
        self._bringing_back = BringingBack(
            self._history,
            attempt,
            sandboxes=sandboxes,
            image=image,  # None: the configured one
            timeout_s=config.restore_timeout_s,
            emit=self._emit,
        )
        self._checkpoint = BubbleCheckpoint(
            rollout,
            attempt,
            journal=journal,
            policy=policy,
            dumping=lambda: sandboxes.dumping,
            examine=examine,
            lose=self._lose_this,
            sink=sink,
        )
        self._lost_why = ""
        self._lost_at = 0.0
        self._first_loss = ""
        self._behind = 0  # the first action that the environment could not reproduce, until the context is cut there
        self._suspect = 0  # the action during which system folders vanished
        self._spent = self._history.restores  # recoveries tried, also those that failed themselves
        self._until = 0.0  # monotonic: when the action under way will have been ended by its own limit
        self._deaths = (0, 0)  # (action, how often the environment died during it)
        self._restore_s = 0.03  # the last time to create or restore, for the policy
        if any(call.kind == "action" for call in self._history.calls):  # also one that was only begun
            # this process has not made that sandbox: it is gone, or belongs to a driver that is
            sandboxes.begin_above(self.name, self._history.generation)
            self._lose(DRIVER_RESTARTED)

    @property
    def completed(self) -> int:
        """Number of actions that the environment has, and the journal holds."""
        return len(self._history.actions())

    @property
    def first_loss(self) -> str:
        """Why the environment was lost for the first time; empty if it never was."""
        return self._first_loss

    @property
    def patience_s(self) -> float:
        """How long the action under way may still take by its own limit; 0 while there is none."""
        return max(0.0, self._until - time.monotonic())

    # -- actions ----------------------------------------------------------------------------------

    async def act(self, call: int, action: Action, *, interrupt: asyncio.Event | None = None) -> Any:
        """Perform the rollout's next action and return its journalled result.

        When `interrupt` is set meanwhile, the command is killed and what it did until then is the action's outcome. No
        replay can reproduce that, so the caller should take a checkpoint at once.
        Raises `BudgetSpent` or `RolloutFailed` when the environment keeps failing, and `RestartFunction` when it can
        only be brought back to an earlier state.
        """
        text = asked(action)
        k = self.completed + 1
        await self._checkpoint.settle()
        while True:
            sandbox = await self._ready()
            if self._behind:
                self._truncate()
            problem = await examine(sandbox)
            if problem:
                self._lose(problem)
                continue
            failpoints.hit("action.chosen", self.rollout)
            self._record(ActionIntended, call=call, k=k, g=sandbox.generation, asked=text)
            failpoints.hit("action.intended", self.rollout)
            started = time.time()
            begun = time.perf_counter()
            self._until = time.monotonic() + (getattr(action, "timeout_s", None) or 0.0)
            try:
                result = await perform_until(sandbox, action, (self.attempt, sandbox.generation), interrupt)
                problem = await examine(sandbox)
            except (SandboxLost, StaleSandbox) as error:
                self._lose(error.what)
                self._count_death(k, error, action)
                continue
            except asyncio.CancelledError:
                # begun and not completed: nobody knows how far it went, so it is never gone on from in place
                self._lose(f"action {k} was cancelled")
                raise
            if problem and (sandbox.dead or sandbox.cause):
                # not damage, of which we would have to ask whose doing it is: it is gone, and so is what was done in it
                self._lose(problem)
                self._count_death(k, SandboxLost(problem), action)
                continue
            if problem and self._suspect != k:
                # damage that appeared during the action is either the action's own doing or ours to repair; doing it
                # once more from the state before it tells the two apart
                self._suspect = k
                self._lose(problem)
                continue
            if problem:
                sandbox.accept()  # twice at the same action: it is the agent's doing, and what it now observes
            wall_s = time.perf_counter() - begun
            self._breaker.success()
            self._policy.action(wall_s)
            failpoints.hit("action.performed", self.rollout)
            self._record(
                ActionCompleted,
                call=call,
                k=k,
                g=sandbox.generation,
                observed=observed(result),
                result=to_journal(result),
                wall_s=round(wall_s, 6),
                damage=problem or "",
            )
            failpoints.hit("action.completed", self.rollout)
            self._emit(
                events.EXEC,
                action=k,
                exit_code=getattr(result, "exit_code", None),
                what=describe(action),
                start=started,
                wall_s=wall_s,
            )
            return result

    async def look(self, work: Callable[[Sandbox], Awaitable[_T]]) -> _T:
        """What `work` finds in the environment, which it must not change; asked again of the next one if it dies.

        Not journalled. Raises like `act`, and what `work` raises of its own.
        """
        await self._checkpoint.settle()
        while True:
            sandbox = await self._ready()
            if self._behind:
                self._truncate()
            try:
                return await work(sandbox)
            except (SandboxLost, StaleSandbox, ConnectionError, TimeoutError) as error:
                self._lose(error.what if isinstance(error, SandboxLost | StaleSandbox) else str(error))

    def _count_death(self, k: int, error: SandboxLost | StaleSandbox, action: Action) -> None:
        before = self._deaths[1] if self._deaths[0] == k else 0
        self._deaths = (k, before + 1)
        limit = self._config.deaths_per_action
        if getattr(error, "ambiguous", False):
            limit = min(limit, DEATHS_IF_AMBIGUOUS)
        if before + 1 >= limit:
            raise RolloutFailed(
                f"rollout {self.rollout} is set aside: its environment died {before + 1} times during action {k} "
                f"({describe(action)})",
                first=self._first_loss or error.what,
                kept="its journal",
                next_step="look at what that command does; `belayer show` prints the rollout",
            )

    # -- loss and recovery ------------------------------------------------------------------------

    def _lose(self, why: str) -> None:
        if self.state in (EnvironmentState.LOST, EnvironmentState.CLOSED):
            return
        self.state = EnvironmentState.LOST
        self._lost_why, self._lost_at = why, time.perf_counter()
        self._first_loss = self._first_loss or why
        self._policy.failure()
        self._emit(events.FAULT_DETECTED, fault="sandbox", how=why)

    def _lose_this(self, sandbox: Sandbox, why: str) -> None:
        """Give `sandbox` up, unless another one has taken its place already."""
        if sandbox is self.sandbox and self.state is EnvironmentState.READY:
            self._lose(why)

    def _died(self) -> None:
        """Called by the sandbox's pidfd: begin the recovery now, hidden under the model's turn where there is one."""
        if self.state is EnvironmentState.READY:
            cause = self.sandbox.cause if self.sandbox is not None else ""
            self._lose(cause or "the sandbox's init died")
            self._start_recovery()

    def _start_recovery(self) -> asyncio.Task[None]:
        if self._recovery is None:
            self._recovery = asyncio.create_task(self._recover(), name=f"recover {self.name}")
            # whoever acts next awaits it and sees its error; until then it must not be reported as never retrieved
            self._recovery.add_done_callback(heard)
        return self._recovery

    async def _ready(self) -> Sandbox:
        if self.state is EnvironmentState.CLOSED:
            raise StaleSandbox(f"the environment of rollout {self.rollout} is closed")
        # a recovery that was started early may have ended already: its error is raised here, not lost
        while self._recovery is not None or self.state is not EnvironmentState.READY:
            task = self._start_recovery()
            try:
                await task
            finally:
                if task.done():
                    self._recovery = None
        assert self.sandbox is not None
        return self.sandbox

    async def _recover(self) -> None:
        """ABSENT or LOST → READY with exactly the completed actions applied, or an error."""
        fresh = self.state is EnvironmentState.ABSENT
        why, target = self._lost_why, self.completed
        phases: dict[str, float] = {}
        if not fresh:
            phases["detect_to_start_s"] = time.perf_counter() - self._lost_at
        while True:
            if not fresh and why != DRIVER_RESTARTED:
                self._spend(why)
            self.state = EnvironmentState.RECOVERING
            begun = time.perf_counter()
            try:
                origin, base, sandbox = await self._bringing_back.sandbox(target, fresh)
                phases["restore_s"] = time.perf_counter() - begun
                mismatch = await self._bringing_back.replay(sandbox, base, target)
                # looked at before a difference is believed: damage is no fault of the agent
                await self._bringing_back.settle_damage(sandbox, base, target)
            except (SandboxLost, StaleSandbox, SandboxUnavailable) as error:
                # it failed again while it was being brought back: that is one more failure, with its own budget
                self.state = EnvironmentState.LOST
                why, fresh = error.what, False
                continue
            phases["replay_s"] = time.perf_counter() - begun - phases["restore_s"]
            if mismatch is None:
                break
            # this sandbox went one action further than it could follow the journal: bring it back once more, shorter
            target = mismatch - 1
        # not truncated here: a model turn may be appending to the context right now, and `act` is where none can be
        self._behind = target + 1 if target < self.completed else 0
        self._activate(sandbox, origin, base, target, why, phases, fresh=fresh)

    def _spend(self, why: str) -> None:
        self._breaker.failure(why)
        if self._spent >= self._config.infra_retries:
            raise BudgetSpent(
                f"rollout {self.rollout}: {self._spent} environment recoveries, the limit is "
                f"recovery.infra_retries = {self._config.infra_retries}",
                first=self._first_loss or why,
                kept="its journal",
                next_step="find out what keeps killing the environment",
            )
        self._spent += 1

    def _truncate(self) -> None:
        """End the context before the action that could not be reproduced, and unwind the user's function."""
        k, self._behind = self._behind, 0
        cut = cut_before_action(self._history.calls, self._history.calls_through_action(k - 1), k)
        position = len(self._history.context(cut))
        reason = f"action {k} observed something else when it was replayed"
        failpoints.hit("truncate.before", self.rollout)
        self._record(ContextTruncated, call=cut, k=k, position=position, reason=reason)
        failpoints.hit("truncate.after", self.rollout)
        self._emit(events.ROLLOUT_TRUNCATED, position=position, action=k, reason=reason)
        raise RestartFunction

    def _activate(
        self, sandbox: Sandbox, origin: str, base: int, target: int, why: str, phases: dict[str, float], *, fresh: bool
    ) -> None:
        self.sandbox = sandbox
        sandbox.on_death(self._died)
        self.state = EnvironmentState.READY
        self._restore_s = phases["restore_s"]
        if fresh:
            return
        failpoints.hit("replay.end", self.rollout)
        self._record(
            EnvRestored,
            k=target,
            g=sandbox.generation,
            checkpoint=origin,
            replayed=target - base,
            reason=why,
        )
        failpoints.hit("restore.journalled", self.rollout)
        total = time.perf_counter() - self._lost_at
        self._emit(
            events.RECOVERED,
            what="sandbox",
            how=f"{sandbox.restored.level if sandbox.restored else 'full'} restore" if origin else "new container",
            fault=why,
            phases={name: round(value, 6) for name, value in phases.items()},
            total_s=total,
            replayed=target - base,
        )

    # -- checkpoints ---------------------------------------------------------------------------------

    def bubble_begins(self) -> None:
        """The model's turn begins and the environment is idle: checkpoint it now, if that pays."""
        self._policy.contention.turn_begins(self.name)
        if self.state is EnvironmentState.READY and not self._behind:
            assert self.sandbox is not None
            self._checkpoint.begin(self.sandbox, restore_s=self._restore_s)

    async def checkpoint(self, why: str) -> bool:
        """Checkpoint the idle environment now, whatever the policy says; False if none was published."""
        await self._checkpoint.settle()
        if self.state is not EnvironmentState.READY or self._behind:
            return False
        assert self.sandbox is not None
        before = len(self._history.checkpoints)
        self._checkpoint.begin(self.sandbox, restore_s=self._restore_s, must=why)
        await self._checkpoint.settle()
        return len(self._history.checkpoints) > before

    def bubble_ends(self, seconds: float, tokens: int = 0) -> None:
        """The reply is here, after so many seconds and with so many new tokens (0: not known)."""
        self._policy.contention.turn_ends(self.name, tokens)
        self._policy.bubble(seconds)
        self._checkpoint.bubble_over()

    # -- end --------------------------------------------------------------------------------------

    async def close(self, *, keep_checkpoints: bool) -> None:
        """Discard the sandbox, and its checkpoints unless a later session will want them."""
        self.state = EnvironmentState.CLOSED
        self._policy.contention.turn_ends(self.name)
        await self._checkpoint.cancel()
        if self._recovery is not None and not self._recovery.done():
            self._recovery.cancel()
            await asyncio.gather(self._recovery, return_exceptions=True)
        if not keep_checkpoints:
            await self._sandboxes.discard(self.name)
        elif self.sandbox is not None:
            await self._sandboxes.retire(self.sandbox)

    def _record(self, kind: Any, **fields: Any) -> None:
        self._journal.record(kind(rollout=self.rollout, attempt=self.attempt, **fields))

    def _emit(self, kind: str, **data: Any) -> None:
        self._sink(events.Event(kind=kind, subject=self.rollout, data=data))
