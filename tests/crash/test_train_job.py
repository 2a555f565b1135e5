"""The whole job, as a user runs it: killed, stopped and resumed, with faults, and nothing is lost or changed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from tests.conftest import needs_root, needs_sandboxes, needs_vllm

from belayer.journal import compare_runs, read_histories
from belayer.observe.dashboard import dashboard_json
from belayer.ownership.reap import everything_labelled, leftovers

pytestmark = [pytest.mark.crash, needs_root, needs_vllm, needs_sandboxes]

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = """
[train]
task = "shell_task.py:ShellTask"
model = "tiny_model.py:build"
steps = 2
groups = 3
group_size = 2
warm_start_steps = 40
[engine]
max_model_len = 128
kv_bytes = 16777216
max_num_seqs = 8
[sandbox]
memory_bytes = 134217728
[policy]
name = "always"
[faults]
worker_kill = 1
worker_stop = 0
sandbox_kill = 2
sandbox_damage = 1
[run]
seed = 3
"""


def belayer(*arguments: str, **kwargs) -> subprocess.Popen:
    command = [sys.executable, "-m", "belayer.cli", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, **kwargs
    )


def output_of(process: subprocess.Popen, timeout: float = 240) -> str:
    try:
        return process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"hangs:\n{process.communicate()[0]}") from None


def last_metrics_of(process: subprocess.Popen, deadline_s: float = 240) -> str:
    """The page that a run serves, as it was shortly before the run's end."""
    assert process.stdout is not None
    url = next(line.removeprefix("metrics: ").strip() for line in process.stdout if line.startswith("metrics: "))
    page, deadline = "", time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                page = answer.read().decode()
        except OSError:
            return page
        time.sleep(0.1)
    raise AssertionError("the page is served for ever")


def wait_for_tokens(run: Path, count: int, process: subprocess.Popen, deadline_s: float = 120) -> None:
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"ended early:\n{process.communicate()[0]}")
        if (run / "journal").is_dir():
            tokens = sum(len(history.context()) for history in read_histories(run / "journal").values())
            if tokens >= count:
                return
        time.sleep(0.05)
    raise AssertionError("no tokens in time")


def label_of(run: Path) -> str:
    for info in Path("/run/belayer").glob("bly-*/info.json"):
        if json.loads(info.read_text())["purpose"] == str(run):
            return info.parent.name
    raise AssertionError("the run has no label")


def labelled(name: str) -> list:
    return [thing for thing in everything_labelled() if thing.label == name]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    for name in ("shell_task.py", "tiny_model.py"):
        (folder / name).write_text((REPOSITORY / "examples" / name).read_text())
    (folder / "small.toml").write_text(SMALL)
    # with an engine image each of the many starts below takes a second instead of fifteen
    process = belayer("prepare", str(folder / "small.toml"))
    text = output_of(process)
    assert process.returncode == 0 and "engine image" in text, text
    return folder / "small.toml"


def test_killed_stopped_resumed_with_faults_equals_the_calm_run(config, tmp_path):
    rng = random.Random(11)
    run, calm = tmp_path / "run", tmp_path / "calm"

    # kill -9 of the driver in the middle of the first step
    process = belayer("train", str(config), "--inject", "--run-dir", str(run), "--plain")
    wait_for_tokens(run, 60 + rng.randrange(60), process)
    name = label_of(run)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and any(thing.kind == "process" for thing in labelled(name)):
        time.sleep(0.05)
    assert not [thing for thing in labelled(name) if thing.kind == "process"], "processes outlive the driver"
    status = belayer("status", str(run), "--json")
    found = json.loads(output_of(status))
    assert (status.returncode, found["state"], found["driver_alive"]) == (1, "stopped", False)
    assert f"process {process.pid}) is gone" in found["message"] and f"belayer resume {run}" in found["message"]
    reaping = belayer("doctor", "--reap", "--json")
    report = json.loads(output_of(reaping))
    assert not report["not_removed"]
    assert not leftovers(name) and not labelled(name)

    # Ctrl-C in the middle of what is left of the first step: the second takes no longer than our looking at it
    process = belayer("resume", str(run), "--plain")
    wait_for_tokens(run, 140, process)
    name = label_of(run)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does: to the whole process group
    text = output_of(process, 60)
    assert process.returncode == 130, text
    assert "belayer resume" in text
    assert not labelled(name), "Ctrl-C left something behind"

    # and to the end
    process = belayer("resume", str(run), "--plain", "--metrics-port", "0")
    page = last_metrics_of(process)
    text = output_of(process)
    assert re.search(r"^belayer_rollouts_finished_total [1-9]", page, re.MULTILINE), page
    # series of a family come with its first event, the family itself is always there
    families = set(re.findall(r"^# TYPE (belayer_\w+)", page, re.MULTILINE))
    asked = {re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"belayer_\w+", dashboard_json())}
    assert len(asked) > 30 and asked <= families
    summary = json.loads((run / "summary.json").read_text())
    assert summary["finished"] and summary["ok"], text
    assert summary["rollouts_started"] == summary["rollouts_delivered"] == 12
    assert summary["lost"] == summary["duplicated"] == 0
    assert summary["sessions"] >= 2

    # the same seed, undisturbed
    text = output_of(belayer("train", str(config), "--run-dir", str(calm), "--plain"))
    assert json.loads((calm / "summary.json").read_text())["ok"], text
    found = compare_runs(run, calm)
    assert found.same and found.rollouts_compared == 12, found
    verdict = json.loads(output_of(belayer("verify", str(run), "--replay", "3", "--json")))
    assert verdict["consistent"] and verdict["delivered"] == 12, verdict
    assert verdict["replay"]["actions"] > 0 and not verdict["replay"]["differences"], verdict
    mine, theirs = (json.loads((x / "trainer" / "checkpoint-2" / "complete.json").read_text()) for x in (run, calm))
    assert mine["weights_digest"] == theirs["weights_digest"]


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (("steps = 2", "stepps = 2"), 2, "did you mean `train.steps`"),
        (('"tiny_model.py:build"', '"nowhere"'), 2, "train.model"),
        (('"shell_task.py:ShellTask"', '"shell_task.py:ShelTask"'), 2, "did you mean `ShellTask`"),
        (("[sandbox]", '[sandbox]\nimage = "nosuch"'), 1, "nosuch"),
    ],
)
def test_bad_input_is_one_clear_error(config, tmp_path, change, code, said):
    bad = config.with_name(f"bad-{abs(hash(change))}.toml")
    bad.write_text(SMALL.replace(*change))
    process = belayer("train", str(bad), "--run-dir", str(tmp_path / "run"), "--plain")
    text = output_of(process, 90)
    assert process.returncode == code, text
    assert said in text and "Traceback" not in text, text


def test_a_run_directory_with_a_run_in_it_is_not_overwritten(config, tmp_path):
    (tmp_path / "run.json").write_text('{"format": 1}')
    process = belayer("train", str(config), "--run-dir", str(tmp_path))
    text = output_of(process, 60)
    assert process.returncode == 1 and "holds a run already" in text, text
    assert (tmp_path / "run.json").read_text() == '{"format": 1}'


def test_a_full_disk_stops_the_job_with_one_error(config, small_disk):
    process = belayer("train", str(config), "--run-dir", str(small_disk / "run"), "--plain")
    text = output_of(process, 120)
    assert process.returncode == 1 and "no room" in text.lower() and "Traceback" not in text, text
