"""Harnesses with their own runners, in real sandboxes that are killed in the middle of the task."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import needs_sandboxes
from tests.contract.adapter_kit import ROOT, harness_python, run_struck

from belayer.journal.journal import read_histories

pytestmark = [pytest.mark.contract, needs_sandboxes]


def only_history(folder: Path):
    histories = read_histories(folder / "runs/harness/journal")
    assert len(histories) == 1
    return next(iter(histories.values()))


def test_mini_swe_agent_does_not_notice_a_kill(tmp_path):
    python = harness_python("agents", "minisweagent")
    said, struck = run_struck([python, str(ROOT / "examples/mini_swe_agent.py")], tmp_path, "/task/attempts-mini")
    assert struck and "Submitted 10" in said, said
    assert "<output>\nbegun\n</output>" in said, "the first command has happened once"
    history = only_history(tmp_path)
    assert history.restores == 1 and history.reward == 1.0 and len(history.actions()) == 4


def test_swe_rex_session_outlives_a_kill(tmp_path):
    python = harness_python("agents", "swerex")
    said, struck = run_struck([python, str(ROOT / "examples/swe_rex.py")], tmp_path, "/srv/begun-swerex")
    assert struck and "['3', '/srv']" in said, said
    assert only_history(tmp_path).restores == 1


def test_harbor_trial_with_the_oracle_is_rewarded_after_a_kill(tmp_path):
    python = harness_python("harbor", "harbor")
    said, struck = run_struck([python, str(ROOT / "examples/harbor_trial.py")], tmp_path, "/app/attempts-harbor")
    assert struck and "rewards {'reward': 1.0}" in said, said
    assert only_history(tmp_path).restores == 1
    results = [json.loads(path.read_text()) for path in tmp_path.glob("runs/harbor-trials/*/result.json")]
    assert [result["exception_info"] for result in results] == [None]


def test_a_verifiers_rollout_is_scored_as_if_nothing_had_died(tmp_path):
    python = harness_python("verifiers", "verifiers")
    commands = ["echo a >> /task/log; touch /task/begun-verifiers; sleep 1", "cd /task; echo $((19+23)) > sum; cat log"]
    model = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/contract/adapter_model.py"), *commands], stdout=subprocess.PIPE, text=True
    )
    try:
        assert model.stdout is not None
        url = model.stdout.readline().strip()
        said, struck = run_struck(
            [python, str(ROOT / "examples/verifiers_rollout.py"), url, "scripted"],
            tmp_path,
            "/task/begun-verifiers",
            OPENAI_API_KEY="none",
        )
    finally:
        model.kill()
        model.communicate()
    assert struck and "errors [] reward 1.0" in said, said
    history = only_history(tmp_path)
    assert history.restores == 1
    seen = [call.result["exec"]["stdout"] for call in history.actions() if '"shell"' in call.asked]
    assert seen == [b"", b"a\n"], "the first command has happened once"


MINI_DIVERGES = """
import os, signal
from minisweagent.agents.default import DefaultAgent
from minisweagent.models.test_models import DeterministicModel, make_output
from belayer.integrations.minisweagent import BelayerEnvironment

environment = BelayerEnvironment()
commands = ["cat /proc/sys/kernel/random/uuid", "echo on", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
outputs = [make_output("", [{"command": command}]) for command in commands]


class Model(DeterministicModel):
    def query(self, messages, **kwargs):
        if self.current_index == 0:
            os.kill(environment.sandbox.current.init_pid, signal.SIGKILL)
        return super().query(messages, **kwargs)


agent = DefaultAgent(Model(outputs=outputs), environment, system_template="s", instance_template="t", cost_limit=0)
try:
    agent.run("x")
except Exception as error:
    print(type(error).__name__, len(agent.messages), agent.messages[-1]["extra"]["exit_status"])
"""


def test_an_agent_whose_context_cannot_hold_is_ended_and_not_told_a_story(tmp_path):
    python = harness_python("agents", "minisweagent")
    said, _ = run_struck([python, "-c", MINI_DIVERGES], tmp_path, "/nothing", BELAYER_POLICY__NAME="never")
    # system, task, turn 1, its observation, turn 2, and the end: no observation of `echo on`
    assert "ContextDiverged 6 ContextDiverged" in said, said


def test_without_the_package_the_error_names_the_extra():
    program = """
import importlib, sys
for module in ("harbor", "minisweagent", "swerex", "verifiers", "verl"):
    sys.modules[module] = None
    try:
        importlib.import_module(f"belayer.integrations.{module}")
    except ImportError as error:
        print(str(error).splitlines()[-1].strip())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines() == [
        f"next: pip install 'belayer[{extra}]'"
        for extra in ("harbor", "mini-swe-agent", "swe-rex", "verifiers", "verl")
    ]


def test_a_dockerfile_is_followed_or_refused_by_line(tmp_path):
    from belayer.integrations._dockerfile import read

    file = tmp_path / "Dockerfile"
    file.write_text(
        "# a comment\nFROM python:3.12 \nWORKDIR /app\nENV A=1 B='two words'\nENV OLD style\n"
        'RUN echo one && \\\n    echo two\nWORKDIR sub\nCOPY a b/ ./\nCMD ["x"]\n'
    )
    recipe = read(file)
    assert (recipe.base, recipe.workdir) == ("python:3.12", "/app/sub")
    assert recipe.env == {"A": "1", "B": "two words", "OLD": "style"}
    assert [step.command or step.sources for step in recipe.steps] == [
        "mkdir -p /app",
        "echo one && echo two",
        "mkdir -p /app/sub",
        ("a", "b/"),
    ]
    for wrong in ("FROM a AS b\nFROM c", "FROM a\nADD http://x /", "FROM a\nCOPY --from=b x y", "RUN x"):
        file.write_text(wrong)
        with pytest.raises(ValueError, match=r"Dockerfile:\d|no FROM"):
            read(file)
