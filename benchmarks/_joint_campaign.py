"""The joint campaign: whole rollouts on a living engine and living sandboxes, struck at every moment by every kind.

One undisturbed run says what the rollouts come to. Then the same rollouts are done again and again, each time in a new
run directory, by drivers that strike themselves, their engine, their sandboxes and their disk. A driver that dies is
started again on the same directory, until every rollout is acknowledged. What came of it is then compared with the
undisturbed run, its journal is examined by `belayer.verify`, and the host is searched for what was left behind.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from belayer.config import Config, SandboxConfig
from belayer.engine.prebuild import build_image
from belayer.errors import BelayerError
from belayer.faults.joint_kinds import ENDS_DRIVER, JointFault, pairs, stream
from belayer.ownership import RunLabel
from belayer.ownership.reap import reap
from belayer.sandbox.store import Store

from ._joint_checks import check_deliveries, check_journal, check_leaks, check_round
from ._joint_driver import DISK_FULL, FILLER, Spec
from ._joint_record import Record, Saved, acknowledged_in, outcomes_in, read_log
from ._joint_task import COMMAND_TIMEOUT_S
from ._models import Model, folder

DISK_MIB = 512
LOGS = "logs"
SILENT_S = 75.0  # no record and no blow for so long, although there is work: it hangs
START_S = 400.0  # the same for a driver that has not begun: an image of the engine may have to be made first
UNSTARTED = 5  # drivers of one round whose engine does not come up
FAILURES = 3  # drivers of one round that end by themselves, after which it is given up
SESSIONS = 40  # of one round; a round that needs more makes no progress
TRIES = 3  # rounds in which a failpoint may not be passed before its fault is given up
HANDED = 160  # faults that one driver is given
SAY_EVERY_S = 15.0
ENDS = 4  # faults that end a driver, of which one gets the first chance that comes
DURABLE_ONLY = "checkpoint.write."
POLICIES = ("always", "always", "every-n", "always")


class Campaign:
    """`run` ends once `faults` were injected, a quick one after its first round. `saved` is always current."""

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
        self._model = model
        self._wanted = faults
        self._quick = quick
        self._state = state
        self._say = say
        self._spoke = 0.0
        self._driver: subprocess.Popen[bytes] | None = None
        self._kept = state.with_suffix("").with_suffix("")
        self.saved = Saved(seed, rollouts)

    def resume(self) -> None:
        """Take over what the state file holds of an earlier campaign with the same seed."""
        if self._state.is_file():
            saved = msgspec.json.decode(self._state.read_bytes(), type=Saved)
            if (saved.seed, saved.rollouts) == (self.saved.seed, self.saved.rollouts):
                self.saved = saved

    def run(self) -> None:
        began = time.monotonic() - self.saved.wall_s
        faults = stream(self.saved.seed)
        for _ in range(self.saved.drawn):
            next(faults)
        with RunLabel.new("bench faults") as label, _disk(label) as disk:
            store = Store.open(None, SandboxConfig().store_bytes)  # looked into after every round
            try:
                if not self.saved.calm:
                    self._calm(disk, label)
                while self._goes_on():
                    self._round(disk, label, store, faults)
                    self._save(began)
            finally:
                self._end_driver()
                self._reap()
                store.close()
                self._save(began)
                shutil.rmtree(disk, ignore_errors=True)

    def _goes_on(self) -> bool:
        return self.saved.injected < self._wanted and not (self._quick and self.saved.rounds)

    def _save(self, began: float) -> None:
        self.saved.wall_s = time.monotonic() - began
        self._state.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._state.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(self.saved))
        fresh.rename(self._state)

    # -- runs ----------------------------------------------------------------------------------------------------------
    def _config(self, number: int) -> dict[str, Any]:
        """Of round `number`; -1 is the undisturbed run. Every third writes its checkpoints through to the disk."""
        model = self._model
        calm = number < 0
        return {
            "run": {
                "seed": self.saved.seed,
                "max_concurrent": 20,
                "durability": "host" if durable(number) else "process",
            },
            "engine": {
                "model": str(folder(model)),
                "max_model_len": model.max_model_len,
                "max_num_seqs": model.max_num_seqs,
                "kv_bytes": model.kv_bytes,
                "hang_s": 1.5,
                "prefill_hang_s": 6.0,
                "promote_timeout_s": 3.0,
                "threads": 1,
                "images": True,
            },
            "sandbox": {"memory_bytes": 256 << 20, "images_bytes": 64 << 20, "exec_timeout_s": COMMAND_TIMEOUT_S},
            "policy": {"name": "never" if calm else POLICIES[number % len(POLICIES)]},
            "recovery": {"infra_retries": 60, "attempts": 3, "breaker": 500},
        }

    def _calm(self, disk: Path, label: RunLabel) -> None:
        self._prepare(label)
        self._say("the undisturbed run")
        run = disk / "calm"
        code, text = self._session(run, self._config(-1), [], label)
        if code != 0:
            raise BelayerError(f"the undisturbed run failed ({code}): {text[-2000:]}")
        self.saved.calm = outcomes_in(read_log(_beside(run, ".log")))
        check_journal(self.saved, run, -1)
        shutil.rmtree(run)

    def _prepare(self, label: RunLabel) -> None:
        """See to it that drivers start their engine from an image: in seconds, however often they die."""
        if self._quick:
            return  # there is one already, or making it would take longer than all the rest
        config = Config.model_validate(self._config(0)).engine
        if reason := asyncio.run(build_image(config, label)):
            self._say(f"engines start without an image: {reason}")

    def _round(self, disk: Path, label: RunLabel, store: Store, faults: Iterator[JointFault]) -> None:
        self._prepare(label)
        number = self.saved.rounds
        run = disk / f"round-{number}"
        config = self._config(number)
        waiting = deque(self.saved.pending)
        self.saved.pending = []
        log = _beside(run, ".log")
        known: set[str] = set()  # acknowledged when the last driver ended
        struck: list[Record] = []
        missed: list[JointFault] = []
        seen = unstarted = failures = 0
        failed = ""
        for _ in range(SESSIONS):
            while sum(fault.kind not in ENDS_DRIVER for fault in waiting) < HANDED:
                waiting.append(next(faults))
                self.saved.drawn += 1
            handed = self._hand_out(waiting, durable=durable(number))
            code, text = self._session(run, config, handed, label)
            entries = read_log(log)
            fresh, seen = entries[seen:], len(entries)
            struck += self._take(fresh, handed, waiting, missed, number)
            check_deliveries(self.saved, fresh, known, number)
            known = acknowledged_in(run)
            (disk / FILLER).unlink(missing_ok=True)
            self._progress(struck)
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
        self.saved.rounds += 1
        if wrong or failed:
            self._keep(run, log)
        shutil.rmtree(run, ignore_errors=True)

    def _hand_out(self, waiting: deque[JointFault], *, durable: bool) -> list[JointFault]:
        """What the next driver may do: of what ends it only a few, and what needs a disk only where it has one."""
        ends = [fault for fault in waiting if fault.kind in ENDS_DRIVER][ENDS:]
        return [f for f in waiting if f not in ends and (durable or not f.point.startswith(DURABLE_ONLY))]

    def _session(self, run: Path, config: dict[str, Any], faults: list[JointFault], label: RunLabel) -> tuple[int, str]:
        """One driver from its start to its end: exit code (negative: signal) and the end of what it said."""
        self.saved.sessions += 1
        log = _beside(run, ".log")
        spec = Spec(
            str(run), config, msgspec.to_builtins(self._model), self.saved.rollouts, self.saved.seed, str(log), faults
        )
        told = _beside(run, ".spec")
        told.write_bytes(msgspec.json.encode(spec))
        output = _beside(run, ".out")
        here = Path(__file__).resolve().parent
        # by the path and not by PYTHONPATH: that is a part of what an engine's image is good for
        program = f"import sys; sys.path.insert(0, {str(here.parent)!r}); from {here.name}._joint_driver import main"
        with open(output, "ab") as out:
            start = out.tell()
            command = [sys.executable, "-c", f"{program}; sys.exit(main())", str(told)]
            env = os.environ | label.env
            self._driver = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env)
        code = self._watch(self._driver, run, log)
        self._driver = None
        return code, output.read_bytes()[start:].decode(errors="replace")

    def _watch(self, driver: subprocess.Popen[bytes], run: Path, log: Path) -> int:
        """Wait for its end; a driver in which nothing happens for `SILENT_S` hangs, and is killed."""
        before, begun = len(read_log(log)), False
        last, since = -1, time.monotonic()
        while True:
            try:
                return driver.wait(0.2)
            except subprocess.TimeoutExpired:
                pass
            begun = begun or any(entry["what"] == "ready" for entry in read_log(log)[before:])
            now = _size(log) + sum(_size(path) for path in (run / "journal").glob("*.seg"))
            if now != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > (SILENT_S if begun else START_S):
                self.saved.count("hung", f"{run.name}: nothing happened for {SILENT_S:g} s")
                driver.send_signal(signal.SIGUSR1)
                driver.send_signal(signal.SIGUSR2)
                time.sleep(2)
                self._keep(run, log)
                driver.kill()
                driver.wait()
                return -1000

    def _end_driver(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None and driver.poll() is None:
            driver.terminate()
            try:
                driver.wait(30)
            except subprocess.TimeoutExpired:
                driver.kill()
                driver.wait()

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
        kept = self._kept.with_name(f"{self._kept.name}.{run.name}")
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        if (run / "journal").is_dir():
            shutil.copytree(run / "journal", kept / "journal")
        for path in (log, _beside(run, ".out"), run / "run.json"):
            if path.is_file():
                shutil.copy(path, kept)
        self._say(f"kept in {kept}")

    def _progress(self, struck: list[Record]) -> None:
        if time.monotonic() - self._spoke < SAY_EVERY_S:
            return
        self._spoke = time.monotonic()
        seen = {(record.point, record.kind) for record in [*self.saved.records, *struck] if record.injected}
        wrong = {name: count for name, count in self.saved.found.items() if count}
        self._say(
            f"{self.saved.injected + len(struck)} of {self._wanted} faults, {len(seen)} of {len(pairs())} pairs, "
            f"round {self.saved.rounds}, {self.saved.sessions} drivers; wrong so far: {wrong or 'nothing'}"
        )


class _disk:
    """A small disk of its own for the run directories, that can be filled without hurting anybody."""

    def __init__(self, label: RunLabel) -> None:
        self._point = label.dir / "disk"

    def __enter__(self) -> Path:
        self._point.mkdir()
        self._point.with_name(LOGS).mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "belayer", str(self._point)]
        subprocess.run(command, check=True, capture_output=True)
        return self._point

    def __exit__(self, *exc: object) -> None:
        subprocess.run(["umount", str(self._point)], check=False, capture_output=True)


def durable(number: int) -> bool:
    """Whether the checkpoints of round `number` are written through to the disk."""
    return number % 3 == 2


def _beside(run: Path, suffix: str) -> Path:
    """A file about a round that a full disk does not concern."""
    return run.parent.with_name(LOGS) / f"{run.name}{suffix}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
