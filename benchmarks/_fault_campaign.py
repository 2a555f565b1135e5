"""The engine fault campaign: one fault after the other on a living engine under load, and a record of each."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from belayer import events as ev
from belayer.config import EngineConfig
from belayer.engine import Engine
from belayer.errors import EngineError
from belayer.faults.engine_kinds import EngineFault, stream
from belayer.faults.engine_strikes import Striker
from belayer.ownership import RunLabel
from belayer.ownership.reap import label_of_process

from . import _campaign
from ._fault_episode import Episode, EventLog, Record, Stuck
from ._fault_load import Load, pool
from ._fault_usage import Usage, growth, leaks, left_behind, usage
from ._models import Model, weights

SLOTS = 6
REQUESTS_S = 90.0
IMAGE_S = 240.0
LOST_ENGINES = 5  # a campaign that has lost more is not worth its time


class Saved(_campaign.Saved, kw_only=True):
    """Everything a campaign has found out so far."""

    records: list[Record] = msgspec.field(default_factory=list)
    completed: int = 0
    tokens: int = 0
    parts_checked: int = 0
    spontaneous: int = 0
    engines_lost: int = 0
    usage: list[Usage] = msgspec.field(default_factory=list)  # of the engine that lives
    growth: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)

    @property
    def injected(self) -> int:
        return sum(record.injected for record in self.records)


class Kind(msgspec.Struct, frozen=True):
    """An engine to strike: `until` that many faults are injected in all."""

    name: str
    config: EngineConfig
    until: int


class Campaign(_campaign.Campaign[Saved]):
    """`run` ends once the last of `engines` has had its faults or `deadline` (monotonic) is past."""

    def __init__(
        self,
        engines: list[Kind],
        model: Model,
        *,
        seed: int,
        deadline: float,
        say: Callable[[str], None],
        state: Path,
        logs: Path,
    ) -> None:
        super().__init__(Saved(seed=seed), state=state, say=say)
        self._kinds = engines
        self._model = model
        self._deadline = deadline
        self._logs = logs
        self._engines = 0
        self._load: Load | None = None
        self._sets = [dict(weights(model, number)) for number in range(2)]

    @property
    def done(self) -> int:
        return self.saved.injected

    def run(self) -> None:
        asyncio.run(self._engines_in_turn())

    async def _engines_in_turn(self) -> None:
        faults = stream(self.saved.seed)
        for _done in self.saved.records:
            next(faults)
        for kind in self._kinds:
            while self._goes_on(kind):
                await self._live(kind, faults)

    def _goes_on(self, kind: Kind) -> bool:
        return (
            self.saved.injected < kind.until
            and time.monotonic() < self._deadline
            and self.saved.engines_lost <= LOST_ENGINES
        )

    # -- one engine ---------------------------------------------------------------------------------------------------
    async def _live(self, kind: Kind, faults: Iterator[EngineFault]) -> None:
        """One engine, for as long as it lives or is wanted."""
        self._engines += 1
        log, seed = EventLog(), self.saved.seed
        with RunLabel.new("bench faults") as label:
            logs = self._logs / f"engine-{self._engines}"
            engine = await Engine.start(kind.config, label, events=log, log_dir=logs, weights=self._weights(0).items())
            load = Load(engine, pool(self._model.vocabulary, seed), slots=SLOTS, seed=seed)
            try:
                await load.learn(0)
                await engine.update_weights(self._weights(1).items(), 1)
                await load.learn(1)
                await self._wait_image(kind, log)
                load.start()
                try:
                    await self._faults(kind, faults, engine, label, log, load)
                    await load.stop(REQUESTS_S)
                    await self._check_rest(engine, load)
                except (Stuck, EngineError) as error:
                    self._lost(error, log, logs)
            finally:
                load.cancel()
                self._collect(load)
                await engine.close()
                self.saved.count("leaked", *left_behind(label))
        self.saved.count("leaked", *left_behind(label))
        self.saved.growth[f"{self._engines}: {kind.name}"] = grown = growth(self.saved.usage)
        self.saved.count("leaked", *(f"{name} grew by {value:g}" for name, value in leaks(grown).items()))

    async def _wait_image(self, kind: Kind, log: EventLog) -> None:
        """An image is only made beside an engine that is left alone, which the campaign will not do."""
        if not kind.config.images:
            return

        def news() -> list[dict[str, Any]]:
            wanted = ("built", "restored", "none")
            return [data for _at, data in log.since(0.0, ev.ENGINE_IMAGE) if data["state"] in wanted]

        await log.until(lambda: bool(news()), IMAGE_S, "an image of a worker")
        if news()[-1]["state"] == "none":
            self._say(f"{kind.name}: no image: {news()[-1]['reason']}")

    def _weights(self, number: int) -> dict[str, torch.Tensor]:
        return self._sets[number]

    async def _faults(
        self,
        kind: Kind,
        faults: Iterator[EngineFault],
        engine: Engine,
        label: RunLabel,
        log: EventLog,
        load: Load,
    ) -> None:
        striker = Striker(engine, lambda pid: label_of_process(pid) == label.name)
        self.saved.usage = []
        for fault in faults:
            before = log.total
            if fault.protected:
                await engine.wait_standby(REQUESTS_S)
                self.saved.usage.append(usage(label, striker))
            self.saved.spontaneous += log.total - before
            del log.entries[:]
            shadow = kind.config.standby == "process"
            episode = Episode(engine, striker, log, load, lambda number: self._weights(number).items(), shadow=shadow)
            try:
                record = await episode.run(fault)
            except (Stuck, EngineError) as error:
                how = f"LOST: {error}"
                self.saved.records.append(Record(fault.index, fault.kind, kind.name, injected=True, how=how))
                raise
            record.engine = kind.name
            self.saved.records.append(record)
            self.tell(self._how_far, load)
            if not self._goes_on(kind):
                return

    async def _check_rest(self, engine: Engine, load: Load) -> None:
        """What was made by the other weights can only be checked under them."""
        if await load.check_rest():
            version = engine.policy_version + 1
            await engine.update_weights(self._weights(load.weights_of(version)).items(), version)
            await load.check_rest()

    def _lost(self, error: Exception, log: EventLog, logs: Path) -> None:
        self.saved.engines_lost += 1
        self.saved.details.append(f"engine lost: {type(error).__name__}: {error}")
        self._say(f"the engine is lost: {error}")
        for at, event in log.entries[-40:]:
            self._say(f"  {at:.3f} {event.kind} {event.subject} {json.dumps(event.data)[:300]}")
        self._say(f"  logs: {logs}")

    def _collect(self, load: Load) -> None:
        self.saved.add(load.found, load.details)
        self.saved.completed += load.completed
        self.saved.tokens += load.tokens
        self.saved.parts_checked += load.parts_checked

    def _how_far(self, load: Load) -> str:
        last = self.saved.records[-1]
        now = f"; of this engine's load: {dict(load.found)}" if load.found else ""
        took = f" in {last.recovery_s * 1e3:.0f} ms" if last.recovery_s is not None else ""
        return (
            f"{self.done} of {self._kinds[-1].until} faults, {self.saved.completed + load.completed} requests; "
            f"last: {last.kind}: {last.how or last.why}{took}{now}"
        )
