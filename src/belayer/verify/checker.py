"""A whole run under examination: every rollout, every attempt, every group."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from belayer.journal import records as r
from belayer.journal.history import History
from belayer.journal.segments import scan
from belayer.run_directory import read_about, unread_tail
from belayer.trajectory import trajectory
from belayer.verify.evidence import contradicted, description_problem, read_claims
from belayer.verify.members import failed_groups, missing_members, replacement_problems, short_groups
from belayer.verify.witness import Attempt


class Finding(msgspec.Struct, frozen=True):
    """One broken promise."""

    rollout: str
    attempt: int
    what: str


class Verdict(msgspec.Struct):
    """What the examination of a run came to. `findings` and `damage` are empty for a consistent run."""

    rollouts: int = 0
    finished: int = 0
    delivered: int = 0
    failed: int = 0
    unfinished: int = 0
    restores: int = 0
    truncated_tokens: int = 0
    records: int = 0
    results_gone: int = 0  # taken out by retention: their digests are still compared, their text is not there
    short_groups: list[str] = msgspec.field(default_factory=list)  # members failed for good, which is journalled
    failed_groups: list[str] = msgspec.field(default_factory=list)  # given up, which is journalled
    unread: str = ""  # what the journal ends with that is no record, as a killed driver may leave it
    findings: list[Finding] = msgspec.field(default_factory=list)
    damage: list[str] = msgspec.field(default_factory=list)  # of the run directory, the journal's end among it

    @property
    def consistent(self) -> bool:
        return not self.findings and not self.damage


def verify_run(run: Path) -> Verdict:
    """Examine a run directory: its journal, and what else there proves. Raises `JournalError` for an unreadable one."""
    problem = description_problem(run)
    claims = read_claims(run)
    tail = unread_tail(run)
    verdict, attempts = _examine(scan(run / "journal"))
    if tail is not None:
        verdict.unread = str(tail)
        if not tail.torn or not verdict.records:
            verdict.damage.append(verdict.unread)
    verdict.damage += contradicted(claims, attempts)
    if problem:
        verdict.damage.append(problem)
    elif "gateway" not in (read_about(run) if (run / "run.json").is_file() else {}):
        # a gateway's clients give names and groups as they like, and give requests up
        verdict.short_groups = short_groups(attempts)
        verdict.findings += [Finding(rollout, 0, what) for rollout, what in missing_members(attempts)]
    return verdict


def verify_records(records: Iterable[r.AnyRecord]) -> Verdict:
    """Examine records in journal order."""
    return _examine(records)[0]


def _examine(records: Iterable[r.AnyRecord]) -> tuple[Verdict, dict[str, list[Attempt]]]:
    verdict = Verdict()
    attempts: dict[str, list[Attempt]] = {}
    product: dict[str, History] = {}

    def found(rollout: str, attempt: int, what: str) -> None:
        verdict.findings.append(Finding(rollout, attempt, what))

    for record in records:
        verdict.records += 1
        verdict.results_gone += isinstance(record, r.ActionCompleted) and r.result_gone(record.result) is not None
        mine = attempts.setdefault(record.rollout, [])
        try:
            product.setdefault(record.rollout, History(record.rollout)).apply(record)
        except Exception as error:  # the other code is what is being examined: whatever it does is a finding
            found(record.rollout, record.attempt, f"it cannot be resumed: {error}")
        if isinstance(record, r.RolloutStarted):
            for problem in _start_problems(record, mine):
                found(record.rollout, record.attempt, problem)
            mine.append(Attempt(record))
        elif not mine or record.attempt != mine[-1].start.attempt:
            found(record.rollout, record.attempt, f"a {type(record).__name__} belongs to no attempt that is under way")
        else:
            mine[-1].see(record)

    for rollout, mine in attempts.items():
        verdict.rollouts += 1
        for attempt in mine:
            for breach in attempt.breaches:
                found(rollout, attempt.start.attempt, breach)
            verdict.restores += attempt.restores
            verdict.truncated_tokens += attempt.truncated_tokens
        last = mine[-1] if mine else None
        verdict.finished += bool(last and last.finished)
        verdict.delivered += bool(last and last.acknowledged)
        verdict.failed += bool(last and last.failed)
        verdict.unfinished += bool(last and not last.finished and not last.failed)
        if last is not None and last.finished is not None and not last.breaches:
            for problem in _delivery_problems(last, product[rollout]):
                found(rollout, last.start.attempt, problem)
    verdict.failed_groups = failed_groups(attempts)
    for rollout, problem in replacement_problems(attempts):
        found(rollout, attempts[rollout][-1].start.attempt, problem)
    return verdict, attempts


def _start_problems(start: r.RolloutStarted, before: list[Attempt]) -> list[str]:
    if not before:
        return [] if start.attempt == 0 else [f"its first attempt is number {start.attempt}"]
    last = before[-1]
    problems = []
    if start.attempt != last.start.attempt + 1:
        problems.append(f"attempt {start.attempt} follows after attempt {last.start.attempt}")
    if last.failed is None:
        problems.append(f"attempt {start.attempt} began before attempt {last.start.attempt} had failed")
    if any(getattr(start, name) != getattr(last.start, name) for name in ("seed", "group", "task", "image")):
        problems.append(f"attempt {start.attempt} has another seed, group, task or image: it is another rollout")
    return problems


def _delivery_problems(attempt: Attempt, history: History) -> list[str]:
    """Where what a trainer is given differs from what the records add up to here."""
    assert attempt.finished is not None
    if history.reward != attempt.finished.reward:
        return [f"its reward is {attempt.finished.reward}, a trainer gets {history.reward}"]
    given = trajectory(history)
    return [
        f"a trainer gets other {name} than were journalled"
        for name, expected in attempt.delivered().items()
        if getattr(given, name) != expected
    ]
