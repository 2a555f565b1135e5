"""The owner under the driver's eyes: started, asked, updated, and replaced when it cannot be trusted any more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from belayer import events as ev
from belayer._shielded import shielded
from belayer.config import EngineConfig
from belayer.engine import supervisor as sv
from belayer.engine._model_folder import ModelFacts
from belayer.engine._wire import Epoch
from belayer.engine.device import DeviceHealth, health_of
from belayer.engine.lifecycle import OWNER, Lifecycle, OwnerPhase
from belayer.engine.owner.client import OwnerClient
from belayer.engine.owner.process import OwnerProcess
from belayer.engine.weights.epochs import Epochs
from belayer.errors import EngineUnavailable, OwnerLost, WeightsError
from belayer.ownership import RunLabel

if TYPE_CHECKING:
    import torch

HEALTH_TIMEOUT_S = 1.0
WATCH_INTERVAL_S = 5.0
WRITE_ATTEMPTS = 3

WeightsSource = Callable[[int], Iterable[tuple[str, "torch.Tensor"]]]
"""Given a policy version, its tensors once more, by the names of the model folder. Raises if it has another one."""


class OwnerCare:
    """The current owner, what it holds, and how it got there.

    `on_lost` is called when an owner that workers use dies or does not answer; `on_fault(fault, how, text)` reports it.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelFacts,
        label: RunLabel,
        env: dict[str, str],
        log_dir: Path,
        events: ev.EventSink,
    ) -> None:
        self._config = config
        self._model = model
        self._label = label
        self._env = env
        self._log_dir = log_dir
        self._events = events
        self._count = 0
        self._closing = False
        self._watcher: asyncio.Task[None] | None = None
        self._device: DeviceHealth | None = None
        self.process: OwnerProcess
        self.life: Lifecycle[OwnerPhase]
        self.epochs: Epochs | None = None
        self.clean: Epoch | None = None
        self.usable = asyncio.Event()
        self.source: WeightsSource | None = None
        self.on_lost: Callable[[], None]
        self.on_fault: Callable[[str, str, str], None]

    @property
    def address(self) -> str:
        """The socket at which workers find it."""
        return str(self.process.path)

    async def start(self) -> None:
        """Raises `OwnerLost` when it does not come up."""
        self._device = await asyncio.to_thread(health_of, self._config.device)
        self.process, self.life = await self._new()
        self._watcher = asyncio.get_running_loop().create_task(self._watch())
        self._watcher.add_done_callback(self._watch_ended)

    async def _new(self) -> tuple[OwnerProcess, Lifecycle[OwnerPhase]]:
        self._count += 1
        life = Lifecycle(OWNER, time.monotonic)
        process = OwnerProcess(self._label, self._count, self._env, self._log_dir, self._config.device)
        process.child.on_exit(lambda how: self._on_exit(process, how))
        self._say(process, "started")
        await process.wait_ready(self._config.start_timeout_s)
        life.to(OwnerPhase.EMPTY)
        return process, life

    def _say(self, process: OwnerProcess, state: str) -> None:
        data = {"pid": process.child.pid, "state": state}
        self._events(ev.Event(kind=ev.OWNER_STATE, subject="owner", data=data))

    async def close(self) -> None:
        self._closing = True
        if self._watcher is not None:
            self._watcher.cancel()
        if hasattr(self, "process"):
            await self.process.close()
        if self.epochs is not None:
            await asyncio.to_thread(self.epochs.close)

    # -- the first epoch ----------------------------------------------------------------------------------------------
    async def adopt_first_epoch(self) -> None:
        """The first worker has filled the owner: map what it made. Nothing happens if that was done already."""
        if self.epochs is not None:
            return
        state = await asyncio.to_thread(self.process.client.state)
        assert state.layout is not None and state.clean is not None
        self.clean = state.clean
        self.epochs = Epochs(self.process.client, state.layout, tied=self._model.tied, device=self._config.device)
        self.life.to(OwnerPhase.CLEAN)
        self.usable.set()

    # -- health -------------------------------------------------------------------------------------------------------
    async def unfit(self) -> str | None:
        """Why nobody may be promoted onto this owner's memory; None: it is well."""
        if self.life.state is OwnerPhase.LOST:
            return "the owner was lost"
        writing = self.life.state is OwnerPhase.UPDATING
        return await self.process.unfit(self.clean, writing, HEALTH_TIMEOUT_S)

    async def device_unfit(self) -> str | None:
        """Why nothing on the device may be used again; None: it is well."""
        assert self._device is not None
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                return await asyncio.to_thread(self._device.check)
        except TimeoutError:
            return f"the health check of {self._config.device} did not answer within {HEALTH_TIMEOUT_S:g} s"

    async def _watch(self) -> None:
        """An owner that is stopped or stuck does not die, and nobody asks it anything while all goes well."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            process = self.process
            if not self.usable.is_set() or not process.child.alive:
                continue
            try:
                await asyncio.to_thread(_probe, process.path)
            except (OwnerLost, WeightsError) as error:
                if process is self.process and self.usable.is_set() and not self._closing:
                    self.on_fault("owner.hang", "probe", f"the owner does not answer: {error.what}")
                    self.lost(process)

    def _watch_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.on_fault("owner.watch", "defect", f"nobody watches the owner any more: {error!r}")

    def _on_exit(self, process: OwnerProcess, how: str) -> None:
        if self._closing or process is not getattr(self, "process", process):
            return
        self._say(process, how)
        if self.life.state is OwnerPhase.LOST:
            return  # it was given up, and killed, on purpose
        self.on_fault("owner.exit", "pidfd", f"the owner ended: {how}")
        self.lost(process)

    def lost(self, process: OwnerProcess) -> None:
        """`process` is dead or does not answer; nothing happens if it has been replaced already."""
        if process is self.process and self.usable.is_set():
            self.usable.clear()
            self.life.to(OwnerPhase.LOST)
            self.on_lost()

    # -- a new one ----------------------------------------------------------------------------------------------------
    async def replace(self, cause: sv.Cause) -> str | None:
        """Put another owner with the same weights in place. None: done; otherwise why there is none."""
        self.usable.clear()
        if self.life.state is not OwnerPhase.LOST:
            self.life.to(OwnerPhase.LOST)
        try:
            if self.clean is None or self.epochs is None:
                return "there are no weights to fill a new owner with"
            await self.process.close()
            process, life = await self._new()
            self.clean = await self._fill(process, cause)
        except (OwnerLost, WeightsError, OSError) as error:
            return str(error)
        life.to(OwnerPhase.CLEAN)
        self.life.to(OwnerPhase.REPLACED)
        self.process, self.life = process, life
        self.usable.set()
        return None

    async def _fill(self, process: OwnerProcess, cause: sv.Cause) -> Epoch:
        assert self.epochs is not None and self.clean is not None
        damaged = cause is sv.Cause.DAMAGED
        if not damaged:
            try:
                return await asyncio.to_thread(self.epochs.move_to, process.client, self.clean)
            except WeightsError as error:
                if self.source is None:
                    raise
                self.on_fault("weights.damaged", "digest", error.what)
        if self.source is None:
            raise WeightsError(
                f"the weights of policy version {self.clean.policy_version} are damaged in memory, and the engine "
                "knows no other source of them",
                next_step="start the engine again with these weights",
            )
        tensors = await asyncio.to_thread(lambda: list(self.source(self.clean.policy_version)))  # type: ignore[misc]
        return await asyncio.to_thread(self.epochs.refill, process.client, self.clean, tensors)

    # -- updates ------------------------------------------------------------------------------------------------------
    async def write(self, tensors: list[tuple[str, torch.Tensor]], policy_version: int, deadline: float) -> None:
        """Write and commit the next epoch; `clean` is it afterwards. `deadline` is on the event loop's clock.

        Raises `WeightsError`; the old epoch serves on then.
        """
        loop = asyncio.get_running_loop()
        for _attempt in range(WRITE_ATTEMPTS):
            try:
                async with asyncio.timeout_at(deadline):
                    await self.usable.wait()
            except TimeoutError:
                break
            assert self.epochs is not None and self.clean is not None
            base, process, life = self.clean, self.process, self.life
            life.to(OwnerPhase.UPDATING)
            try:
                writing = loop.run_in_executor(
                    None, self.epochs.update, base, tensors, policy_version, deadline - loop.time()
                )
                # a thread cannot be stopped half-way, and it looks at the deadline itself
                self.clean = await shielded(writing)
                return
            except WeightsError as error:
                kept = f"policy version {base.policy_version} serves on"
                raise WeightsError(error.what, kept=kept, next_step=error.next_step) from None
            except OwnerLost:
                self.lost(process)
            finally:
                if life.state is OwnerPhase.UPDATING:
                    life.to(OwnerPhase.CLEAN)
        if self.clean is None:
            raise EngineUnavailable("the engine holds no weights")
        raise WeightsError(
            "no owner could take the new weights in time",
            kept=f"policy version {self.clean.policy_version} serves on",
            next_step="engine.update_timeout_s is the deadline",
        )


def _probe(path: Path) -> None:
    """Ask the owner at `path` how it is, over a connection of its own: nobody else waits for this answer."""
    client = OwnerClient.connect(path)
    try:
        client.state(WATCH_INTERVAL_S)
    finally:
        client.close()
