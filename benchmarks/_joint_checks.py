"""What the joint campaign looks for after each driver and each round. Everything wrong is counted in `Saved.found`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from belayer.errors import BelayerError
from belayer.journal import read_histories
from belayer.ownership import labels
from belayer.ownership.reap import everything_labelled
from belayer.sandbox.store import Store
from belayer.verify import verify_run

from ._joint_record import Saved, read_log
from ._joint_task import Outcome

GROWTH = {"fds": 16, "threads": 24, "mib": 400}  # of a driver, from its start to its end


def check_deliveries(saved: Saved, entries: list[dict[str, Any]], known: set[str], number: int) -> None:
    """Nothing that the journal had as acknowledged comes again, neither in this driver nor in a later one."""
    over = set(known)
    for entry in entries:
        if entry["what"] == "acknowledged":
            over.add(entry["rollout"])
        elif entry["what"] == "delivered" and entry["outcome"]["rollout"] in over:
            saved.count("duplicated", f"round {number}: {entry['outcome']['rollout']}")


def check_round(saved: Saved, run: Path, number: int, log: Path) -> set[str]:
    """Rollouts of a round that came out wrong."""
    wrong = check_journal(saved, run, number)
    calm = {each.rollout: each for each in saved.calm}
    given: dict[str, Outcome] = {}
    for entry in read_log(log):
        if entry["what"] != "delivered":
            continue
        outcome = msgspec.convert(entry["outcome"], Outcome)
        before = given.setdefault(outcome.rollout, outcome)
        if before != outcome:
            saved.count("changed", f"round {number}: {outcome.rollout} was handed over as two trajectories")
            wrong.add(outcome.rollout)
    for name, undisturbed in calm.items():
        outcome = given.get(name)
        if outcome is None:
            saved.count("lost", f"round {number}: {name}")
            wrong.add(name)
            continue
        saved.struck.append(outcome)
        if not outcome.fickle and (outcome.digest, outcome.reward) != (undisturbed.digest, undisturbed.reward):
            saved.count(
                "changed",
                f"round {number}: {name} has reward {outcome.reward} and {outcome.tokens} tokens, "
                f"undisturbed {undisturbed.reward} and {undisturbed.tokens}",
            )
            wrong.add(name)
    return wrong


def check_journal(saved: Saved, run: Path, number: int) -> set[str]:
    wrong: set[str] = set()
    try:
        verdict = verify_run(run)
        histories = read_histories(run / "journal")
    except BelayerError as error:
        saved.count("inconsistent", f"round {number}: {error.what}")
        return wrong
    saved.verified += verdict.rollouts
    for finding in verdict.findings:
        saved.count("inconsistent", f"round {number}: {finding.rollout}: {finding.what}")
        wrong.add(finding.rollout)
    for name, history in histories.items():
        saved.restores += history.restores
        saved.truncations += history.truncations
        if not history.acknowledged:
            reasons = "; ".join(reason for _, _, reason in history.failures) or "unfinished"
            saved.count("not_acknowledged", f"round {number}: {name}: {reasons}")
            wrong.add(name)
    return wrong


def check_leaks(saved: Saved, run: Path, log: Path, store: Store, number: int) -> None:
    """Everything of this round's drivers must be gone from the host, also what the killed ones had made."""
    entries = read_log(log)
    mine = {entry["label"] for entry in entries if entry["what"] == "opened"}
    left: list[str] = []
    for _ in range(20):
        left = [str(thing) for thing in everything_labelled() if thing.label in mine]
        left += [str(path) for name in mine if (path := store.root / "runs" / name).exists()]
        if not left:
            break
        time.sleep(0.1)
    run_id = run / "checkpoints" / "run_id"
    if run_id.is_file():
        name = run_id.read_text().strip()
        places = (labels.SHM_DIR / f"data-{name}", store.root / "runs-data" / name)
        left += [str(path) for path in places if path.exists()]
    left += [str(path) for path in (run / "checkpoints").glob("*.json")]
    for thing in left:
        saved.count("leaked", f"round {number}: {thing}")
    opened = [entry for entry in entries if entry["what"] == "opened"]
    done = [entry for entry in entries if entry["what"] == "done"]
    if opened and done:
        for what, most in GROWTH.items():
            grown = done[-1]["usage"][what] - opened[-1]["usage"][what]
            if grown > most:
                saved.count("leaked", f"round {number}: {what} of the driver grew by {grown}")
