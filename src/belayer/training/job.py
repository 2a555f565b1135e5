"""The training job: a run, a trainer in a thread beside it, faults if asked for, and what people see of it.

The driver's main thread runs the event loop (engine, sandboxes, rollouts, signals). The trainer is blocking code and
lives in a worker thread; `RunSource` is the bridge between the two.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from belayer import events
from belayer.config import Config, ObserveConfig
from belayer.engine import Engine
from belayer.errors import ConfigError
from belayer.faults import FaultInjector, plan
from belayer.groups import counting
from belayer.journal import read_histories, scan
from belayer.journal.records import Acknowledged
from belayer.ownership.reap import label_of_process
from belayer.run import Run
from belayer.run_directory import RunDirectory
from belayer.training.grpo import train
from belayer.training.interface import StepReport, TrainingStopped
from belayer.training.model import prepare_model
from belayer.training.state import newest_state
from belayer.training.task import Task, load_task
from belayer.trajectory import Trajectory, trajectory
from belayer.versions import versions

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class JobOutcome(msgspec.Struct, frozen=True):
    """What a job came to. `journal_counts` are (started, delivered, duplicated) rollouts by the journal."""

    journal_counts: tuple[int, int, int]
    faults_skipped: list[str]
    wall_s: float


class RunSource:
    """The trainer's side of a run: blocking calls from its thread, carried out on the event loop."""

    def __init__(self, run: Run, task: Task, loop: asyncio.AbstractEventLoop, stop: threading.Event) -> None:
        self._run, self._task, self._loop, self._stop = run, task, loop, stop
        self._collected: dict[int, list[Trajectory]] = {}

    def collect(self, step: int, tasks: list[dict[str, Any]], group_size: int) -> list[Trajectory]:
        """All trajectories of a step, ordered by (group, index); finished ones come from the journal."""
        self._collected[step] = self._wait(
            self._run.collect(self._task.solve, tasks, group_size=group_size, name=step_name(step))
        )
        return self._collected[step]

    def publish(self, named_tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Make new weights the ones that serve."""
        self._wait(self._run.update_weights(named_tensors, policy_version))

    def acknowledge(self, step: int) -> None:
        """The step is trained on and saved: deliver its trajectories, once and for ever."""
        trajectories = self._collected.pop(step, None)
        if trajectories is None:
            # saved before the crash but not acknowledged: the journal still has them
            histories = self._run.journal.histories
            mine = [h for key, h in histories.items() if key.startswith(f"{step_name(step)}-") and h.finished]
            trajectories = [trajectory(history) for history in mine]
        done = trajectories

        async def deliver() -> None:
            self._run.acknowledge(*done)

        self._wait(deliver())

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self._stop.is_set():
            work.close()
            raise TrainingStopped
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            try:
                return future.result(timeout=0.5)
            except TimeoutError:
                if future.done():
                    return future.result()  # it ended just now, perhaps with a timeout of its own
                if self._stop.is_set():
                    future.cancel()
                    raise TrainingStopped from None


def step_name(step: int) -> str:
    return f"s{step:04d}"


async def run_job(
    config: Config,
    base: Path,
    directory: RunDirectory,
    *,
    sink: events.EventSink,
    say: Callable[[str], None] = lambda text: None,
) -> JobOutcome:
    """Train to the end, or go on where an earlier session of the same run directory stopped.

    `base` is the folder that the task's path is relative to; `directory`, opened and so locked, is closed at the end,
    because nobody else may touch the model and the states in it. Cancel it to stop; everything is gone then and the run
    can be resumed.
    """
    begun = time.perf_counter()
    run_dir = directory.path
    state_dir = run_dir / "trainer"
    try:
        train_config = config.train
        if train_config is None:
            raise ConfigError("the configuration has no [train] section")
        task = load_task(train_config.task, base)
        say("preparing the model")
        model = await _in_thread(
            lambda progress: prepare_model(train_config, task, state_dir, config.run.seed, progress, base=base), say
        )
        state = newest_state(state_dir)
    except BaseException:
        directory.close()
        raise
    # whoever watches was let in by the caller, and sees what comes before and after the run too
    engine = config.engine.model_copy(update={"model": model})
    config = config.model_copy(update={"engine": engine, "observe": ObserveConfig(record=False)})
    say("starting engine and sandboxes")
    opening = Run.open(
        directory,
        config,
        tokenizer=task.tokenizer,
        sink=sink,
        weights=state.weights() if state else None,
        policy_version=state.step if state else 0,
    )
    async with await opening as run:
        assert run.engine is not None
        if config.engine.standby != "none":
            await run.engine.wait_standby(config.engine.start_timeout_s)
        sink(
            events.Event(
                kind=events.RUN_STARTED,
                data={
                    "seed": config.run.seed,
                    "resumed": run.directory.resumed,
                    "steps": train_config.steps,
                    "inject": config.faults.inject,
                    "versions": versions(),
                },
            )
        )
        skipped = await _train_with_faults(config, task, state_dir, run, run.engine, sink)
    counts = journal_counts(run_dir)
    wall_s = time.perf_counter() - begun
    sink(events.Event(kind=events.RUN_FINISHED, data={"wall_s": wall_s, "ok": counts[0] == counts[1]}))
    return JobOutcome(counts, skipped, wall_s)


async def _in_thread(work: Callable[[Callable[[str], None]], T], say: Callable[[str], None]) -> T:
    """Run blocking `work(progress)`; when this is cancelled, `progress` unwinds the thread at its next report."""
    stop = threading.Event()

    def progress(text: str) -> None:
        if stop.is_set():
            raise TrainingStopped
        say(text)

    try:
        return await asyncio.to_thread(work, progress)
    except asyncio.CancelledError:
        stop.set()
        raise


async def _train_with_faults(
    config: Config, task: Task, state_dir: Path, run: Run, engine: Engine, sink: events.EventSink
) -> list[str]:
    stop = threading.Event()
    loop = asyncio.get_running_loop()
    assert config.train is not None
    total = config.train.steps * config.train.groups * config.train.group_size

    def progress() -> float:
        return sum(history.finished for history in run.journal.histories.values()) / total

    def on_step(report: StepReport) -> None:
        loop.call_soon_threadsafe(sink, events.Event(kind=events.TRAIN_STEP, data=msgspec.to_builtins(report)))

    done = progress()
    faults = [fault for fault in plan(config.faults, config.run.seed) if fault.progress >= done]
    injector = FaultInjector(
        faults if config.faults.inject else [],
        seed=config.run.seed,
        progress=progress,
        worker_pid=lambda: engine.worker_pid,
        standby=lambda: engine.shadow_pid is not None,
        sandboxes=run.living_sandboxes,
        mine=lambda pid: label_of_process(pid) == run.label.name,
        sink=sink,
    )
    injecting = asyncio.create_task(injector.run())
    source = RunSource(run, task, loop, stop)

    trainer = asyncio.create_task(
        asyncio.to_thread(
            train, config.train, task, source, state_dir, seed=config.run.seed, on_step=on_step, stop=stop
        )
    )
    try:
        # an injector that fails is a bug that must not pass as "no faults"
        watched = {trainer, injecting}
        while not trainer.done():
            done, watched = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for task_done in done:
                task_done.result()
    finally:
        stop.set()
        injecting.cancel()
        await asyncio.gather(injecting, trainer, return_exceptions=True)
    return injector.skipped + [fault.kind for fault in injector.pending]


def journal_counts(run_dir: Path) -> tuple[int, int, int]:
    """(started, delivered, duplicated) rollouts of a run directory, by its journal."""
    histories = {history.rollout: history for history in counting(read_histories(run_dir / "journal"))}
    acknowledged = [record for record in scan(run_dir / "journal") if isinstance(record, Acknowledged)]
    delivered = sum(history.acknowledged for history in histories.values())
    acknowledged = [record for record in acknowledged if record.rollout in histories]
    return len(histories), delivered, len(acknowledged) - delivered
