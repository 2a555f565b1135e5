"""summary.json: the numbers of a run, from its events."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from belayer import events as ev
from belayer.errors import StorageFull
from belayer.events import Event
from belayer.observe import MetricsLog, RunSummary, Summary, read_summary

pytestmark = pytest.mark.unit


def event(kind: str, at: float, subject: str = "", **data: Any) -> Event:
    return Event(kind=kind, subject=subject, at=at, data=data)


def of(*events: Event) -> RunSummary:
    return Summary.from_events(list(events)).result()


def test_the_keys_of_the_issue_are_there(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    written = Summary().write(path)
    found = json.loads(path.read_text())
    for key in (
        "rollouts_started", "rollouts_delivered", "lost", "duplicated", "tokens_changed", "tokens_compared",
        "rollouts_compared", "rollouts_identical", "faults_injected", "faults_injected_by_kind", "recoveries",
        "reward_first", "reward_last", "wall_s", "hidden_checkpoint_share", "checkpoints", "steps",
        "seed", "versions", "belayer",
    ):  # fmt: skip
        assert key in found, key
    assert found["tokens_changed"] is None and found["hidden_checkpoint_share"] is None
    assert read_summary(path) == written
    assert [one.name for one in tmp_path.iterdir()] == ["summary.json"]


def test_rollouts_are_counted_once_whatever_happens_to_them() -> None:
    events = [event(ev.RUN_STARTED, 0, seed=3)]
    events += [event(ev.ROLLOUT_STARTED, 1, name) for name in ("a", "b", "c", "d")]
    events += [event(ev.ROLLOUT_FAILED, 2, "b", reason="x"), event(ev.ROLLOUT_STARTED, 3, "b", attempt=1)]
    events += [event(ev.ROLLOUT_FINISHED, 4, name) for name in ("a", "b")]
    events += [event(ev.ROLLOUT_DELIVERED, 5, name) for name in ("a", "b")]
    running = of(*events)
    assert (running.rollouts_started, running.rollouts_delivered, running.rollouts_in_flight) == (4, 2, 2)
    assert (running.lost, running.duplicated, running.rollouts_failed, running.finished) == (0, 0, 0, False)
    ended = of(*events, event(ev.ROLLOUT_DELIVERED, 6, "a"), event(ev.RUN_FINISHED, 7, ok=True))
    assert (ended.rollouts_in_flight, ended.lost, ended.duplicated) == (0, 2, 1)


def test_a_failed_rollout_is_lost_at_once() -> None:
    found = of(event(ev.ROLLOUT_STARTED, 1, "a"), event(ev.ROLLOUT_FAILED, 2, "a"))
    assert (found.lost, found.rollouts_in_flight, found.rollouts_failed) == (1, 0, 1)


def test_the_journals_counts_win() -> None:
    summary = Summary()
    summary(event(ev.ROLLOUT_STARTED, 1, "a"))
    summary.set_rollouts(started=10, delivered=10, duplicated=0)
    summary.set_comparison(
        reference="r", rollouts_compared=10, rollouts_identical=9, tokens_compared=200, tokens_changed=3
    )
    found = summary.result()
    assert (found.rollouts_started, found.rollouts_delivered, found.lost) == (10, 10, 0)
    assert (found.rollouts_counted_from, found.tokens_changed, found.compared_with) == ("journal", 3, "r")


def test_rewards_of_the_first_and_last_steps_and_a_step_done_again() -> None:
    means = [0.0, 0.1, 0.2, 0.3, 0.8, 0.9, 1.0]
    steps = [event(ev.TRAIN_STEP, number, step=number, reward_mean=mean) for number, mean in enumerate(means)]
    found = of(*steps, event(ev.TRAIN_STEP, 9, step=6, reward_mean=0.7))
    assert (found.steps, found.reward_first, found.reward_last) == (7, 0.0, 0.7)
    assert found.reward_first_3 == pytest.approx(0.1)
    assert found.reward_last_3 == pytest.approx(0.8)


def test_recoveries_name_the_injected_fault() -> None:
    found = of(
        event(ev.FAULT_INJECTED, 1, "worker", fault="worker.sigkill"),
        event(ev.FAULT_DETECTED, 1, "worker", fault="worker.exit", how="pidfd"),
        event(ev.RECOVERED, 2, "worker", what="worker", how="promotion", fault="worker.exit", phases={"fence_s": 0.25}),
        event(ev.FAULT_DETECTED, 3, "r1", fault="sandbox", how="init died"),
        event(ev.FAULT_INJECTED, 3, "r1", fault="sandbox.kill"),
        event(ev.RECOVERED, 4, "r1", what="sandbox", how="full restore", fault="init died", phases={}, total_s=0.5),
        event(ev.RECOVERED, 5, "r1", what="sandbox", how="full restore", fault="the driver was restarted", total_s=0.1),
    )
    assert found.faults_injected == 2 and found.faults_detected == 2
    assert found.faults_injected_by_kind == {"sandbox.kill": 1, "worker.sigkill": 1}
    first, second, third = found.recoveries
    assert (first.fault, first.reason, first.total_s, first.phases) == (
        "worker.sigkill", "worker.exit", 0.25, {"fence_s": 0.25},
    )  # fmt: skip
    assert (second.fault, second.reason, second.at) == ("sandbox.kill", "init died", 4)
    assert third.fault == "the driver was restarted"


def test_a_refused_checkpoint_is_no_fault() -> None:
    found = of(event(ev.FAULT_DETECTED, 1, "r1", fault="checkpoint", how="a pipe"))
    assert (found.faults_detected, found.checkpoints_failed) == (0, 1)


def test_hidden_share() -> None:
    spans = [event(ev.CHECKPOINT, at, "r", wall_s=0.5, exposed_s=0.05 * at) for at in range(2)]
    found = of(*spans)
    assert (found.checkpoints, found.checkpoint_wall_s) == (2, 1.0)
    assert found.hidden_checkpoint_share == pytest.approx(0.95)
    waited = of(event(ev.CHECKPOINT, 1, "r", wall_s=0.5, exposed_s=0.501))
    assert waited.hidden_checkpoint_share == 0.0


def test_wall_time_leaves_out_the_pause_before_a_resume(tmp_path: Path) -> None:
    """The engine's events of the resumed driver come before its `run.started`."""
    path = tmp_path / "metrics.jsonl"
    first = [event(ev.OWNER_STATE, 90), event(ev.RUN_STARTED, 100), event(ev.TRAIN_STEP, 130, step=0)]
    second = [
        event(ev.OWNER_STATE, 5000),
        event(ev.RUN_STARTED, 5020, resumed=True),
        event(ev.TRAIN_STEP, 5030, step=1),
        event(ev.RUN_FINISHED, 5031, ok=True),
    ]
    with MetricsLog(path) as log:
        for one in first:
            log(one)
    resumed = Summary.from_metrics(path)
    with MetricsLog(path) as log:
        for one in second:
            log(one)
            resumed(one)
    with MetricsLog(path) as log:
        log(event(ev.RUN_COMPARED, 9000, tokens_changed=0, tokens_compared=5))
    live, again = resumed.result(), Summary.from_metrics(path).result()
    for found in (live, again):
        assert (found.wall_s, found.sessions, found.steps, found.finished) == (71, 2, 2, True)
    assert again.tokens_changed == 0 and live.tokens_changed is None


def test_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    Summary().write(path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("belayer.files.os.fsync", full)
    with pytest.raises(StorageFull, match="no room"):
        Summary().write(path)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["summary.json"]
