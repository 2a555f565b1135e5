"""The adapters of verl under its own classes, in its Python; no trainer and no Ray (see adapter_verl.py)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.conftest import needs_root, needs_sandboxes, needs_vllm
from tests.contract.adapter_kit import ROOT, harness_python, run_struck

from belayer.journal.journal import read_histories

pytestmark = pytest.mark.contract


@needs_root
@needs_vllm
@pytest.mark.timeout(300)
def test_verls_clients_notice_no_kill_and_get_new_weights(tmp_path: Path) -> None:
    python = harness_python("verl", "verl")
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    env["VERL_USE_EXTERNAL_MODULES"] = "belayer.integrations.verl_rollout"
    done = subprocess.run(
        [python, str(ROOT / "tests/contract/adapter_verl.py"), str(tmp_path)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = done.stdout.splitlines()
    assert said[-4:] == ["survived a kill", "new weights", "partial rollout", "all of it"], done.stdout


def run_loop(what: str, folder: Path, file: str) -> tuple[str, bool]:
    python = harness_python("verl", "verl")
    program = str(ROOT / "tests/contract/adapter_verl_agent.py")
    return run_struck([python, program, what], folder, file, PYTHONPATH=f"{ROOT / 'src'}:{ROOT}")


@needs_sandboxes
def test_verls_tool_agent_loop_does_not_notice_a_kill(tmp_path: Path) -> None:
    said, struck = run_loop("kept", tmp_path, "/task/begun-verl")
    assert struck and "reward 1.0 turns" in said, said
    seen = json.loads(next(line for line in said.splitlines() if line.startswith("seen ")).removeprefix("seen "))
    assert "[tool]a\n" in seen and "a\na\n" not in seen, "the first command has happened once"
    assert "[exit code 3]" in seen
    (history,) = read_histories(tmp_path / "runs/harness/journal").values()
    assert history.restores == 1 and history.reward == 1.0


@needs_sandboxes
def test_a_sample_whose_context_cannot_hold_has_no_reward(tmp_path: Path) -> None:
    """verl would make a message for the model of it; the adapter ends the sample."""
    said, _ = run_loop("diverges", tmp_path, "/nobody-makes-this")  # it strikes itself
    assert "ended by ContextDiverged after turn 2" in said, said
    (history,) = read_histories(tmp_path / "runs/harness/journal").values()
    assert history.reward is None
