"""The joint campaign: whole rollouts on a living engine and living sandboxes, struck at every moment by every kind.

One undisturbed run says what the rollouts come to. Then the same rollouts are done again and again, each time in a new
run directory, by drivers that strike themselves, their engine, their sandboxes and their disk. A driver that dies is
started again on the same directory, until every rollout is acknowledged. What came of it is then compared with the
undisturbed run, its journal is examined by `belayer.verify`, and the host is searched for what was left behind.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import signal
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from belayer.config import Config, SandboxConfig
from belayer.engine.prebuild import build_image
from belayer.errors import BelayerError
from belayer.faults.joint_kinds import ENDS_DRIVER, JointFault, few, pairs, stream
from belayer.ownership import RunLabel
from belayer.ownership.reap import reap
from belayer.sandbox.store import Store

from . import _campaign
from ._joint_checks import check_deliveries, check_journal, check_leaks, check_round
from ._joint_driver import DISK_FULL, FILLER, Spec
from ._joint_record import Record, Saved, acknowledged_in, outcomes_in, read_log
from ._joint_session import Session, beside, disk
from ._joint_settings import CALM, Setting, config, plan, setting
from ._models import Model, folder

UNSTARTED = 5  # drivers of one round whose engine does not come up
FAILURES = 3  # drivers of one round that end by themselves, after which it is given up
SESSIONS = 40  # of one round; a round that needs more makes no progress
TRIES = 3  # rounds in which a failpoint may not be passed before its fault is given up
HANDED = 160  # faults that one driver is given
ENDS = 4  # faults that end a driver, of which one gets the first chance that comes
DRIVER_LIVES_S = 30.0  # before it is struck
QUICK_LIVES_S = 6.0


class Campaign(_campaign.Campaign[Saved]):
    """`run` ends once `faults` were injected.

    A quick one does a single round with a few rollouts, and strikes each kind of fault a few times (see `few`).
    """

    def __init__(
        self,
        model: Model,
        *,
        faults: int,
        rollouts: int,
        seed: int,
        quick: bool,
        state: Path,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(Saved(seed=seed, rollouts=rollouts, plan=plan(seed, rollouts)), state=state, say=say)
        self._model = model
        self._wanted = faults
        self._quick = quick
        self._session: Session | None = None

    @property
    def done(self) -> int:
        return self.saved.injected

    def same_plan(self, earlier: Saved) -> bool:
        return earlier.plan == self.saved.plan

    def run(self) -> None:
        seed = self.saved.seed
        faults = iter(few(seed, setting(0).comes_to)[: self._wanted]) if self._quick else stream(seed)
        for _ in range(self.saved.drawn):
            next(faults)
        with RunLabel.new("bench faults") as label, disk(label) as place:
            store = Store.open(None, SandboxConfig().store_bytes)  # looked into after every round
            try:
                if not self.saved.calm:
                    self._calm(place, label)
                while self._goes_on():
                    self._round(place, label, store, faults)
                    self.save()
            finally:
                if self._session is not None:
                    self._session.end()
                self._reap()
                store.close()
                shutil.rmtree(place, ignore_errors=True)

    def _goes_on(self) -> bool:
        return self.saved.injected < self._wanted and not (self._quick and self.saved.rounds)

    # -- runs ----------------------------------------------------------------------------------------------------------
    def _calm(self, place: Path, label: RunLabel) -> None:
        self._prepare(label)
        self._say(f"the undisturbed run: {self.saved.rollouts} rollouts")
        run = place / "calm"
        code, text = self._drive(run, CALM, [], label)
        if code != 0:
            raise BelayerError(f"the undisturbed run failed ({code}): {text[-2000:]}")
        self.saved.calm = outcomes_in(read_log(beside(run, ".log")))
        check_journal(self.saved, run, -1)
        shutil.rmtree(run)

    def _prepare(self, label: RunLabel) -> None:
        """See to it that drivers start their engine from an image: in seconds, however often they die."""
        if self._quick:
            return  # there is one already, or making it would take longer than all the rest
        told = Config.model_validate(config(CALM, self._model, folder(self._model), self.saved.seed))
        if reason := asyncio.run(build_image(told.engine, label)):
            self._say(f"engines start without an image: {reason}")

    def _round(self, place: Path, label: RunLabel, store: Store, faults: Iterator[JointFault]) -> None:
        self._prepare(label)
        number = self.saved.rounds
        run, how = place / f"round-{number}", setting(number)
        waiting = deque(self.saved.pending)  # a round that is stopped in the middle is done again, with the same faults
        drawn = self.saved.drawn
        log = beside(run, ".log")
        known: set[str] = set()  # acknowledged when the last driver ended
        struck: list[Record] = []
        missed: list[JointFault] = []
        seen = unstarted = failures = 0
        failed = ""
        for _ in range(SESSIONS):
            wanted = HANDED - sum(fault.kind not in ENDS_DRIVER for fault in waiting)
            for fault in itertools.islice(faults, max(0, wanted)):
                waiting.append(fault)
                drawn += 1
            handed = self._hand_out(waiting, how)
            code, text = self._drive(run, how, handed, label)
            entries = read_log(log)
            fresh, seen = entries[seen:], len(entries)
            struck += self._take(fresh, handed, waiting, missed, number)
            check_deliveries(self.saved, fresh, known, number)
            known = acknowledged_in(run)
            (place / FILLER).unlink(missing_ok=True)
            self.tell(self._how_far, struck)
            if code == 0:
                break
            if code in (DISK_FULL, -signal.SIGKILL):
                continue
            if not any(entry["what"] == "ready" for entry in fresh) and unstarted < UNSTARTED:
                unstarted += 1  # a host that is too busy to start an engine in time; nothing was struck yet
                self.saved.unstarted.append(text[-600:])
                continue
            failed = f"round {number}: a driver ended with {code}: {text[-1500:]}"
            self.saved.count("failed", failed)
            failures += 1
            if failures == FAILURES:
                break
        else:
            failed = f"round {number} was not over after {SESSIONS} drivers"
            self.saved.count("failed", failed)
        wrong = check_round(self.saved, run, number, log)
        check_leaks(self.saved, run, log, store, number)
        for record in struck:
            record.survived = not failed and record.rollout not in wrong and not (wrong and not record.rollout)
        self.saved.records += struck
        for fault in missed:
            self.saved.tries[fault.index] = tried = self.saved.tries.get(fault.index, 0) + 1
            if tried < TRIES:
                waiting.append(fault)
            else:
                self.saved.records.append(Record(fault.index, fault.point, fault.kind, why="never passed"))
        self.saved.pending = sorted(waiting, key=lambda fault: fault.index)
        self.saved.drawn = drawn
        self.saved.rounds += 1
        if wrong or failed:
            self._keep(run, log)
        shutil.rmtree(run, ignore_errors=True)

    def _hand_out(self, waiting: deque[JointFault], how: Setting) -> list[JointFault]:
        """What the next driver may do: of what ends it only a few, and only at points that it comes to."""
        possible = [fault for fault in waiting if how.comes_to(fault.point)]
        later = [fault for fault in possible if fault.kind in ENDS_DRIVER][ENDS:]
        return [fault for fault in possible if fault not in later]

    def _drive(self, run: Path, how: Setting, faults: list[JointFault], label: RunLabel) -> tuple[int, str]:
        """One driver from its start to its end: exit code (negative: signal) and what it said."""
        self.saved.sessions += 1
        log = beside(run, ".log")
        spec = Spec(
            run=str(run),
            config=config(how, self._model, folder(self._model), self.saved.seed),
            model=msgspec.to_builtins(self._model),
            rollouts=self.saved.rollouts,
            seed=self.saved.seed,
            log=str(log),
            faults=faults,
            lives_s=QUICK_LIVES_S if self._quick else DRIVER_LIVES_S,
        )

        def hangs(why: str) -> None:
            self.saved.count("hung", why)
            self._keep(run, log)

        session = self._session = Session(spec, label, hangs)
        code = session.wait()
        self._session = None
        return code, session.text

    def _reap(self) -> None:
        """What killed drivers have left; the next driver would do the same."""
        from belayer.sandbox import reap as reap_sandboxes

        reap()
        reap_sandboxes()

    # -- what came of it -----------------------------------------------------------------------------------------------
    def _take(
        self,
        entries: list[dict[str, Any]],
        handed: list[JointFault],
        waiting: deque[JointFault],
        missed: list[JointFault],
        number: int,
    ) -> list[Record]:
        """The faults that a driver's log speaks of; they are not waiting any more."""
        by_index = {fault.index: fault for fault in handed}
        struck: list[Record] = []
        for entry in entries:
            fault = by_index.get(entry.get("index", -1))
            if fault is None or fault not in waiting:
                continue
            if entry["what"] == "struck":
                waiting.remove(fault)
                struck.append(
                    Record(
                        fault.index,
                        fault.point,
                        fault.kind,
                        injected=True,
                        why=entry["target"],
                        rollout=entry["rollout"],
                        round=number,
                    )
                )
            elif entry["what"] == "missed":
                waiting.remove(fault)
                missed.append(fault)
            elif entry["what"] == "hung":
                self.saved.count("hung", entry["why"])
        return struck

    def _keep(self, run: Path, log: Path) -> None:
        """Journal, log and output of a round that went wrong, for whoever looks for the reason."""
        kept = self._state.with_name(f"{self._state.name.removesuffix('.state.json')}.{run.name}")
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        if (run / "journal").is_dir():
            shutil.copytree(run / "journal", kept / "journal")
        for path in (log, beside(run, ".out"), run / "run.json"):
            if path.is_file():
                shutil.copy(path, kept)
        self._say(f"kept in {kept}")

    def _how_far(self, struck: list[Record]) -> str:
        seen = {(record.point, record.kind) for record in [*self.saved.records, *struck] if record.injected}
        return (
            f"{self.saved.injected + len(struck)} of {self._wanted} faults, {len(seen)} of {len(pairs())} pairs, "
            f"round {self.saved.rounds}, {self.saved.sessions} drivers"
        )
