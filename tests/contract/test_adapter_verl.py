"""The rollout replica under verl's own classes, in verl's Python; no trainer and no Ray (see adapter_verl.py)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.conftest import needs_root, needs_vllm
from tests.contract.adapter_kit import ROOT, harness_python

pytestmark = [pytest.mark.contract, needs_root, needs_vllm]


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
