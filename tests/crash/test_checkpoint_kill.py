"""SIGKILL of the driver at every step of a checkpoint's publication, background write, deletion and transfer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.checkpoint_kit import tiny_image
from tests.conftest import needs_sandboxes

pytestmark = [pytest.mark.crash, needs_sandboxes]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("steps", ["publish", "transfer"])
def test_a_killed_driver_leaves_whole_checkpoints_only(tmp_path, steps):
    folder = tmp_path / "drivers"
    folder.mkdir()
    with tiny_image(tmp_path):
        done = subprocess.run(
            [sys.executable, str(Path(__file__).parent / "checkpoint_killer.py"), str(folder), steps],
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
            cwd=ROOT,
            check=False,
            capture_output=True,
            text=True,
            timeout=200,
        )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert len(done.stdout.splitlines()) == {"publish": 12, "transfer": 4}[steps]
