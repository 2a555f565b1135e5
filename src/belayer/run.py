"""A run: opens a run directory, owns engine, sandboxes and recovery, and yields trajectories."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from belayer import events, groups
from belayer._announcements import Announcements
from belayer._ending import end
from belayer._function_errors import where
from belayer._retention_news import tell_compacted
from belayer.checkpoint.live_policy import FILE as POLICY_FILE
from belayer.checkpoint.live_policy import LivePolicy
from belayer.checkpoint.policy import Policy
from belayer.config import Config
from belayer.engine import Engine
from belayer.errors import (
    RESUME,
    ConfigError,
    GroupFailed,
    NoProgress,
    RolloutFailed,
    SandboxUnavailable,
)
from belayer.faults import failpoints
from belayer.journal import Journal
from belayer.journal import records as r
from belayer.member import Around, Member, Solve
from belayer.ownership import RunLabel
from belayer.ownership.reap import reap
from belayer.recovery import EnvironmentKeeper
from belayer.recovery.breaker import CircuitBreaker
from belayer.recovery.quarantine import Quarantine
from belayer.recovery.states import environment_name
from belayer.recovery.watchdog import ProgressWatchdog
from belayer.rollout import Rollout, Tokenizer
from belayer.run_directory import RunDirectory
from belayer.sandbox import Sandbox, Sandboxes
from belayer.sandbox import reap as reap_sandboxes
from belayer.trajectory import Trajectory, trajectory

if TYPE_CHECKING:
    import torch

Image = str | Callable[[Any], str | None] | None
_log = logging.getLogger("belayer")


class Run:
    """One run directory with everything alive around it. Use it as an async context manager.

    async with await Run.open("runs/one", config) as run:
        async for trajectory in run.rollouts(solve, tasks, group_size=4):
            ...
            run.acknowledge(trajectory)
    """

    def __init__(self, directory: RunDirectory, config: Config, journal: Journal, label: RunLabel) -> None:
        self.directory = directory
        self.config = config
        self.journal = journal
        self.label = label
        self.engine: Engine | None = None
        self.sandboxes: Sandboxes | None = None
        self.tokenizer: Tokenizer | None = None
        self.sink: events.EventSink = events.ignore
        self.metrics_url: str | None = None
        self._watchers = ExitStack()
        self._told = Announcements(self.sink, whole=False)
        self._left_well = False
        self.keepers: dict[str, EnvironmentKeeper] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._policy: Policy = LivePolicy(config.policy, directory.path / POLICY_FILE)
        self._breaker = CircuitBreaker(
            # one event on the host may hit every rollout in flight once
            max(config.recovery.breaker, 2 * config.run.max_concurrent)
        )
        self._quarantine = Quarantine(config.recovery.quarantine)
        self._rollouts: dict[str, Rollout] = {}  # under way
        self._slots = asyncio.Semaphore(config.run.max_concurrent)

    @classmethod
    async def open(
        cls,
        directory: str | Path | RunDirectory,
        config: Config | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        weights: Iterable[tuple[str, torch.Tensor]] | None = None,
        policy_version: int = 0,
        sink: events.EventSink = events.ignore,
    ) -> Run:
        """Open or resume the run in `directory`, and start its engine and sandboxes.

        A `RunDirectory` that the caller has opened passes to the run, which closes it. `weights` (Hugging Face names)
        replace the model folder's, for a run that resumes in the middle of training. `sink` gets every event instead of
        the log "belayer"; the run directory has them anyhow (`observe.record`). Raises `RunInUse`,
        `RunVersionMismatch`, `ConfigError`, `EngineError`, `SandboxError`; whatever was started is gone again then.
        """
        config = config or Config()
        opened = directory if isinstance(directory, RunDirectory) else open_directory(Path(directory), config)
        try:
            if config.engine.model is None:
                raise ConfigError(
                    "engine.model is not set", next_step="give the folder of a model with safetensors weights"
                )
            if opened.about.get("seed") != config.run.seed:
                raise ConfigError(
                    f"{opened.path} was started with seed {opened.about.get('seed')}, not {config.run.seed}",
                    kept="the run, untouched",
                    next_step="resume it with its own seed, or choose another run directory",
                )
            await asyncio.to_thread(reap)
            label = _new_label(opened.path)
        except BaseException:
            opened.close()
            raise
        try:
            journal = Journal(
                opened.path / "journal",
                durability=config.run.durability,
                retention=config.run.retention,
                segment_bytes=config.run.segment_bytes,
                compacted=tell_compacted(lambda: run.sink),
            )
        except BaseException:
            label.close()
            opened.close()
            raise
        run = cls(opened, config, journal, label)
        run.tokenizer, run.sink = tokenizer, sink
        try:
            run._open_watchers()
            await run._start(weights, policy_version)
            run._told.opened(opened)
        except BaseException:
            await run.close()
            raise
        return run

    def _open_watchers(self) -> None:
        """What `observe` asks for: the record, the metrics page (`metrics_url` is where), exporters."""
        from belayer.observe.watchers import open_run_watchers

        def served(url: str) -> None:
            self.metrics_url = url

        unwatched = self.sink is events.ignore
        opened = open_run_watchers(self.config.observe, self.directory.path, logged=unwatched, served=served)
        self.sink = events.fan_out(self.sink, *self._watchers.enter_context(opened))
        self._told = Announcements(self.sink, whole=self.config.observe.record)

    async def _start(self, weights: Iterable[tuple[str, torch.Tensor]] | None, policy_version: int) -> None:
        checkpoints = self.directory.path / "checkpoints"
        self._told.phase("sandboxes")
        await asyncio.to_thread(reap_sandboxes)
        # sandboxes first: they are quick, and what this host cannot do should be said before an engine is loaded
        self.sandboxes = await Sandboxes.open(
            self.config.sandbox,
            self.label,
            checkpoints=checkpoints,
            events=self.sink,
            durable=self.config.run.durability == "host",
        )
        await self.forget_finished(self.sandboxes)
        self._told.phase("engine")
        self.engine = await self._start_engine(weights, policy_version)

    async def _start_engine(self, weights: Iterable[tuple[str, torch.Tensor]] | None, policy_version: int) -> Engine:
        """A hook: the benchmarks put an engine here that only keeps time."""
        return await Engine.start(
            self.config.engine,
            self.label,
            events=self.sink,
            policy_version=policy_version,
            weights=weights,
            log_dir=self.directory.path / "logs",
        )

    async def forget_finished(self, sandboxes: Sandboxes) -> None:
        """Delete the checkpoints of rollouts that are over: a driver that was killed may not have come to that."""
        for manifest in sandboxes.checkpoints.newest():
            history = self.journal.histories.get(manifest.rollout)
            if history is not None and (history.over or history.attempt != manifest.attempt):
                await sandboxes.discard(manifest.sandbox)
        ended = [
            environment_name(history.rollout, attempt)
            for history in self.journal.histories.values()
            for attempt in range(history.attempts)
            if history.over or attempt != history.attempt
        ]
        await sandboxes.checkpoints.forget_unreadable(ended)

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(self, kind: object, *exc: object) -> None:
        self._left_well = kind is None
        await self.close()

    async def close(self) -> None:
        """Stop everything. The run directory stays and can be opened again."""
        await end(self._running)
        engine, sandboxes, self.engine, self.sandboxes = self.engine, self.sandboxes, None, None
        try:
            if engine is not None:
                await engine.close()
        finally:
            try:
                if sandboxes is not None:
                    await sandboxes.close()
            finally:
                self.journal.close()
                self.label.close()
                self.directory.close()
                if self._left_well:
                    self._told.closed(self.journal.histories)
                await asyncio.sleep(0)  # what other threads have told
                await asyncio.to_thread(self._watchers.close)

    # -- rollouts ---------------------------------------------------------------------------------

    async def rollouts(
        self,
        solve: Solve,
        tasks: Sequence[Any],
        *,
        group_size: int = 1,
        name: str = "r",
        image: Image = None,
    ) -> AsyncIterator[Trajectory]:
        """Run `group_size` rollouts per task and yield each trajectory as it finishes, each exactly once.

        `image`: the sandbox image of them all, or a function from the task to it; None is the configured one.
        Those that the run has acknowledged before are not yielded again. A group never shrinks silently: rollouts that
        failed for good are replaced by other draws, or raised as one `GroupFailed` after all others were yielded
        (`recovery.group`). Raises `NoProgress` and `CircuitOpen` when going on makes no sense.
        """
        finished: asyncio.Queue[Trajectory | BaseException] = asyncio.Queue()
        jobs = [
            (f"{name}-{group}-{index}", f"{name}-{group}", task, image(task) if callable(image) else image)
            for group, task in enumerate(tasks)
            for index in range(group_size)
        ]
        for rollout_id, _, *asked in jobs:
            self._check_task(rollout_id, *asked)
            self._check_task(self._stands_for(rollout_id), *asked)
        waiting = [job for job in jobs if not self.journal.history(self._stands_for(job[0])).acknowledged]
        if jobs and not waiting:
            _log.info("%s: nothing left to do, all %d rollouts are acknowledged", self.directory.path.name, len(jobs))

        async def work(rollout_id: str, group: str, task: Any, its_image: str | None) -> None:
            try:
                async with self._slots:
                    member = Member(self._around(), rollout_id, group, task, solve, image=its_image)
                    finished.put_nowait(await member.run())
            except asyncio.CancelledError as error:
                current = asyncio.current_task()
                if current is not None and current.cancelling():
                    raise
                what = f"the function of rollout {rollout_id} was cancelled from inside"
                finished.put_nowait(RolloutFailed(what, first=where(error)))
            except BaseException as error:
                finished.put_nowait(error)

        running = [asyncio.create_task(work(*job), name=job[0]) for job in waiting]
        self._running.update(running)
        watching = asyncio.create_task(self._watch(running, finished), name="progress watchdog")
        failures: list[RolloutFailed] = []
        try:
            for _ in waiting:
                item = await finished.get()
                if isinstance(item, RolloutFailed):
                    failures.append(item)
                elif isinstance(item, BaseException):
                    raise item
                else:
                    failpoints.hit("deliver.before", item.rollout_id)
                    yield item
        finally:
            await end({watching, *running})
            self._running.difference_update(running)
        if failures:
            short = f", so that groups of {group_size} are short" if group_size > 1 else ""
            raise GroupFailed(
                f"{len(failures)} of {len(jobs)} rollouts failed{short}: {failures[0].what}",
                first=failures[0].first,
                kept="the journal, with every finished rollout",
                next_step=failures[0].next_step or f"repair the cause, then {RESUME}",
            )

    async def _watch(self, running: list[asyncio.Task[None]], finished: asyncio.Queue[Trajectory | BaseException]):
        """End the rollouts with `NoProgress` when nothing is journalled any more; see `recovery.watchdog`."""
        watchdog = ProgressWatchdog(self.config.recovery.no_progress_s)
        while True:
            await asyncio.sleep(watchdog.look_every_s)
            working = not all(task.done() for task in running)
            patience_s = max((keeper.patience_s for keeper in self.keepers.values()), default=0.0)
            try:
                watchdog.check(self.journal.length, working, patience_s, self.standing)
            except NoProgress as error:
                finished.put_nowait(error)
                return

    def standing(self) -> list[str]:
        """Where each rollout under way stands, a line each."""
        return [rollout.standing() for _, rollout in sorted(self._rollouts.items())]

    def _stands_for(self, rollout_id: str) -> str:
        """The rollout whose trajectory the group gets for `rollout_id`: itself, or its newest replacement."""
        return groups.newest(rollout_id, self.journal.histories)

    async def collect(
        self,
        solve: Solve,
        tasks: Sequence[Any],
        *,
        group_size: int = 1,
        name: str = "r",
        image: Image = None,
    ) -> list[Trajectory]:
        """All trajectories of `rollouts`, acknowledged ones too, ordered by (group, index)."""
        async for _ in self.rollouts(solve, tasks, group_size=group_size, name=name, image=image):
            pass
        return [
            trajectory(self.journal.history(self._stands_for(f"{name}-{group}-{index}")))
            for group in range(len(tasks))
            for index in range(group_size)
        ]

    def acknowledge(self, *trajectories: Trajectory) -> None:
        """Journal that these were used; they are never delivered again."""
        for each in trajectories:
            if not self.journal.history(each.rollout_id).acknowledged:
                failpoints.hit("acknowledge.before", each.rollout_id)
                self.journal.record(r.Acknowledged(rollout=each.rollout_id, attempt=each.attempt))
                failpoints.hit("acknowledge.after", each.rollout_id)
                self.sink(
                    events.Event(kind=events.ROLLOUT_DELIVERED, subject=each.rollout_id, data={"attempt": each.attempt})
                )

    async def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Publish new weights (Hugging Face names); requests in flight go on with them at their next token."""
        assert self.engine is not None
        await self.engine.update_weights(tensors, policy_version)

    def _around(self) -> Around:
        assert self.engine is not None and self.sandboxes is not None
        return Around(
            config=self.config,
            journal=self.journal,
            engine=self.engine,
            sandboxes=self.sandboxes,
            tokenizer=self.tokenizer,
            sink=self.sink,
            policy=self._policy,
            breaker=self._breaker,
            quarantine=self._quarantine,
            keepers=self.keepers,
            under_way=self._rollouts,
        )

    def _check_task(self, rollout_id: str, task: Any, image: str | None) -> None:
        """The same id must mean the same rollout: never hand out an old trajectory for another task."""
        started = self.journal.history(rollout_id).started
        if started is None:
            return
        same_task = msgspec.msgpack.encode(started.task) == msgspec.msgpack.encode(task)
        if not same_task or started.image != (image or ""):
            raise ConfigError(
                f"rollout {rollout_id} was started with another {'image' if same_task else 'task'}",
                kept="its journal, untouched",
                next_step="give every batch of tasks a name= of its own, or use a new run directory",
            )

    def living_sandboxes(self) -> list[tuple[str, Sandbox]]:
        """(rollout, sandbox) of every sandbox that serves a rollout right now, in a stable order."""
        keepers = [(key, self.keepers[key].sandbox) for key in sorted(self.keepers)]
        return [(key, sandbox) for key, sandbox in keepers if sandbox is not None and not sandbox.dead]


def _new_label(path: Path) -> RunLabel:
    try:
        return RunLabel.new(str(path))
    except PermissionError as error:
        raise SandboxUnavailable(f"sandboxes need root: {error}", next_step="run as root, or with sudo") from None


def open_directory(path: Path, config: Config) -> RunDirectory:
    """Take the run directory `path`, and describe the run in it if it is new. Raises `RunError`, `StorageFull`."""
    return RunDirectory.open(path, about={"seed": config.run.seed, "config": config.model_dump(mode="json")})
