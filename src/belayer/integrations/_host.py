"""`ProtectedHost`: the protected sandboxes of one process. The promises are those of `ProtectedSandbox`."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from belayer import events
from belayer.checkpoint import make_policy
from belayer.config import Config, load_config
from belayer.errors import RequestRefused, RunInUse
from belayer.integrations._loop import LoopThread, before_exit
from belayer.integrations._protected import ProtectedSandbox
from belayer.journal import Journal
from belayer.journal import records as r
from belayer.ownership import RunLabel
from belayer.ownership.reap import reap
from belayer.recovery import EnvironmentKeeper
from belayer.recovery.breaker import CircuitBreaker
from belayer.run_directory import RunDirectory
from belayer.sandbox import Sandbox, Sandboxes
from belayer.sandbox import reap as reap_sandboxes

_T = TypeVar("_T")
_DEFAULT_FOLDERS = 64

log = logging.getLogger("belayer")


class ProtectedHost:
    """The sandboxes of one process on this machine: a run directory with a journal, and everything that keeps them.

    All of it lives on an event loop of its own, so any thread and any other loop may use it.
    """

    def __init__(self, directory: RunDirectory, config: Config, journal: Journal, label: RunLabel) -> None:
        self.directory = directory.path
        self.config = config
        self.journal = journal
        self._sink: events.EventSink = _log_event
        self._run_directory = directory
        self._label = label
        self._loop = LoopThread("belayer sandboxes")
        self._sandboxes: Sandboxes | None = None
        self._policy = make_policy(config.policy)
        self._breaker = CircuitBreaker(max(config.recovery.breaker, 2 * config.sandbox.max_running))
        self._open: dict[str, ProtectedSandbox] = {}
        self._closed = False

    @classmethod
    def open(
        cls, directory: str | Path, config: Config | None = None, *, sink: events.EventSink | None = None
    ) -> ProtectedHost:
        """Open the run directory, and what sandboxes need. Blocks for about a second.

        `engine` and `train` of the configuration are not used. `sink` gets every event instead of the log "belayer".
        Sandboxes that an earlier process left unfinished there are marked as failed: their harness, and the context
        that it held, are gone. Raises `RunError`, `SandboxError`, `StorageFull`.
        """
        config = config or Config()
        opened = RunDirectory.open(
            Path(directory), about={"seed": config.run.seed, "config": config.model_dump(mode="json")}
        )
        label = journal = None
        try:
            reap()
            label = RunLabel.new(str(opened.path))
            journal = Journal(opened.path / "journal", durability=config.run.durability)
            host = cls(opened, config, journal, label)
        except BaseException:
            if journal is not None:
                journal.close()
            if label is not None:
                label.close()
            opened.close()
            raise
        if sink is not None:
            host._sink = sink
        try:
            host.block(host._start())
        except BaseException:
            host.close()
            raise
        before_exit(host.close)
        return host

    async def _start(self) -> None:
        await asyncio.to_thread(reap_sandboxes)
        self._sandboxes = await Sandboxes.open(
            self.config.sandbox,
            self._label,
            checkpoints=self.directory / "checkpoints",
            events=self._tell,
            durable=self.config.run.durability == "host",
        )
        for rollout, history in list(self.journal.histories.items()):
            if history.started is not None and not history.over:
                self.failed(rollout, history.attempt, "HarnessGone", "the process of its harness ended")
                await self._sandboxes.discard(sandbox_name(rollout, history.attempt))

    # -- sandboxes ------------------------------------------------------------------------------------

    async def sandbox(
        self, name: str, *, image: str | None = None, group: str = "harness", task: Any = None
    ) -> ProtectedSandbox:
        """A new protected sandbox; its container is made now. `image`: one of the store, default `sandbox.image`.

        `name` is for people; `task` (plain data) is journalled. Raises `SandboxError`, `BudgetSpent`.
        """
        if self._closed:
            raise RequestRefused(f"the sandboxes of {self.directory} are closed")
        return await self._loop.run(self._new(name, image, group, task))

    async def _new(self, name: str, image: str | None, group: str, task: Any) -> ProtectedSandbox:
        assert self._sandboxes is not None
        rollout = name
        while self.journal.history(rollout).started is not None:
            rollout = f"{name}-{secrets.token_hex(3)}"
        seed = self.config.run.seed
        self.journal.record(
            r.RolloutStarted(rollout=rollout, attempt=0, group=group, task=task, seed=seed, image=image or "")
        )
        self._emit(events.ROLLOUT_STARTED, rollout, group=group, attempt=0)
        keeper = EnvironmentKeeper(
            rollout,
            0,
            sandboxes=self._sandboxes,
            journal=self.journal,
            policy=self._policy,
            config=self.config.recovery,
            breaker=self._breaker,
            sink=self._tell,
            image=image,
        )
        made = ProtectedSandbox(self, rollout, keeper)
        self._open[rollout] = made
        try:
            await keeper.look(_nothing)
        except BaseException as error:
            await made.end(None, why=str(error))
            raise
        return made

    def forget(self, sandbox: ProtectedSandbox) -> None:
        self._open.pop(sandbox.id, None)

    def failed(self, rollout: str, attempt: int, error: str, reason: str) -> None:
        self.journal.record(r.RolloutFailed(rollout=rollout, attempt=attempt, error=error, reason=reason))

    def _tell(self, event: events.Event) -> None:
        self._sink(event)

    def _emit(self, kind: str, subject: str, **data: Any) -> None:
        self._sink(events.Event(kind=kind, subject=subject, data=data))

    # -- for callers without a loop of their own ----------------------------------------------------------

    def block(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of a coroutine of this module, for callers that may block."""
        return self._loop.block(work)

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of `work`, done on the loop that sandboxes belong to."""
        return await self._loop.run(work)

    def call(self, function: Callable[[], object]) -> None:
        """Call `function` on the loop that sandboxes belong to."""
        self._loop.call(function)

    # -- end -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove all sandboxes and everything else of this run from the machine; its directory stays.

        Also done when the interpreter ends. Blocks; harmless when done twice.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._sandboxes is not None:
                self._loop.block(self._stop(self._sandboxes))
        finally:
            self._loop.close()
            self.journal.close()
            self._label.close()
            self._run_directory.close()

    async def _stop(self, sandboxes: Sandboxes) -> None:
        try:
            for sandbox in list(self._open.values()):
                await sandbox.end(None, why="the process of its harness ended")
        finally:
            await sandboxes.close()

    def __enter__(self) -> ProtectedHost:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_shared: ProtectedHost | None = None


def shared_host() -> ProtectedHost:
    """The host that adapters use unless they are given one: opened at its first use, closed when the process ends.

    Its directory is `$BELAYER_RUN_DIR`, or the first of runs/harness, runs/harness-1, … that no other process uses;
    its configuration the TOML file `$BELAYER_CONFIG`, if set, and variables like `BELAYER_POLICY__NAME`.
    """
    global _shared
    if _shared is None or _shared._closed:
        path = os.environ.get("BELAYER_CONFIG")
        config = load_config(Path(path) if path else None)
        named = os.environ.get("BELAYER_RUN_DIR")
        _shared = ProtectedHost.open(named, config) if named else _first_free(config)
    return _shared


def _first_free(config: Config) -> ProtectedHost:
    for number in range(_DEFAULT_FOLDERS):
        try:
            return ProtectedHost.open(f"runs/harness-{number}" if number else "runs/harness", config)
        except RunInUse:
            continue
    raise RunInUse(f"{_DEFAULT_FOLDERS} processes use runs/harness…", next_step="set BELAYER_RUN_DIR")


def sandbox_name(rollout: str, attempt: int) -> str:
    return f"{rollout}.{attempt}".replace("/", "-")


async def _nothing(sandbox: Sandbox) -> None:
    """Looks at nothing: the container is there, that is all."""


def _log_event(event: events.Event) -> None:
    if event.kind == events.FAULT_DETECTED:
        log.warning("%s: fault: %s", event.subject, event.data.get("how"))
    elif event.kind == events.RECOVERED:
        log.warning(
            "%s: %s in %.0f ms, %s actions done again",
            event.subject,
            event.data.get("how"),
            1000 * event.data.get("total_s", 0.0),
            event.data.get("replayed"),
        )
