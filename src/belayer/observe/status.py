"""The state of a run, read from its folder by anybody at any time: nothing is locked and nothing is written.

Mostly from `metrics.jsonl`, which a run's driver writes within a second; whether that driver lives is asked of the
kernel. A run of a program that records no metrics is read from its journal, which knows no times.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from belayer import events as ev
from belayer.errors import JournalError, RunError
from belayer.events import Event
from belayer.groups import counting
from belayer.journal import read_histories
from belayer.observe._clock import RunClock
from belayer.observe._live_state import LiveFeed, LiveState
from belayer.observe._values import quantile, whole
from belayer.observe.metrics import MetricsTail
from belayer.run_directory import check_format, damaged, driver_of, unread_tail

State = Literal["starting", "running", "finished", "stopped"]
_SILENT_S = 60.0


class InFlight(msgspec.Struct, kw_only=True):
    """A rollout that has begun and not ended. Ages in seconds; null where only the journal is known."""

    rollout: str
    attempt: int = 0
    turns: int = 0
    actions: int = 0
    age_s: float | None = None
    last: str = "started"
    """What it last completed or suffered."""
    last_age_s: float | None = None


class RunStatus(msgspec.Struct, kw_only=True):
    """What `belayer status` shows. Names that end in `_s` are seconds; null means not known."""

    run: str
    state: State
    message: str
    """The state in one sentence, with what to do next where something is to be done."""
    driver_pid: int | None = None
    driver_alive: bool = False
    ok: bool | None = None
    seed: int | None = None
    run_time_s: float | None = None
    last_event_age_s: float | None = None
    step: int | None = None
    """Optimiser steps done."""
    steps_planned: int | None = None
    eta_s: float | None = None
    reward: float | None = None
    tokens: int | None = None
    tokens_per_s: float | None = None
    rollouts_per_min: float | None = None
    rollouts_started: int = 0
    rollouts_finished: int = 0
    rollouts_delivered: int = 0
    rollouts_failed: int = 0
    rollouts_truncated: int = 0
    in_flight: list[InFlight] = msgspec.field(default_factory=list)
    worker: str | None = None
    generation: int | None = None
    shadow: str | None = None
    owner: str | None = None
    sandboxes_running: int | None = None
    checkpoints: int | None = None
    checkpoints_skipped: int | None = None
    checkpoints_abandoned: int | None = None
    checkpoint_hidden_share: float | None = None
    faults_injected: dict[str, int] = msgspec.field(default_factory=dict)
    faults_detected: dict[str, int] = msgspec.field(default_factory=dict)
    recoveries: dict[str, int] = msgspec.field(default_factory=dict)
    recovery_median_s: dict[str, float] = msgspec.field(default_factory=dict)
    recent: list[dict[str, Any]] = msgspec.field(default_factory=list)
    """The newest faults, each with the recovery that answered it."""
    journal_bytes: int = 0
    journal_unread: str = ""
    """What the journal ends with that is no record; empty if nothing, and while a driver lives."""


@dataclass(slots=True)
class _Counts:
    started: int = 0
    skipped: int = 0
    abandoned: int = 0


class RunReader:
    """Follows one run directory; `status` reads what is new since the last call.

    Raises `RunError` when `path` is no run directory.
    """

    def __init__(self, path: Path) -> None:
        if not (path / "run.json").is_file():
            raise RunError(
                f"{path} is not a run directory: it has no run.json",
                next_step="check the path; runs are usually below runs/",
            )
        self.path = path
        check_format(path)
        self._about = _read_about(path)
        self._tail = MetricsTail(path / "metrics.jsonl")
        self._feed = LiveFeed()
        self._clock = RunClock()
        self._open: dict[str, InFlight] = {}
        self._times: dict[str, tuple[float, float]] = {}  # rollout → (began, last heard of), seconds since the epoch
        self._detected: dict[str, int] = {}
        self._counts = _Counts()
        self._announced = False
        self._last_at: float | None = None

    def live_state(self) -> LiveState:
        """The state that the live view draws, as of the last `status`."""
        return self._feed.snapshot()

    def status(self, now: float | None = None) -> RunStatus:
        """The run as of `now` (seconds since the epoch; default: the present)."""
        now = time.time() if now is None else now
        # asked before the file is read: a driver that ends in between has then written its last lines
        pid, alive = driver_of(self.path)
        for event in self._tail.read():
            self._take(event)
        live = self._feed.snapshot()
        state: State
        if live.ended is not None:
            state = "finished"
        elif alive:
            state = "running" if self._announced or not self._tail.exists else "starting"
        else:
            state = "finished" if self._nothing_left() else "stopped"
        status = RunStatus(run=str(self.path), state=state, message="", driver_pid=pid, driver_alive=alive)
        status.journal_bytes = sum(file.stat().st_size for file in (self.path / "journal").glob("*.seg"))
        if self._tail.exists:
            self._from_events(status, live, now)
        else:
            self._from_journal(status)
        if not alive:
            status.journal_unread = self._unread()
        status.message = self._message(status, said=live.ended is not None)
        return status

    def _take(self, event: Event) -> None:
        self._feed(event)
        self._clock(event)
        self._last_at = event.at
        kind, subject = event.kind, event.subject
        if kind == ev.LOG_CONTINUED:
            self._announced = False
        elif kind == ev.RUN_STARTED:
            self._announced = True
        elif kind == ev.ROLLOUT_STARTED:
            self._counts.started += 1
            self._open[subject] = InFlight(rollout=subject, attempt=whole(event.data, "attempt") or 0)
            self._times[subject] = (event.at, event.at)
        elif kind in (ev.ROLLOUT_FINISHED, ev.ROLLOUT_FAILED):
            self._open.pop(subject, None)
            self._times.pop(subject, None)
        elif kind == ev.CHECKPOINT_SKIPPED:
            if event.data.get("abandoned"):
                self._counts.abandoned += 1
            else:
                self._counts.skipped += 1
        elif kind == ev.FAULT_DETECTED:
            fault = str(event.data.get("fault", "unnamed"))
            self._detected[fault] = self._detected.get(fault, 0) + 1
        rollout = self._open.get(subject)
        if rollout is not None:
            self._follow(rollout, event)

    def _follow(self, rollout: InFlight, event: Event) -> None:
        data = event.data
        if event.kind == ev.GENERATE:
            rollout.turns += 1
            rollout.last = f"turn of {data.get('tokens', '?')} tokens"
        elif event.kind == ev.EXEC:
            rollout.actions = max(rollout.actions, whole(data, "action") or 0)
            rollout.last = f"action {data.get('action', '?')}"
        elif event.kind == ev.CHECKPOINT:
            rollout.last = f"checkpoint after action {data.get('action', '?')}"
        elif event.kind in (ev.FAULT_DETECTED, ev.FAULT_INJECTED) and data.get("fault") != "checkpoint":
            rollout.last = f"fault: {data.get('fault', 'unnamed')}"
        elif event.kind == ev.RECOVERED:
            rollout.last = f"recovered: {data.get('how', '?')}"
        elif event.kind == ev.ROLLOUT_TRUNCATED:
            rollout.last = "context cut"
        elif event.kind != ev.ROLLOUT_STARTED:
            return
        self._times[rollout.rollout] = (self._times[rollout.rollout][0], event.at)

    def _from_events(self, status: RunStatus, live: LiveState, now: float) -> None:
        counts = self._counts
        alive = status.driver_alive and status.state != "finished"
        since = max(0.0, now - self._last_at) if self._last_at is not None else 0.0
        status.last_event_age_s = since if self._last_at is not None else None
        status.run_time_s = self._clock.length + (since if alive else 0.0)
        status.ok, status.seed = live.ok, live.seed
        status.step = 0 if live.step is None else live.step + 1
        status.steps_planned = live.steps_planned
        status.eta_s = live.eta_s() if alive else None
        status.reward = live.rewards[-1] if live.rewards else None
        status.tokens = live.tokens
        status.rollouts_started, status.rollouts_finished = counts.started, live.finished
        status.rollouts_delivered, status.rollouts_failed = live.delivered, live.failed
        status.rollouts_truncated = live.truncated
        if alive:
            status.tokens_per_s = live.tokens_per_s(now)
        elif status.run_time_s:
            status.tokens_per_s = live.tokens / status.run_time_s
        if status.run_time_s:
            status.rollouts_per_min = 60 * live.finished / status.run_time_s
        for rollout in self._open.values():
            began, last = self._times[rollout.rollout]
            aged = msgspec.structs.replace(rollout, age_s=max(0.0, now - began), last_age_s=max(0.0, now - last))
            status.in_flight.append(aged)
        gone = None if alive else "ended"
        status.worker, status.shadow = gone or live.worker or None, gone or live.shadow or None
        status.owner = gone or live.owner or None
        status.generation = live.generation
        status.sandboxes_running = live.sandboxes if alive else 0
        status.checkpoints, status.checkpoint_hidden_share = live.checkpoints, live.hidden_share
        status.checkpoints_skipped, status.checkpoints_abandoned = counts.skipped, counts.abandoned
        status.faults_injected = dict(sorted(live.faults.items()))
        status.faults_detected = dict(sorted(self._detected.items()))
        status.recoveries = dict(sorted(live.recovered.items()))
        status.recovery_median_s = {what: quantile(totals, 0.5) for what, totals in live.totals.items()}
        status.recent = [
            {
                "at": one.at,
                "fault": one.fault,
                "subject": one.subject,
                "injected": one.injected,
                "recovery": None if one.recovery is None else msgspec.to_builtins(one.recovery),
            }
            for one in live.recent
        ]

    def _from_journal(self, status: RunStatus) -> None:
        status.seed = self._about.get("seed")
        for name, history in read_histories(self.path / "journal").items():
            status.rollouts_started += 1
            status.rollouts_delivered += history.acknowledged
            status.rollouts_finished += history.finished
            status.rollouts_failed += history.failed is not None
            status.rollouts_truncated += history.truncations
            if not history.finished and history.failed is None:
                actions = len(history.actions())
                status.in_flight.append(
                    InFlight(
                        rollout=name,
                        attempt=history.attempt,
                        turns=sum(call.kind == "generate" for call in history.calls),
                        actions=actions,
                        last=f"{history.calls[-1].kind}" if history.calls else "started",
                    )
                )

    def _nothing_left(self) -> bool:
        """Whether a program of the user's own that is gone had nothing more to do, as far as the journal knows."""
        if "gateway" in self._about or (self.path / "job.json").is_file():
            return False  # those know themselves when they are done
        try:
            begun = counting(read_histories(self.path / "journal"))
        except JournalError:
            return False
        return bool(begun) and all(history.acknowledged for history in begun)

    def _unread(self) -> str:
        try:
            tail = unread_tail(self.path)
        except JournalError as error:
            return error.what
        return "" if tail is None else str(tail)

    def _message(self, status: RunStatus, *, said: bool) -> str:
        """`said`: the driver announced the end itself."""
        pid = status.driver_pid
        if status.state == "finished" and not said:
            return "finished: its driver has ended, and of the rollouts that it began nothing is left to do"
        if status.state == "finished":
            return "finished" if status.ok is not False else "ended, and not every rollout was delivered"
        if status.state == "starting":
            return f"starting: process {pid} loads engine and sandboxes"
        if status.state == "running":
            silent = status.last_event_age_s or 0.0
            if silent > _SILENT_S:
                return f"running (process {pid}), but nothing was heard of it for {silent:.0f} s"
            return f"running (process {pid})"
        gone = "no driver has opened it" if pid is None else f"its driver (process {pid}) is gone"
        unfinished = f", {len(status.in_flight)} rollouts unfinished" if status.in_flight else ""
        if "gateway" in self._about:
            how = f"`belayer serve` with --run-dir {self.path} serves its sessions again"
        elif (self.path / "job.json").is_file():
            how = f"`belayer resume {self.path}` goes on from the journal"
        else:
            how = "start your program again: Run.open goes on from the journal"
        return f"stopped: {gone}{unfinished}; {how}"


def _read_about(path: Path) -> dict[str, Any]:
    try:
        about = json.loads((path / "run.json").read_text())
    except ValueError:
        about = None
    if not isinstance(about, dict):
        raise damaged(path)
    return about
