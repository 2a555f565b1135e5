"""One member of a group: driven until there is a trajectory for its place, or until its budgets are spent."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from belayer import events, groups
from belayer._function_errors import remedy, where, words
from belayer.checkpoint.policy import Policy
from belayer.config import Config
from belayer.engine import Engine
from belayer.errors import (
    RESUME,
    BelayerError,
    BudgetSpent,
    EngineError,
    GroupFailed,
    JournalError,
    Quarantined,
    RequestRefused,
    RolloutFailed,
    RunError,
    SandboxError,
    StorageFull,
)
from belayer.faults import failpoints
from belayer.journal import Journal
from belayer.journal import records as r
from belayer.recovery import EnvironmentKeeper, RestartFunction
from belayer.recovery.breaker import CircuitBreaker
from belayer.recovery.quarantine import Quarantine
from belayer.rollout import Rollout, Tokenizer
from belayer.sandbox import Sandboxes
from belayer.seeds import derive_seed
from belayer.trajectory import Trajectory, trajectory

Solve = Callable[[Rollout], Awaitable[float]]


@dataclass(frozen=True)
class Around:
    """What the members of one run share. `keepers` and `under_way` hold what serves a rollout right now."""

    config: Config
    journal: Journal
    engine: Engine
    sandboxes: Sandboxes
    tokenizer: Tokenizer | None
    sink: events.EventSink
    policy: Policy
    breaker: CircuitBreaker
    quarantine: Quarantine
    keepers: dict[str, EnvironmentKeeper]
    under_way: dict[str, Rollout]


class Member:
    """The place `place` (a rollout id) of `group`, and the function that earns its reward."""

    def __init__(
        self, around: Around, place: str, group: str, task: Any, solve: Solve, *, image: str | None = None
    ) -> None:
        """`image`: of its sandbox, instead of the configured one."""
        self._around = around
        self._config = around.config
        self._journal = around.journal
        self._place = place
        self._group = group
        self._task = task
        self._solve = solve
        self._image = image

    async def run(self) -> Trajectory:
        """Its trajectory: of the rollout itself, or, if so configured, of one that replaces it.

        Raises `RolloutFailed` when there is none, which is journalled for the group, and whatever stops the whole run.
        """
        try:
            return await self._complete()
        except RolloutFailed as error:
            history = self._journal.history(groups.newest(self._place, self._journal.histories))
            if history.failed is not None:
                self._journal.record(
                    r.GroupFailed(
                        rollout=history.rollout,
                        attempt=history.attempt,
                        group=self._group,
                        reason=error.what,
                        first=error.first,
                    )
                )
            raise

    async def _complete(self) -> Trajectory:
        recovery, group = self._config.recovery, self._group
        name = groups.newest(self._place, self._journal.histories)
        image = self._journal.history(name).image or self._image or self._config.sandbox.image
        suspects = f"the task of group {group}", f"image {image}"
        while True:
            try:
                if not self._journal.history(name).finished:
                    self._around.quarantine.check(*suspects)
                done = await self._one(name)
            except Quarantined as error:
                self._begin(name)  # so that the journal says what became of it
                self._fail(name, error)
                raise
            except RolloutFailed as error:
                agent = self._journal.history(name).agent_failures > 0
                if agent:
                    raise
                self._around.quarantine.failed(error.first, *suspects)
                if recovery.group == "fail":
                    raise
                if groups.replaced(group, self._journal.histories) >= recovery.replacements:
                    raise GroupFailed(
                        f"group {group} is not complete: {error.what}, and its recovery.replacements = "
                        f"{recovery.replacements} are used up",
                        first=error.first,
                        kept="the journal, with every finished rollout",
                    ) from error
                name = groups.following(name)
                self._begin(name)
            else:
                self._around.quarantine.succeeded(*suspects)
                return done

    async def _one(self, rollout_id: str) -> Trajectory:
        """The trajectory of this very rollout, after as many attempts as its budgets allow."""
        history = self._journal.history(rollout_id)
        while not history.finished:
            if history.started is None or history.failed is not None:
                self._begin(rollout_id)
            begun = time.perf_counter()
            try:
                reward = await self._drive(rollout_id)
            except (RolloutFailed, SandboxError) as error:
                self._fail(rollout_id, error)
                if history.attempts - history.agent_failures >= self._config.recovery.attempts:
                    raise self._failed_for_good(rollout_id) from error
                continue
            except Exception as error:
                if isinstance(error, BelayerError) and not isinstance(error, RequestRefused):
                    raise  # the engine, the journal or the disk: the run stops and can be resumed
                # the user's function itself failed: that is no fault of the infrastructure, and has its own budget
                self._fail(rollout_id, error, agent=True)
                if history.agent_failures <= self._config.recovery.agent_retries:
                    continue
                raise BudgetSpent(
                    f"the function of rollout {rollout_id} raised {type(error).__name__}: {words(error)} "
                    f"({history.agent_failures} times; recovery.agent_retries = {self._config.recovery.agent_retries})",
                    first=where(error),
                    kept="its journal",
                    next_step=f"{remedy(error)}; then {RESUME}",
                ) from error
            failpoints.hit("rollout.returned", rollout_id)
            self._journal.record(r.RolloutFinished(rollout=rollout_id, attempt=history.attempt, reward=reward))
            failpoints.hit("rollout.finished", rollout_id)
            done = trajectory(history)
            self._emit(
                events.ROLLOUT_FINISHED,
                rollout_id,
                reward=reward,
                turns=done.turns,
                tokens=sum(done.loss_mask),
                wall_s=time.perf_counter() - begun,
                attempt=history.attempt,
            )
        return trajectory(history)

    async def _drive(self, rollout_id: str) -> float:
        """Run the user's function until it returns, as often as its context is truncated under it."""
        around = self._around
        history = self._journal.history(rollout_id)
        keeper = EnvironmentKeeper(
            rollout_id,
            history.attempt,
            sandboxes=around.sandboxes,
            journal=self._journal,
            policy=around.policy,
            config=self._config.recovery,
            breaker=around.breaker,
            sink=around.sink,
            image=history.image,
        )
        around.keepers[rollout_id] = keeper
        stopped = False
        try:
            while True:
                rollout = Rollout(
                    rollout_id,
                    journal=self._journal,
                    engine=around.engine,
                    environment=keeper,
                    tokenizer=around.tokenizer,
                    sink=around.sink,
                )
                around.under_way[rollout_id] = rollout
                try:
                    made = self._solve(rollout)
                    if not inspect.isawaitable(made):
                        raise TypeError("the rollout function must be an `async def`")
                    reward = await made
                    if rollout.broken is not None:
                        raise rollout.broken
                    rollout.check_over()
                    return _checked_reward(rollout_id, reward)
                except RestartFunction:
                    continue
        except (asyncio.CancelledError, EngineError, JournalError, RunError, StorageFull):
            stopped = True  # the run stops, and will be resumed
            raise
        finally:
            del around.keepers[rollout_id]
            around.under_way.pop(rollout_id, None)
            await around.engine.end_trajectory(f"{rollout_id}.{history.attempt}")
            await keeper.close(keep_checkpoints=stopped)

    def _begin(self, rollout_id: str) -> None:
        attempt = self._journal.history(rollout_id).attempts
        # the seed does not depend on the attempt: a fresh start is the same rollout, not another draw
        seed = derive_seed(self._config.run.seed, rollout_id)
        self._journal.record(
            r.RolloutStarted(
                rollout=rollout_id,
                attempt=attempt,
                group=self._group,
                task=self._task,
                seed=seed,
                image=self._image or "",
            )
        )
        self._emit(events.ROLLOUT_STARTED, rollout_id, group=self._group, attempt=attempt)

    def _fail(self, rollout_id: str, error: Exception, *, agent: bool = False) -> None:
        attempt = self._journal.history(rollout_id).attempt
        reason = error.what if isinstance(error, BelayerError) else str(error)
        kind = type(error).__name__
        self._journal.record(
            r.RolloutFailed(rollout=rollout_id, attempt=attempt, error=kind, reason=reason, agent=agent)
        )
        self._emit(events.ROLLOUT_FAILED, rollout_id, reason=reason, failure=kind)

    def _failed_for_good(self, rollout_id: str) -> RolloutFailed:
        history = self._journal.history(rollout_id)
        return BudgetSpent(
            f"rollout {rollout_id} failed {history.attempts} times, the last time with {history.failures[-1][1]}: "
            f"{history.failures[-1][2]} (recovery.attempts = {self._config.recovery.attempts})",
            first=history.failures[0][2],
            kept="its journal",
        )

    def _emit(self, kind: str, subject: str, **data: Any) -> None:
        self._around.sink(events.Event(kind=kind, subject=subject, data=data))


def _checked_reward(rollout_id: str, reward: Any) -> float:
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ValueError(f"rollout {rollout_id}: the function returned {reward!r}; it must return float(reward)")
    return float(reward)
