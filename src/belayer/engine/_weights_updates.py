"""How new weights come to serve: written into the next epoch, committed in one step, then every process switches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from belayer import events as ev
from belayer._shielded import shielded
from belayer.config import EngineConfig
from belayer.engine import supervisor as sv
from belayer.engine._fleet import Fleet
from belayer.engine._wire import Epoch
from belayer.engine.request import WeightsEpoch
from belayer.engine.version_gate import VersionGate
from belayer.errors import WeightsError
from belayer.faults.failpoints import hit

if TYPE_CHECKING:
    import torch


class WeightsUpdates:
    """One update after another, each to its end. `restart_turns(policy_version)` voids what is in flight."""

    def __init__(
        self,
        config: EngineConfig,
        fleet: Fleet,
        gate: VersionGate,
        restart_turns: Callable[[int], None],
        events: ev.EventSink,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._gate = gate
        self._restart_turns = restart_turns
        self._events = events
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[WeightsEpoch]] = set()

    async def begin(self, tensors: list[tuple[str, torch.Tensor]], policy_version: int) -> WeightsEpoch:
        """Do the whole update. Raises as `Engine.update_weights` says."""
        # half an update does not exist, so a caller that is cancelled cannot leave one. `stop` ends it
        task = asyncio.get_running_loop().create_task(self._update(tensors, policy_version))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await shielded(task)

    def stop(self) -> None:
        """The engine closes: updates that run are cancelled, and their callers hear of it."""
        for task in self._tasks:
            task.cancel()

    def deadline(self) -> float:
        """When, by the event loop's clock, an update that begins now must be committed."""
        return asyncio.get_running_loop().time() + self._config.update_timeout_s

    async def _update(self, tensors: list[tuple[str, torch.Tensor]], policy_version: int) -> WeightsEpoch:
        if not tensors:
            raise WeightsError("an update without tensors changes nothing")
        began, deadline = time.monotonic(), self.deadline()
        async with self._one_at_a_time:
            serving = self._fleet.owner.clean
            if serving is not None and policy_version <= serving.policy_version:
                raise WeightsError(
                    f"policy version {policy_version} is not newer than {serving.policy_version}, which serves",
                    next_step="versions rise for ever; after a resume start the engine with the version it had",
                )
            async with self._gate.update(deadline):
                await self._fleet.owner.write(tensors, policy_version, deadline)
                # from here on there is no way back: the new epoch is the one to serve
                target = self._fleet.owner.clean
                assert target is not None
                try:
                    hit("engine.update.after_commit")
                finally:
                    if self._gate.policy == "restart_turn":
                        self._restart_turns(policy_version)
                    await self._switch_all(target)
        if self._fleet.failure is not None:
            raise self._fleet.failure
        wall_s = time.monotonic() - began
        epoch = WeightsEpoch(epoch=target.number, policy_version=policy_version, digest=target.digest, wall_s=wall_s)
        data = {"epoch": target.number, "policy_version": policy_version, "digest": target.digest, "wall_s": wall_s}
        self._events(ev.Event(kind=ev.WEIGHTS_COMMITTED, subject="weights", data=data))
        hit("engine.update.switched")
        return epoch

    async def _switch_all(self, target: Epoch) -> None:
        fleet = self._fleet
        for number, link in enumerate(list(fleet.links.values())):
            if number:
                hit("engine.update.between_switches")
            fleet.bring_up_to_date(link)
        try:
            await fleet.wait(lambda: self._switched(target.number), self._config.prefill_hang_s)
        except TimeoutError:
            # one that does not answer is of no use: as a shadow nobody else would notice
            for link in list(fleet.links.values()):
                if link.ready and link.epoch != fleet.owner.clean:
                    fleet.tell(sv.Hung(link.generation, f"worker {link.generation} did not switch its weights"))
            await fleet.wait(lambda: self._switched(target.number), self._config.start_timeout_s)

    def _switched(self, number: int) -> bool:
        """Whether no worker that could make a token still looks at older weights."""
        if self._fleet.failure is not None:
            return True
        return all(
            link.fenced or not link.ready or (link.epoch is not None and link.epoch.number >= number)
            for link in self._fleet.links.values()
        )
