"""One fault of the engine campaign: struck at its moment, watched until all is as it was."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch

from belayer import events as ev
from belayer.engine import Engine
from belayer.errors import EngineError, WeightsError
from belayer.faults import failpoints
from belayer.faults.engine_kinds import EngineFault
from belayer.faults.engine_strikes import Striker, parent

from ._fault_load import Load

SETTLE_S = 90.0  # a recovery that takes longer hangs
REQUESTS_S = 90.0
STANDBY_S = 60.0


class Record(msgspec.Struct):
    """What became of one fault. Times in seconds, from the first strike; `why` says why it was not injected."""

    index: int
    kind: str
    engine: str = ""
    injected: bool = False
    why: str = ""
    how: str = ""
    recovery_s: float | None = None
    detect_s: float | None = None
    shadow_ready: bool = False  # when it was struck


class Stuck(Exception):
    """The engine did not come back; the text says what was waited for."""


class EventLog:
    """The engine's events with their times, and who waits for one. `hooks` are called with every event."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, ev.Event]] = []
        self.hooks: list[Callable[[ev.Event], None]] = []
        self.total = 0
        self._news = asyncio.Event()

    def __call__(self, event: ev.Event) -> None:
        self.total += event.kind == ev.RECOVERED
        self.entries.append((time.monotonic(), event))
        self._news.set()
        for hook in list(self.hooks):
            hook(event)

    def since(self, moment: float, kind: str, subject: str | None = None) -> list[tuple[float, dict[str, Any]]]:
        return [
            (at, event.data)
            for at, event in self.entries
            if at >= moment and event.kind == kind and subject in (None, event.subject)
        ]

    async def until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Look at `condition` after every event; raises `Stuck`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise Stuck(f"not within {timeout_s:g} s: {what}") from None


