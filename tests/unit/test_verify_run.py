"""A run directory that is damaged or lacks something is never called consistent, by nobody who reads it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from belayer import events
from belayer.cli.policy import policy_command
from belayer.cli.show import show_command
from belayer.cli.status import status_command
from belayer.cli.train import resume_command
from belayer.cli.verify import verify_command
from belayer.errors import JournalCorrupt, RunError
from belayer.journal import Journal
from belayer.journal import records as r
from belayer.journal.framing import FRAME_HEADER, SEGMENT_HEADER, frame
from belayer.observe.metrics import MetricsLog
from belayer.run_directory import RunDirectory
from belayer.verify import verify_run
from belayer.verify.checker import verify_records

pytestmark = pytest.mark.unit

OVER = (r.RolloutFinished, {"reward": 1.0}), (r.Acknowledged, {})
LOST = ((r.RolloutFailed, {"error": "BudgetSpent", "reason": "it died"}),)


def rollout(name: str, *then: tuple[type, dict[str, object]], seed: int = 0, task: object = 1) -> list[r.AnyRecord]:
    group = name.partition("~")[0].rpartition("-")[0]
    observed = r.TokensAppended(rollout=name, call=0, source="observation", ids=[1, 2], asked="observe")
    start = r.RolloutStarted(rollout=name, group=group, task=task, seed=seed)
    return [start, observed, *(kind(rollout=name, **fields) for kind, fields in then)]


def made(run: Path, records: Iterable[r.AnyRecord], **about: object) -> Path:
    """A run whose driver has ended; its segment."""
    directory = RunDirectory.open(run, about={"seed": 0, "config": {}, **about})
    journal = Journal(run / "journal")
    for record in records:
        journal.record(record)
    journal.close()
    directory.close()
    (segment,) = (run / "journal").glob("*.seg")
    return segment


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made(tmp_path / "run", [*rollout("r-0-0", *OVER), *rollout("r-0-1", *OVER)])
    return tmp_path / "run"


SHORT = {"group": "r-0", "reason": "it is spent", "first": "it died"}


@pytest.mark.parametrize(
    "then, said",
    [
        ((*LOST, (r.GroupFailed, SHORT)), ""),
        ((*LOST, (r.GroupFailed, SHORT), (r.GroupFailed, SHORT)), "failed twice"),
        ((*LOST, (r.GroupFailed, SHORT | {"group": "r-1"})), "it is of group r-0, not r-1"),
        ((*LOST, (r.GroupFailed, SHORT | {"first": ""})), "without a reason"),
        (((r.GroupFailed, SHORT),), "it had not failed"),
        (((r.RolloutFinished, {"reward": 1.0}), (r.GroupFailed, SHORT)), "it had not failed"),
    ],
)
def test_a_group_is_given_up_only_for_a_member_that_failed(then: Any, said: str):
    verdict = verify_records(rollout("r-0-0", *then))
    assert verdict.consistent == (not said) and verdict.failed_groups in (["r-0"], [])
    assert said in "; ".join(finding.what for finding in verdict.findings)


def segment(run: Path) -> Path:
    return next((run / "journal").glob("*.seg"))


def verified(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = verify_command(run, replay=0, seed=0, as_json=False)
    return code, capsys.readouterr().out


def test_a_whole_journal_has_no_tail(run, capsys):
    code, said = verified(run, capsys)
    assert code == 0 and "consistent" in said and "not readable" not in said


def test_a_run_without_a_record_is_not_called_consistent(tmp_path, capsys):
    path = made(tmp_path / "run", [])
    assert verified(tmp_path / "run", capsys) == (
        0,
        "0 rollouts in 0 records: 0 finished (0 delivered), 0 failed, 0 unfinished; 0 restored environments, "
        "0 tokens cut off\nnothing to examine: nothing was journalled yet\n",
    )
    path.write_bytes(path.read_bytes()[:5])  # killed while it wrote the header: still none
    code, said = verified(tmp_path / "run", capsys)
    assert code == 1 and "5 bytes where the first record must be are not readable: the torn write" in said


@pytest.mark.parametrize("cut", [1, 4, FRAME_HEADER.size, FRAME_HEADER.size + 3])
def test_a_torn_write_is_told_by_all_and_is_no_inconsistency(run, capsys, cut):
    records = verify_run(run).records
    with open(segment(run), "ab") as file:
        file.write(frame(records, b"x" * 100)[:cut])
    told = f"{cut} bytes after record {records - 1} are not readable: the torn write of a killed driver, or damage"
    code, said = verified(run, capsys)
    assert code == 0 and told in said and "consistent" in said
    assert verify_command(run, replay=0, seed=0, as_json=True) == 0
    assert told in json.loads(capsys.readouterr().out)["unread"]
    assert show_command(run, None, as_json=True) == 0
    shown = capsys.readouterr()
    assert told in shown.err and len(json.loads(shown.out)) == 2
    status_command(run, as_json=False, watch=False)
    assert told in capsys.readouterr().out
    status_command(run, as_json=True, watch=False)
    assert json.loads(capsys.readouterr().out)["journal_unread"] == told


def test_nothing_is_said_of_a_write_that_a_living_driver_is_at(run, capsys):
    with open(segment(run), "ab") as file:
        file.write(b"\x20\0\0\0half")
    directory = RunDirectory.open(run)
    try:
        assert verify_run(run).unread == ""
    finally:
        directory.close()
    assert verify_run(run).unread


@pytest.mark.parametrize("tail", [b"\0" * 64, b"garbage that nobody wrote", b"\xff" * 9, "last"])
def test_what_no_write_leaves_behind_is_damage(run, capsys, tail):
    path = segment(run)
    content = bytearray(path.read_bytes())
    if tail == "last":  # one flipped bit in the last record: it is whole, and wrong
        content[-1] ^= 1
    else:
        content += tail
    path.write_bytes(content)
    code, said = verified(run, capsys)
    assert code == 1 and "damage, for no write begins like that" in said and "NOT consistent" in said


def test_a_first_segment_of_garbage_is_no_journal(run, capsys):
    for content in (b"garbage", b"garbage that is longer than a header"):
        segment(run).write_bytes(content)
        for read in (
            lambda: verify_run(run),
            lambda: show_command(run, None, as_json=False),
            lambda: status_command(run, as_json=True, watch=False),
            lambda: Journal(run / "journal"),
        ):
            with pytest.raises(JournalCorrupt, match="not a journal segment") as caught:
                read()
            assert caught.value.next_step
        assert segment(run).read_bytes() == content, "a writer must not throw away what it does not know"


def test_garbage_behind_the_header_of_the_first_segment(run, capsys):
    path = segment(run)
    path.write_bytes(path.read_bytes()[: SEGMENT_HEADER.size] + b"\x05\0\0\0half")
    code, said = verified(run, capsys)
    assert code == 1 and "where the first record must be" in said and "NOT consistent" in said


def test_what_metrics_tell_and_the_journal_does_not(run, capsys):
    with MetricsLog(run / "metrics.jsonl") as metrics:
        for kind in (events.ROLLOUT_STARTED, events.ROLLOUT_FINISHED, events.ROLLOUT_DELIVERED):
            for name in ("r-0-0", "r-0-1"):
                metrics(events.Event(kind=kind, subject=name, data={"attempt": 0}))
    assert verified(run, capsys)[0] == 0
    path = segment(run)
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"r-0-1") - 40])  # between the two rollouts
    code, said = verified(run, capsys)
    assert code == 1 and "metrics.jsonl tells 3 things of rollouts that it does not hold" in said
    assert "r-0-1, attempt 0, was started" in said
    path.write_bytes(whole[:-5])  # only the acknowledgement
    code, said = verified(run, capsys)
    assert code == 1 and "r-0-1, attempt 0, was delivered" in said
    path.unlink()
    code, said = verified(run, capsys)
    assert code == 1 and "6 things" in said


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "\xff"])
def test_a_damaged_description_is_one_clear_error_for_all(run, capsys, content):
    (run / "run.json").write_bytes(content.encode("latin-1"))
    for read in (
        lambda: policy_command(run, None, every=None, reset=False),
        lambda: policy_command(run, "always", every=None, reset=False),
        lambda: RunDirectory.open(run),
    ):
        with pytest.raises(RunError, match="is damaged") as caught:
            read()
        assert "write it anew" in (caught.value.next_step or "")
    assert not (run / "policy.json").exists()
    if content != "{}":  # which says nothing of what status needs
        with pytest.raises(RunError, match="is damaged") as caught:
            status_command(run, as_json=False, watch=False)
        assert caught.value.next_step
    code, said = verified(run, capsys)
    assert code == 1 and "run.json is damaged" in said
    assert show_command(run, "r-0-0", as_json=False) == 0
    assert "run.json is damaged" in capsys.readouterr().err
    # and what the error says to do is enough
    (run / "run.json").write_text('{"format": 1, "seed": 0}')
    assert verified(run, capsys)[0] == 0 and policy_command(run, None, every=None, reset=False) == 0
    RunDirectory.open(run).close()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "7", "\xff", '{"config": 1, "base": 2, "reference": 3}'])
def test_a_damaged_job_is_one_clear_error(run, content):
    (run / "job.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(RunError, match=r"job\.json is damaged") as caught:
        resume_command(run, plain=True)
    assert caught.value.kept and caught.value.next_step


# -- groups ---------------------------------------------------------------------------------------


def findings(tmp_path: Path, *rollouts: list[r.AnyRecord], **about: object) -> list[str]:
    made(tmp_path / "run", [record for one in rollouts for record in one], **about)
    return [finding.what for finding in verify_run(tmp_path / "run").findings]


def test_a_group_that_was_delivered_without_one_of_its_members(tmp_path):
    (what,) = findings(tmp_path, rollout("r-0-0", *OVER), rollout("r-0-2", *OVER))
    assert "group r-0 was delivered with 2 of 3 members: of r-0-1 nothing is said" in what


def test_a_failure_of_one_member_excuses_no_other(tmp_path):
    (what,) = findings(tmp_path, rollout("r-0-0", *OVER), rollout("r-0-2", *LOST))
    assert "of r-0-1 nothing is said" in what


def test_a_group_that_was_delivered_with_fewer_members_than_a_later_one(tmp_path):
    others = [rollout(f"r-1-{index}", *OVER) for index in range(3)]
    (what,) = findings(tmp_path, rollout("r-0-0", *OVER), rollout("r-0-1", *OVER), *others)
    assert "group r-0 was delivered with 2 of 3 members: of r-0-2" in what


@pytest.mark.parametrize(
    "rollouts",
    [
        # somebody is at work on it
        [rollout("r-0-0", *OVER), rollout("r-0-2")],
        # an earlier call asked for more members of fewer groups, and a later group has only begun
        [*(rollout(f"r-0-{index}", *OVER) for index in range(4)), rollout("r-1-0", *OVER)],
        # other names than `Run.rollouts` gives
        [[r.RolloutStarted(rollout=f"x-{index}", group="g", task=0, seed=0)] for index in (1, 5)],
        # replaced by another draw
        [rollout("r-0-0", *LOST), rollout("r-0-0~1", *OVER, seed=5), rollout("r-0-1", *OVER)],
        # a branch of a session, which has the session's seed
        [rollout("r-0-0", *OVER), rollout("r-0-0~1", *OVER)],
    ],
)
def test_groups_that_are_as_they_should_be(tmp_path, rollouts):
    assert findings(tmp_path, *rollouts) == []


def test_a_gateways_names_promise_nothing(tmp_path):
    assert findings(tmp_path, rollout("r-0-0", *OVER), rollout("r-0-2", *OVER), gateway="its own engine") == []


def test_a_failure_that_is_journalled_is_no_silent_loss(tmp_path, capsys):
    assert findings(tmp_path, rollout("r-0-0", *OVER), rollout("r-0-1", *LOST)) == []
    assert verify_run(tmp_path / "run").short_groups == ["r-0"]
    assert "groups of which a member failed for good, as journalled: r-0" in verified(tmp_path / "run", capsys)[1]


@pytest.mark.parametrize(
    "first, second, says",
    [
        (rollout("r-0-0", *OVER[:1]), rollout("r-0-0~1", *OVER, seed=5), ["which has not failed"]),
        (rollout("r-0-0", *OVER), rollout("r-0-0~1", seed=5), ["which has not failed", "it was delivered, and so"]),
        (rollout("r-0-0", *LOST), rollout("r-0-0~1", *OVER, seed=5, task=2), ["another group or task"]),
    ],
)
def test_whoever_replaces_another_has_a_right_to(tmp_path, first, second, says):
    found = findings(tmp_path, first, second)
    assert len(found) == len(says) and all(part in what for part, what in zip(says, found, strict=True)), found
