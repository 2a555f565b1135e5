"""The engine fault campaign: one fault after the other on a living engine under load, and a record of each."""

from __future__ import annotations

import json
import time
from collections import Counter
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

from ._fault_episode import Episode, EventLog, Record, Stuck
from ._fault_load import Load, pool
from ._fault_usage import Usage, growth, leaks, left_behind, usage
from ._models import Model, weights

SLOTS = 6
REQUESTS_S = 90.0
IMAGE_S = 240.0
LOST_ENGINES = 5  # a campaign that has lost more is not worth its time
SAY_EVERY_S = 10.0


class Outcome(msgspec.Struct):
    """Everything a campaign has found out so far."""

    records: list[Record] = []
    found: dict[str, int] = {}
    details: list[str] = []
    completed: int = 0
    tokens: int = 0
    parts_checked: int = 0
    spontaneous: int = 0
    engines_lost: int = 0
    usage: list[Usage] = []  # of the engine that lives
    growth: dict[str, dict[str, float]] = {}
    wall_s: float = 0.0

    def count(self, kind: str, number: int) -> None:
        self.found[kind] = self.found.get(kind, 0) + number

    @property
    def injected(self) -> int:
        return sum(record.injected for record in self.records)


class Kind(msgspec.Struct, frozen=True):
    """An engine to strike: `until` that many faults are injected in all."""

    name: str
    config: EngineConfig
    until: int


class Campaign:
    """`run` ends once the last of `engines` has had its faults or `deadline` (monotonic) is past.

    `outcome` is always current.
    """

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
        self._kinds = engines
        self._model = model
        self._seed = seed
        self._deadline = deadline
        self._say = say
        self._state = state
        self._logs = logs
        self._engines = 0
        self._load: Load | None = None
        self._sets = [dict(weights(model, number)) for number in range(2)]
        self.outcome = Outcome()

    def resume(self) -> None:
        """Take over what the state file holds of an earlier campaign with the same seed."""
        if not self._state.is_file():
            return
        saved = msgspec.json.decode(self._state.read_bytes(), type=Saved)
        if saved.seed == self._seed:
            self.outcome = saved.outcome

    async def run(self) -> None:
        began = time.monotonic() - self.outcome.wall_s
        faults = stream(self._seed)
        for _done in self.outcome.records:
            next(faults)
        try:
            for kind in self._kinds:
                while self._goes_on(kind):
                    await self._live(kind, faults, began)
        finally:
            self._save(began)

    def _goes_on(self, kind: Kind) -> bool:
        return (
            self.outcome.injected < kind.until
            and time.monotonic() < self._deadline
            and self.outcome.engines_lost <= LOST_ENGINES
        )

    def _save(self, began: float) -> None:
        self.outcome.wall_s = time.monotonic() - began
        self._state.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._state.with_suffix(".new")
        unfinished.write_bytes(msgspec.json.encode(Saved(self._seed, self.outcome)))
        unfinished.rename(self._state)

    # -- one engine ---------------------------------------------------------------------------------------------------
    async def _live(self, kind: Kind, faults: Iterator[EngineFault], began: float) -> None:
        """One engine, for as long as it lives or is wanted."""
        self._engines += 1
        log = EventLog()
        with RunLabel.new("bench faults") as label:
            logs = self._logs / f"engine-{self._engines}"
            engine = await Engine.start(kind.config, label, events=log, log_dir=logs, weights=self._weights(0).items())
            load = Load(engine, pool(self._model.vocabulary, self._seed), slots=SLOTS, seed=self._seed)
            try:
                await load.learn(0)
                await engine.update_weights(self._weights(1).items(), 1)
                await load.learn(1)
                await self._wait_image(kind, log)
                load.start()
                try:
                    await self._faults(kind, faults, engine, label, log, load, began)
                    await load.stop(REQUESTS_S)
                    await self._check_rest(engine, load)
                except (Stuck, EngineError) as error:
                    self._lost(error, log, logs)
            finally:
                load.cancel()
                self._collect(load)
                await engine.close()
                self._leaked(left_behind(label))
        self._leaked(left_behind(label))
        self.outcome.growth[f"{self._engines}: {kind.name}"] = grown = growth(self.outcome.usage)
        self._leaked([f"{name} grew by {value:g}" for name, value in leaks(grown).items()])

    def _leaked(self, things: list[str]) -> None:
        self.outcome.count("leaked", len(things))
        self.outcome.details += [f"leaked: {thing}" for thing in things]

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
        began: float,
    ) -> None:
        striker = Striker(engine, lambda pid: label_of_process(pid) == label.name)
        self.outcome.usage = []
        said = time.monotonic()
        for fault in faults:
            before = log.total
            if fault.protected:
                await engine.wait_standby(REQUESTS_S)
                self.outcome.usage.append(usage(label, striker))
            self.outcome.spontaneous += log.total - before
            del log.entries[:]
            shadow = kind.config.standby == "process"
            episode = Episode(engine, striker, log, load, lambda number: self._weights(number).items(), shadow=shadow)
            try:
                record = await episode.run(fault)
            except (Stuck, EngineError) as error:
                how = f"LOST: {error}"
                self.outcome.records.append(Record(fault.index, fault.kind, kind.name, injected=True, how=how))
                raise
            record.engine = kind.name
            self.outcome.records.append(record)
            if time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                self._save(began)
                self._progress(load)
            if not self._goes_on(kind):
                return

    async def _check_rest(self, engine: Engine, load: Load) -> None:
        """What was made by the other weights can only be checked under them."""
        if await load.check_rest():
            version = engine.policy_version + 1
            await engine.update_weights(self._weights(load.weights_of(version)).items(), version)
            await load.check_rest()

    def _lost(self, error: Exception, log: EventLog, logs: Path) -> None:
        self.outcome.engines_lost += 1
        self.outcome.details.append(f"engine lost: {type(error).__name__}: {error}")
        self._say(f"the engine is lost: {error}")
        for at, event in log.entries[-40:]:
            self._say(f"  {at:.3f} {event.kind} {event.subject} {json.dumps(event.data)[:300]}")
        self._say(f"  logs: {logs}")

    def _collect(self, load: Load) -> None:
        for kind, number in load.found.items():
            self.outcome.count(kind, number)
        self.outcome.details += load.details
        self.outcome.completed += load.completed
        self.outcome.tokens += load.tokens
        self.outcome.parts_checked += load.parts_checked

    def _progress(self, load: Load) -> None:
        last = self.outcome.records[-1]
        wrong = {kind: number for kind, number in (load.found + Counter(self.outcome.found)).items() if number}
        took = f" in {last.recovery_s * 1e3:.0f} ms" if last.recovery_s is not None else ""
        done, requests = self.outcome.injected, self.outcome.completed + load.completed
        self._say(
            f"{done} of {self._kinds[-1].until} faults, {requests} requests; last: {last.kind}: "
            f"{last.how or last.why}{took}; wrong so far: {wrong or 'nothing'}"
        )


class Saved(msgspec.Struct):
    seed: int
    outcome: Outcome