class Episode:
    """Strikes once and waits."""

    def __init__(
        self,
        engine: Engine,
        striker: Striker,
        log: EventLog,
        load: Load,
        weights: Callable[[int], Iterable[tuple[str, torch.Tensor]]],
        *,
        shadow: bool,
    ) -> None:
        """`shadow`: the engine has one, and not only its image; `weights` gives either set by its number."""
        self._engine = engine
        self._striker = striker
        self._log = log
        self._load = load
        self._weights = weights
        self._shadow = shadow
        self._struck: dict[int, str] = {}  # process: what it was
        self._first = 0.0
        self._last_of_worker = 0.0
        self._in_flight: set[str] = set()

    async def run(self, fault: EngineFault) -> Record:
        """Raises `Stuck` or `EngineError` when the engine does not survive it."""
        record = Record(fault.index, fault.kind)
        await self._ready(fault)
        await asyncio.sleep(fault.delay_s)
        record.shadow_ready = self._engine.shadow_pid is not None
        self._in_flight = self._load.in_flight
        if fault.kind.startswith("update."):
            await self._strike_update(fault, record)
        else:
            await self._strike_now(fault, record)
        if not self._struck:
            record.why = record.why or "no such process at that moment"
            return record
        record.injected = True
        await self._settle(record)
        await self._load.ended(self._in_flight, REQUESTS_S)
        return record

    async def _ready(self, fault: EngineFault) -> None:
        if fault.protected:
            await self._engine.wait_standby(STANDBY_S)
        await self._log.until(lambda: self._engine.worker_pid is not None, SETTLE_S, "a worker that serves")

    # -- striking -----------------------------------------------------------------------------------------------------
    def _strike(self, role: str, name: str, pid: int | None = None) -> bool:
        """Send it; `pid`: to the process that had the role before."""
        pid = pid or self._striker.pid(role)
        now = time.monotonic()
        serving = pid is not None and pid == self._engine.worker_pid
        dependent = {} if role != "nursery" else {who: self._striker.pid(who) for who in ("worker", "shadow")}
        dependent = {who: other for who, other in dependent.items() if other is not None and parent(other) == pid}
        if pid is None or not self._striker.strike_pid(pid, name):
            return False
        self._first = self._first or now
        self._struck[pid] = role
        self._struck |= {other: who for who, other in dependent.items()}  # they die with their parent
        if serving or role == "worker" or "worker" in dependent:
            self._last_of_worker = now
        return True

    async def _strike_now(self, fault: EngineFault, record: Record) -> None:
        first, _, second = fault.kind.partition("+")
        role, name = first.split(".")
        if not second:
            self._strike(role, name)
            return
        second_role, second_name = second.split(".")
        if second_role == "promoted":
            await self._strike_promoted(fault, name, second_name, record)
            return
        pids = self._striker.pid(role), self._striker.pid(second_role)
        if not all(pids):
            return
        self._strike(role, name, pids[0])
        await asyncio.sleep(fault.second_s)
        self._strike(second_role, second_name, pids[1])

    async def _strike_promoted(self, fault: EngineFault, name: str, second: str, record: Record) -> None:
        """The worker, and then its successor while that rebuilds what the first had in flight."""
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def blow() -> None:
            self._strike("worker", second)
            done.set()

        def promoted(event: ev.Event) -> None:
            if event.kind == ev.WORKER_STATE and event.data["state"] == "serving":
                self._log.hooks.remove(promoted)
                loop.call_later(fault.second_s, blow) if fault.second_s else blow()

        self._log.hooks.append(promoted)
        try:
            if self._strike("worker", name):
                async with asyncio.timeout(SETTLE_S):
                    await done.wait()
        except TimeoutError:
            raise Stuck(f"nobody was promoted within {SETTLE_S:g} s") from None
        finally:
            if promoted in self._log.hooks:
                self._log.hooks.remove(promoted)

    async def _strike_update(self, fault: EngineFault, record: Record) -> None:
        _update, point, role = fault.kind.split(".")
        name = f"engine.update.{point}"
        version = self._engine.policy_version + 1
        with failpoints.armed(name, lambda: self._note_strike(role), skip=fault.skip):
            try:
                async with asyncio.timeout(SETTLE_S):
                    await self._engine.update_weights(self._weights(self._load.weights_of(version)), version)
            except WeightsError as error:
                record.how = f"update refused: {error.what}"
            except TimeoutError:
                raise Stuck(f"an update did not end within {SETTLE_S:g} s") from None
            if not failpoints.take_fired():
                record.why = f"the update did not come to {name}"

    def _note_strike(self, role: str) -> None:
        self._strike(role, "sigkill")

    # -- afterwards ---------------------------------------------------------------------------------------------------
    async def _settle(self, record: Record) -> None:
        """Wait until everything struck has been replaced, and say how and in what time."""
        roles = set(self._struck.values())
        if self._last_of_worker:
            await self._log.until(self._worker_is_back, SETTLE_S, f"recovery from {record.kind}")
            recoveries = self._log.since(self._first, ev.RECOVERED, "worker")
            how = ", ".join(data["how"] for _at, data in recoveries)
            record.how = f"{how} ({record.how})" if record.how else how
            record.recovery_s = recoveries[-1][0] - self._first
        shadow_alone = "shadow" in roles and not self._last_of_worker and "sigstop" not in record.kind
        if "owner" in roles or shadow_alone:
            await self._everybody_is_back(record.kind)
            if record.recovery_s is None:
                record.recovery_s = time.monotonic() - self._first
                record.how = record.how or ("new owner and shadow" if "owner" in roles else "new shadow")
        if roles == {"nursery"}:
            record.how = "nobody depended on it"
        role = next(iter(self._struck.values()))
        subject = "worker" if "worker" in roles and "update" not in record.kind else role
        detected = self._log.since(self._first, ev.FAULT_DETECTED, subject)
        if detected:
            record.detect_s = detected[0][0] - self._first

    def _worker_is_back(self) -> bool:
        recovered = self._log.since(self._last_of_worker, ev.RECOVERED, "worker")
        return bool(recovered) and self._engine.worker_pid is not None and self._engine.worker_pid not in self._struck

    async def _everybody_is_back(self, kind: str) -> None:
        engine, struck = self._engine, self._struck

        def back() -> bool:
            needed = [engine.owner_pid, engine.worker_pid]
            if self._shadow:
                needed.append(engine.shadow_pid)
            return all(pid is not None and pid not in struck for pid in needed)

        deadline = time.monotonic() + SETTLE_S
        while not back():
            if time.monotonic() > deadline:
                raise Stuck(f"not within {SETTLE_S:g} s: owner, worker and shadow after {kind}")
            try:
                await engine.wait_standby(SETTLE_S)
            except EngineError as error:
                raise Stuck(f"after {kind}: {error.what}") from None
            await asyncio.sleep(0.005)  # an owner that is being replaced has its shadow fenced a moment later
