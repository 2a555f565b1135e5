"""`belayer status`: a run's folder read while its driver lives, after it was killed, and when it is done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.test_observe_report import odd_events

from belayer import events as ev
from belayer.cli.status import status_command
from belayer.errors import RunError
from belayer.events import Event
from belayer.journal import Journal
from belayer.journal import records as r
from belayer.observe import MetricsLog
from belayer.observe.metrics import MetricsTail
from belayer.observe.status import RunReader
from belayer.run_directory import RunDirectory, driver_of

pytestmark = pytest.mark.unit

RECORDED = Path(__file__).resolve().parents[1] / "data" / "recorded_run.jsonl"
# a driver of a run: opens the directory, writes events, and waits to be killed
DRIVER = """
import sys, time
from pathlib import Path
from belayer.run_directory import RunDirectory
from belayer.observe import MetricsLog
from belayer.events import Event
run = Path(sys.argv[1])
held = RunDirectory.open(run, about={"seed": 5})
(run / "job.json").write_text("{}")
with MetricsLog(run / "metrics.jsonl", flush_s=0.01) as log:
    log(Event(kind="run.started", data={"seed": 5, "steps": 4}))
    log(Event(kind="engine.worker", subject="worker", data={"state": "serving", "generation": 3}))
    log(Event(kind="sandbox.running", data={"count": 2}))
    log(Event(kind="rollout.started", subject="a", data={"attempt": 1}))
    log(Event(kind="span.generate", subject="a", data={"turn": 0, "tokens": 7, "wall_s": 0.1}))
    log(Event(kind="span.exec", subject="a", data={"action": 1, "exit_code": 0, "wall_s": 0.1}))
    log(Event(kind="rollout.started", subject="b", data={"attempt": 0}))
    log(Event(kind="fault.detected", subject="b", data={"fault": "sandbox", "how": "died"}))
    log.flush()
    print("up", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def driver(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_living_run_and_then_its_driver_is_killed(driver, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    reader = RunReader(run)
    status = reader.status()
    assert (status.state, status.driver_pid, status.driver_alive) == ("running", driver.pid, True)
    assert (status.seed, status.steps_planned, status.step) == (5, 4, 0)
    assert (status.worker, status.generation, status.sandboxes_running) == ("serving", 3, 2)
    assert status.tokens == 7
    one, two = status.in_flight
    assert (one.rollout, one.attempt, one.turns, one.actions, one.last) == ("a", 1, 1, 1, "action 1")
    assert (two.rollout, two.last) == ("b", "fault: sandbox")
    assert one.age_s is not None and 0 <= one.age_s < 60
    assert status_command(run, as_json=False, watch=False) == 0
    text = capsys.readouterr().out
    assert f"running (process {driver.pid})" in text and "2 in flight" in text and "action 1" in text
    # reading did not take the lock, and a second driver is still kept out
    with pytest.raises(RunError):
        RunDirectory.open(run, about={"seed": 5})

    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    status = reader.status()
    assert (status.state, status.driver_alive) == ("stopped", False)
    assert (status.worker, status.sandboxes_running, status.eta_s) == ("ended", 0, None)
    assert f"process {driver.pid}) is gone" in status.message
    assert f"belayer resume {run}" in status.message and "2 rollouts unfinished" in status.message
    assert status_command(run, as_json=False, watch=True) == 1, "a run that stands still is not watched for ever"
    text = capsys.readouterr().out
    assert "belayer resume" in text and "2 unfinished" in text


def test_a_finished_run_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunDirectory.open(tmp_path / "run", about={"seed": 1}).close()
    (tmp_path / "run" / "metrics.jsonl").write_bytes(RECORDED.read_bytes())
    assert status_command(tmp_path / "run", as_json=True, watch=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "finished" and found["ok"] is True
    assert found["step"] == found["steps_planned"] == 3
    assert found["rollouts_started"] == found["rollouts_delivered"] == 27
    assert found["in_flight"] == []
    assert found["recoveries"]["worker"] == 2
    assert 0 <= found["checkpoint_hidden_share"] <= 1
    assert len(found["recent"]) > 0 and found["recent"][-1]["recovery"]["total_s"] > 0
    assert found["worker"] == "ended"


def test_a_run_without_metrics_is_read_from_its_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    held = RunDirectory.open(run, about={"seed": 9})
    journal = Journal(run / "journal")
    for name in ("a", "b"):
        journal.record(r.RolloutStarted(rollout=name, group="g", task=None, seed=1))
        journal.record(r.TokensAppended(rollout=name, call=0, source="observation", ids=[1, 2], asked="x"))
    journal.record(r.RolloutFinished(rollout="b", reward=1.0))
    journal.close()
    status = RunReader(run).status()
    assert status.state == "running" and status.driver_pid == os.getpid()
    assert (status.rollouts_started, status.rollouts_finished) == (2, 1)
    assert [one.rollout for one in status.in_flight] == ["a"] and status.in_flight[0].age_s is None
    held.close()
    status = RunReader(run).status()
    assert status.state == "stopped" and "start your program again" in status.message
    assert status_command(run, as_json=False, watch=False) == 1
    assert "records no" in capsys.readouterr().out


@pytest.mark.parametrize("events", [False, True])
def test_a_program_that_has_done_everything_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], events: bool
):
    """Nobody announces the end of a program of the user's own: what it began, and what is acknowledged, tells."""
    run = tmp_path / "run"
    held = RunDirectory.open(run, about={"seed": 9})
    journal = Journal(run / "journal")
    if events:
        with MetricsLog(run / "metrics.jsonl") as log:
            for name in ("a", "b", "b~1"):
                log(Event(kind=ev.ROLLOUT_STARTED, subject=name, data={"attempt": 0}))
                log(Event(kind=ev.ROLLOUT_FAILED if name == "b" else ev.ROLLOUT_FINISHED, subject=name))
    for name in ("a", "b", "b~1"):
        journal.record(r.RolloutStarted(rollout=name, group="g", task=None, seed=1))
    journal.record(r.RolloutFailed(rollout="b", error="X", reason="its draw was replaced"))
    for name in ("a", "b~1"):
        journal.record(r.RolloutFinished(rollout=name, reward=1.0))
    journal.record(r.Acknowledged(rollout="a"))
    held.close()
    assert RunReader(run).status().state == "stopped", "one is finished and was not delivered"
    journal.record(r.Acknowledged(rollout="b~1"))
    journal.close()
    status = RunReader(run).status()
    assert status.state == "finished" and "nothing is left to do" in status.message
    assert status_command(run, as_json=False, watch=False) == 0
    assert "unfinished" not in capsys.readouterr().out
    (run / "job.json").write_text("{}")
    assert RunReader(run).status().state == "stopped", "a training job says itself when it is done"


def test_a_program_that_began_nothing_is_not_finished(tmp_path: Path) -> None:
    RunDirectory.open(tmp_path / "run", about={"seed": 1}).close()
    assert RunReader(tmp_path / "run").status().state == "stopped"


def test_a_resumed_run_is_starting_until_it_says_otherwise(tmp_path: Path) -> None:
    run = tmp_path / "run"
    held = RunDirectory.open(run, about={"seed": 1})
    with MetricsLog(run / "metrics.jsonl") as log:
        log(Event(kind=ev.RUN_STARTED, at=1000.0, data={"seed": 1, "steps": 2}))
        log(Event(kind=ev.ROLLOUT_STARTED, subject="a", at=1001.0, data={"attempt": 0}))
    reader = RunReader(run)
    assert reader.status(now=1010.0).state == "running"
    with MetricsLog(run / "metrics.jsonl") as log:
        log(Event(kind=ev.OWNER_STATE, subject="owner", at=5000.0, data={"state": "started"}))
    assert reader.status().state == "starting"
    with MetricsLog(run / "metrics.jsonl") as log:
        log(Event(kind=ev.RUN_STARTED, data={"seed": 1, "steps": 2, "resumed": True}))
    assert reader.status().state == "running"
    held.close()


def test_a_silent_run_is_said_to_be_silent(tmp_path: Path) -> None:
    run = tmp_path / "run"
    held = RunDirectory.open(run, about={"seed": 1})
    with MetricsLog(run / "metrics.jsonl") as log:
        log(Event(kind=ev.RUN_STARTED, data={"seed": 1}))
    assert "nothing was heard of it for" in RunReader(run).status(now=time.time() + 300).message
    held.close()


def test_a_gateway_that_is_down_is_served_again_and_not_resumed(tmp_path: Path) -> None:
    RunDirectory.open(tmp_path / "gate", about={"seed": 1, "gateway": "external servers"}).close()
    message = RunReader(tmp_path / "gate").status().message
    assert "belayer serve" in message and "resume" not in message


def test_a_damaged_description_is_said(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("[1")
    with pytest.raises(RunError, match="damaged"):
        RunReader(tmp_path)


@settings(max_examples=25, deadline=None)
@given(st.lists(odd_events, max_size=25))
def test_no_event_breaks_the_status(events: list[Event]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "run.json").write_text("{}")
        lines = [msgspec.json.encode(event) for event in events]
        (Path(folder) / "metrics.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
        msgspec.json.encode(RunReader(Path(folder)).status())


def test_no_run_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a run directory"):
        RunReader(tmp_path)
    assert driver_of(tmp_path) == (None, False)


def test_a_process_that_has_the_dead_drivers_number_is_not_the_driver(tmp_path: Path) -> None:
    RunDirectory.open(tmp_path / "run", about={"seed": 1}).close()
    assert driver_of(tmp_path / "run") == (os.getpid(), False), "this process lives, but holds no lock"


def test_the_tail_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == [] and not tail.exists
    line = json.dumps({"kind": "a", "at": 1.0}).encode() + b"\n"
    path.write_bytes(line + line[:8])
    assert [event.kind for event in tail.read()] == ["a"]
    with open(path, "ab") as stream:
        stream.write(line[8:] + b"no event\n")
    assert len(tail.read()) == 1
    assert tail.read() == []
