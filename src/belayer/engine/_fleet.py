"""The engine's processes under its supervisor: carries out what the state machine decides and reports back to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from belayer import events as ev
from belayer.config import EngineConfig
from belayer.engine import supervisor as sv
from belayer.engine._model_folder import ModelFacts
from belayer.engine._news import News
from belayer.engine._owner_care import OwnerCare
from belayer.engine._spawner import Spawner, Wanted
from belayer.engine._wire import (
    Activate,
    Activated,
    Adopted,
    Damaged,
    FromWorker,
    Ready,
    Refusal,
    Switch,
    Switched,
    Tokens,
)
from belayer.engine.exactness import is_exact
from belayer.engine.lifecycle import ProcessState
from belayer.engine.workers.child import environment
from belayer.engine.workers.link import WorkerLink
from belayer.errors import RESUME, EngineError, EngineUnavailable
from belayer.ownership import RunLabel

FENCE_TIMEOUT_S = 10.0


class Fleet:
    """Owner, worker and shadow.

    `on_tokens` gets every step's outcome of the serving worker; `on_route` is called when a worker begins to serve and
    needs its requests, and returns how many it was given; `on_fenced` when a generation's words count no more;
    `on_lost` when no worker can serve any more.
    """

    def __init__(self, config: EngineConfig, model: ModelFacts, label: RunLabel, events: ev.EventSink, log_dir: Path):
        self._config = config
        self._log_dir = log_dir
        self._env = environment(label, config.threads, is_exact(config))
        # a host's memory is cheap enough for an arena per generation: then a fenced worker writes nothing that counts
        self._apart = config.device == "cpu" and not config.adopt_sealed_blocks
        self._generation = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._policy_version = 0
        self._closing = False
        self.supervisor = sv.Supervisor(
            sv.Limits(config.start_timeout_s, config.promote_timeout_s, standby=config.standby == "process"),
            time.monotonic,
        )
        self.news = News(events)
        self.clock = self.news.clock
        self.links: dict[int, WorkerLink] = {}
        self.owner = OwnerCare(config, model, label, self._env, log_dir, events)
        self.owner.on_lost = lambda: self.tell(sv.OwnerLost())
        self.owner.on_fault = lambda fault, how, text: self.news.fault(fault, how, text, False)
        self._restored: set[int] = set()  # generations that came from an image
        self._spawner = Spawner(config, model, label, self._env, log_dir, events)
        self._spawner.on_nursery_exit = self._on_nursery_exit
        self._spawner.images.on_change = lambda: self._run(self._notify())
        self.changed = asyncio.Condition()  # notified whenever a link or the supervisor's state changed
        self.failure: EngineError | None = None
        self.stale_tokens = 0
        self.on_tokens: Callable[[Tokens], None]
        self.on_route: Callable[[WorkerLink], int]
        self.on_fenced: Callable[[int], None]
        self.on_lost: Callable[[EngineError], None]
        self._preparing = asyncio.Lock()
        self.before_serving: Callable[[], Coroutine[Any, Any, None]] | None = None

    # -- life ---------------------------------------------------------------------------------------------------------
    async def start(self, policy_version: int) -> None:
        """Start everything and wait until a worker serves. Raises `EngineUnavailable` with the worker's last words."""
        self._policy_version = policy_version
        owner = asyncio.ensure_future(self.owner.start())
        try:
            await self._spawner.prepare()
        finally:
            await owner
        for action in self.supervisor.begin():
            self._do(action)
        self._set_timer()
        await self.wait(lambda: self.supervisor.state is sv.State.SERVING or self.failure is not None)
        if self.failure is not None:
            raise self.failure

    async def wait(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Wait until `condition` holds; raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(condition)

    async def close(self) -> None:
        """End every process and wait until the last is reaped."""
        self._closing = True
        self.supervisor.handle(sv.Close())
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(link.fence(FENCE_TIMEOUT_S) for link in self.links.values()))
        await self._spawner.close()
        await self.owner.close()
        await self._notify()

    @property
    def serving(self) -> WorkerLink | None:
        return self.links.get(self.supervisor.serving) if self.supervisor.serving is not None else None

    @property
    def standby(self) -> WorkerLink | None:
        return self.links.get(self.supervisor.standby) if self.supervisor.standby is not None else None

    # -- supervisor ---------------------------------------------------------------------------------------------------
    def tell(self, event: sv.Event) -> None:
        """Report something to the supervisor and do what it decides."""
        before = self.supervisor.state
        for action in self.supervisor.handle(event):
            try:
                self._do(action)
            except OSError as error:  # no process, descriptor or memory to be had
                self._lose(EngineUnavailable(f"{type(action).__name__} failed: {error}", kept="every journalled token"))
        if self.supervisor.state is sv.State.COLD_START and before is not sv.State.COLD_START:
            for link in self.links.values():
                link.child.hurry()  # one that was started as a shadow is now what everybody waits for
        self._set_timer()
        self._tell_depot()
        self._run(self._notify())

    @property
    def protected(self) -> bool:
        """Whether the death of the worker that serves would be met by what `engine.standby` asks for."""
        if self._config.standby == "process":
            return self.supervisor.protected
        ready = self._config.standby == "none" or self._spawner.images.available.is_set()
        return self.supervisor.state is sv.State.SERVING and ready

    @property
    def no_standby(self) -> str:
        """Why it will never be `protected`; empty: it may."""
        return self._spawner.images.why_not if self._config.standby == "image" else ""

    def _tell_depot(self) -> None:
        serving = self.supervisor.state is sv.State.SERVING and not self._closing
        quiet = serving and (self._config.standby != "process" or self.supervisor.protected)
        self._spawner.watch_for_quiet(quiet, lambda: self._wanted(0, fill=True))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        deadline = self.supervisor.deadline
        self._timer = None
        if deadline is not None and not self._closing:
            delay = max(0.0, deadline - time.monotonic()) + 0.001
            self._timer = asyncio.get_running_loop().call_later(delay, self.tell, sv.Tick())

    def _do(self, action: sv.Action) -> None:
        match action:
            case sv.Spawn(fill):
                self._run(self._spawn(fill))
            case sv.Fence(generation):
                self._run(self._fence(generation))
            case sv.CheckOwner():
                self._run(self._check_owner())
            case sv.CheckDevice():
                self._run(self._check_device())
            case sv.ReplaceOwner(cause):
                self._run(self._replace_owner(cause))
            case sv.Activate(generation):
                self._activate(generation)
            case sv.Route(generation):
                self._route(generation)
            case sv.GiveUp(reason):
                self._give_up(reason)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # a defect of ours: nothing may go on as if it had not happened
            self._lose(EngineUnavailable(f"the engine's supervisor failed: {type(error).__name__}: {error}"))

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    # -- actions ------------------------------------------------------------------------------------------------------
    async def _spawn(self, fill: bool) -> None:
        self._generation += 1
        generation = self._generation
        log = self._log_dir / f"worker-{generation}.log"
        # at the very start a failure is the installation's, and trying again only takes longer
        once = self.supervisor.state is sv.State.STARTING
        try:
            link, first = await self._spawner.start(lambda: self._wanted(generation, fill), log, once=once)
        except EngineUnavailable as error:
            self._lose(error)
            return
        self.links[generation] = link
        link.on_message = lambda message: self._on_message(link, message)
        self.tell(sv.Started(generation))
        link.on_death = lambda: self._on_death(link)
        link.child.on_exit(lambda how: self._on_exit(link, how))
        self.news.process(link, "starting")
        if first is not None:
            self._restored.add(generation)
            self._on_message(link, first)

    def _wanted(self, generation: int, fill: bool) -> Wanted:
        serving = self.supervisor.state in (sv.State.SERVING, sv.State.REBUILDING)
        awaited = fill or self.supervisor.state is sv.State.COLD_START
        return Wanted(generation, fill, awaited, serving, self.owner.address, self._policy_version)

    def _on_nursery_exit(self, how: str) -> None:
        if not self._closing:
            self.news.fault("nursery.exit", "pidfd", f"the nursery ended: {how}", False)

    def _activate(self, generation: int) -> None:
        assert self.owner.clean is not None and self.owner.epochs is not None
        self.clock.mark("check_s" if self.supervisor.how == "promotion" else "start_s")
        link = self.links[generation]
        link.life.to(ProcessState.ACTIVATING)
        link.send(Activate(self.owner.epochs.layout_hash, self.owner.clean, self.owner.address))

    def _route(self, generation: int) -> None:
        link = self.links[generation]
        link.life.to(ProcessState.SERVING)
        link.role = "worker"
        self.news.process(link, "serving")
        if self.on_route(link) == 0:
            self.rebuilt(generation)

    def rebuilt(self, generation: int) -> None:
        """Every request in flight has its next token from `generation`."""
        if self.supervisor.serving != generation or self.supervisor.state is not sv.State.REBUILDING:
            return
        how = self.supervisor.how
        self.news.recovered("image" if how == "cold start" and generation in self._restored else how)
        self.tell(sv.Rebuilt(generation))

    async def _fence(self, generation: int) -> None:
        link = self.links[generation]
        stale = await link.fence(FENCE_TIMEOUT_S, apart=self._apart)
        if stale is None:
            self._lose(
                EngineUnavailable(
                    f"worker {generation} (process {link.child.pid}) could not be killed within {FENCE_TIMEOUT_S:g} s",
                    kept="every journalled token",
                    next_step="the kernel holds the process; free it or restart the machine, then resume the run",
                )
            )
            return
        if stale:
            self.stale_tokens += stale
            self.news.dropped(generation, stale)
        self.on_fenced(generation)
        self.clock.mark("fence_s")
        self.tell(sv.Fenced(generation))
        if not await link.reaped(FENCE_TIMEOUT_S):  # what it holds is not ours to use; nobody waits for it
            text = f"worker {generation} (process {link.child.pid}) is fenced, but its memory is not free yet"
            self.news.fault("worker.unreaped", "pidfd", text, False)
        await link.reaped(self._config.start_timeout_s)
        self.links.pop(generation, None)

    async def _check_owner(self) -> None:
        reason = await self.owner.unfit()
        self.clock.mark("health_s")
        self.tell(sv.OwnerChecked(reason))

    async def _check_device(self) -> None:
        reason = await self.owner.device_unfit()
        if reason is not None:
            self.news.fault("device.unfit", "health check", reason, False)
        self.clock.mark("device_s")
        self.tell(sv.DeviceChecked(reason))

    async def _replace_owner(self, cause: sv.Cause) -> None:
        reason = await self.owner.replace(cause)
        if reason is None:
            self.clock.mark("owner_s")
            if self.serving is not None:  # the same weights, in memory that later updates reach
                self.bring_up_to_date(self.serving)
        self.tell(sv.OwnerReplaced(reason))

    def _give_up(self, reason: str) -> None:
        next_step = f"the whole output of each process is in {self._log_dir}; once the cause is repaired, {RESUME}"
        if "hangs" in reason:
            next_step += ", on a machine with less to do or with a longer engine.hang_s"
        self._lose(EngineUnavailable(reason, kept="every journalled token", next_step=next_step))

    def _lose(self, error: EngineError) -> None:
        if self.failure is None and not self._closing:
            self.failure = error
            self.supervisor.state = sv.State.UNAVAILABLE
            self.on_lost(error)
            self._run(self._notify())

    # -- what processes say -------------------------------------------------------------------------------------------
    def _on_message(self, link: WorkerLink, message: FromWorker) -> None:
        match message:
            case Tokens(generation):
                if generation == self.supervisor.serving:
                    self.on_tokens(message)
            case Ready(generation, _hash, epoch, phases):
                link.became_ready(epoch)
                self.news.process(link, "ready", phases)
                self._run(self._on_ready(link))
            case Activated(generation, epoch, phases):
                link.epoch = epoch
                self.clock.split(phases, "handover_s")
                self.tell(sv.Activated(generation))
            case Switched(_, epoch):
                link.epoch = epoch
                self._run(self._notify())
            case Damaged(generation, number, reason):
                self._on_damaged(generation, number, reason)
            case Adopted():
                self.news.adopted(message)
            case Refusal(generation, what, reason):
                self.tell(sv.Refused(generation, f"worker {generation} refused {what}: {reason}"))

    async def _on_ready(self, link: WorkerLink) -> None:
        async with self._preparing:  # two workers may become ready together
            await self.owner.adopt_first_epoch()
            if self.before_serving is not None:
                before, self.before_serving = self.before_serving, None
                try:
                    await before()
                except EngineError as error:
                    self._lose(error)
                    return
        self.bring_up_to_date(link)
        self.tell(sv.Ready(link.generation))

    def bring_up_to_date(self, link: WorkerLink) -> None:
        """Tell a ready worker about the clean epoch if it looks at another one."""
        if link.ready and self.owner.clean is not None and link.epoch != self.owner.clean:
            link.send(Switch(self.owner.clean, self.owner.address))

    def _on_damaged(self, generation: int, number: int, reason: str) -> None:
        if self.owner.clean is None or self.owner.clean.number != number:
            return  # that epoch serves nobody any more
        self.news.fault("weights.damaged", "digest", f"worker {generation}: {reason}", self.serving is not None)
        self.tell(sv.WeightsDamaged(reason))

    def _on_death(self, link: WorkerLink) -> None:
        """A worker or shadow that was ready can do nothing more. How it ended is known once it is reaped."""
        if self._closing or link.fenced:
            return
        text = f"worker {link.generation} ended"
        if "Traceback" in (tail := link.child.log_tail()) or "Fatal Python error" in tail:
            text += f"\n{tail}"
        self.news.fault(f"{link.role}.exit", "lifeline", text, link.generation == self.supervisor.serving)
        self.tell(sv.Died(link.generation, text))

    def _on_exit(self, link: WorkerLink, how: str) -> None:
        if self._closing:
            return
        self.news.process(link, how)
        if link.fenced:
            return
        generation = link.generation
        serving = generation == self.supervisor.serving
        text = f"worker {generation} ended: {how}"
        if not link.ready or how.startswith("exit"):
            text += f"\n{link.child.log_tail()}"
        self.news.fault(f"{link.role}.exit", "pidfd", text, serving)
        self.tell(sv.Died(generation, text))
