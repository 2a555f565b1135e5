"""SIGKILL of a writing process: at every write, in the middle of one, and at every step of a compaction.

Children are forked, and end by the real signal; what they leave is read by this process.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from belayer.faults import failpoints
from belayer.journal import Journal, Retention, result_gone, scan
from belayer.journal import records as r
from belayer.verify import verify_records

pytestmark = pytest.mark.crash

WRITER = """
import sys
from belayer.journal import Journal
from belayer.journal import records as r
journal = Journal(__import__("pathlib").Path(sys.argv[1]))
start = len(journal.histories["a"].calls) if "a" in journal.histories else 0
if not start:
    journal.record(r.RolloutStarted(rollout="a", group="g", task=None, seed=1))
print("ready", flush=True)
for number in range(start, 1_000_000):
    journal.record(r.TokensAppended(rollout="a", call=number, source="observation", ids=[number] * (number % 300 + 1)))
"""
SEGMENT_BYTES = 700
APPENDING = ("journal.append.before", "journal.append.after", "journal.segment.created", "journal.segment.headed")
COMPACTING = (
    "journal.segment.created",
    "journal.segment.headed",
    "journal.archive.written",
    "journal.archive.renamed",
    "journal.compact.written",
    "journal.compact.renamed",
)


def in_child(work: Callable[[], None]) -> int:
    """Exit code of a forked process that does `work`; negative: the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(9)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def records() -> list[r.AnyRecord]:
    """Three rollouts with two actions each; the first two are acknowledged, one of them after a failed attempt."""
    made: list[r.AnyRecord] = []
    for rollout, acknowledged in (("a", True), ("b", True), ("c", False)):
        for attempt in (0, 1) if rollout == "b" else (0,):
            fields = {"rollout": rollout, "attempt": attempt}
            made.append(r.RolloutStarted(**fields, group="g", task={"n": 1}, seed=7))
            made.append(r.TokensAppended(**fields, call=0, source="observation", ids=[1, 2], asked="observe"))
            for k in (1, 2):
                result = {"value": f"{rollout} {attempt} {k} {'output ' * 20 * k}"}
                made.append(r.ActionIntended(**fields, call=k, k=k, g=1, asked=f"action {k}"))
                made.append(r.ActionCompleted(**fields, call=k, k=k, g=1, observed=f"o{k}", result=result))
            if rollout == "b" and attempt == 0:
                made.append(r.RolloutFailed(**fields, error="SandboxLost", reason="it died"))
            else:
                made.append(r.RolloutFinished(**fields, reward=0.5))
        if acknowledged:
            made.append(r.Acknowledged(rollout=rollout, attempt=made[-1].attempt))
    return made


def write_from(folder: Path, start: int, **options) -> None:
    journal = Journal(folder, segment_bytes=SEGMENT_BYTES, **options)
    for record in records()[start:]:
        journal.record(record)
    journal.close()


def test_a_killed_writer_leaves_a_whole_journal(tmp_path):
    rng = random.Random(5)
    before = 0
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0.0, 0.05))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        calls = Journal(tmp_path).history("a").calls
        assert len(calls) >= before
        assert all(call.ids == [number] * (number % 300 + 1) for number, call in enumerate(calls))
        before = len(calls)
    assert before > 0
    assert sum(1 for _ in scan(tmp_path)) == before + 1


def killed_again_and_again(folder: Path, arm: Callable[[int], None], **options) -> list[int]:
    """One child after the other goes on where the one before was killed; how many records each of them left."""
    expected, left = records(), list[int]()
    while len(left) < 4 * len(expected):

        def write() -> None:
            arm(len(left))
            journal = Journal(folder, segment_bytes=SEGMENT_BYTES, **options)
            for record in expected[left[-1] if left else 0 :]:
                journal.record(record)
            os._exit(0)  # without `close`, which would sync

        code = in_child(write)
        found = list(scan(folder))
        assert found == expected[: len(found)]
        left.append(len(found))
        if code == 0:
            assert found == expected
            return left
        assert code == -signal.SIGKILL
    raise AssertionError(f"the writers never came to the end: {left}")


@pytest.mark.parametrize("point", APPENDING)
def test_killed_around_every_write(tmp_path, point):
    skip = 0 if point == "journal.append.after" else 1  # each child writes at least one record
    left = killed_again_and_again(tmp_path, lambda number: failpoints.arm(point, "kill", skip=skip))
    if point.startswith("journal.append"):
        assert left == [*range(1, len(records()) + 1), *[len(records())] * (point == "journal.append.after")]
    else:
        assert len(left) > 2


def test_killed_before_a_durable_write_is_synced(tmp_path):
    def arm(number: int) -> None:
        def killed(fd: int) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        os.fdatasync = killed

    left = killed_again_and_again(tmp_path, arm, durability="host")
    assert left == [*range(1, len(records()) + 1), len(records())]


def test_killed_in_the_middle_of_every_write(tmp_path):
    def arm(number: int) -> None:
        real, count = os.write, 0
        share = (0.0, 0.02, 0.3, 0.98)[number % 4]

        def torn(fd: int, data: bytes) -> int:
            nonlocal count
            count += 1
            if count <= 1:
                return real(fd, data)
            real(fd, data[: int(len(data) * share)])
            os.kill(os.getpid(), signal.SIGKILL)
            return 0

        os.write = torn

    left = killed_again_and_again(tmp_path, arm)
    assert set(range(1, len(records()))) <= set(left)


@pytest.mark.parametrize("retention", ["archive", "drop"])
@pytest.mark.parametrize("point", COMPACTING)
def test_killed_at_every_step_of_a_compaction(tmp_path, point, retention):
    expected = records()
    write_from(tmp_path, 0)
    moves_on = point == "journal.compact.renamed"  # then the next child gets one segment further
    code, killed = 0, 0
    while killed < (50 if moves_on else 3):

        def compact(skip: int = 0 if moves_on else killed) -> None:
            failpoints.arm(point, "kill", skip=skip)
            write_from(tmp_path, len(expected), retention=retention)

        code = in_child(compact)
        check_compacted(tmp_path, retention, complete=code == 0)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        killed += 1
    write_from(tmp_path, len(expected), retention=retention)  # a session that nobody kills finishes it
    check_compacted(tmp_path, retention, complete=True)
    assert killed or ("archive" in point and retention == "drop")
    assert not moves_on or (code == 0 and killed >= 2)


def check_compacted(folder: Path, retention: Retention, *, complete: bool) -> None:
    found, expected = list(scan(folder)), records()
    assert len(found) == len(expected)
    for now, before in zip(found, expected, strict=True):
        gone = result_gone(now.result) if isinstance(now, r.ActionCompleted) else None
        if gone is None:
            assert now == before
            assert not (complete and isinstance(now, r.ActionCompleted) and now.rollout in ("a", "b"))
        else:
            assert now.rollout in ("a", "b"), "the output of a rollout that nobody has acknowledged is gone"
            assert gone.archived == (retention == "archive")
    if retention == "archive":
        assert list(scan(folder, archived=True)) == expected
    assert verify_records(found).consistent
    if complete:
        assert not list(folder.glob("*.tmp"))
        assert bool(list(folder.glob("*.arc"))) == (retention == "archive")
