"""Runs that start, reap and end beside each other on one host never touch each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import needs_sandboxes
from tests.sandbox_kit import labelled

from belayer.ownership.reap import leftovers

pytestmark = [pytest.mark.crash, needs_sandboxes]

ROOT = Path(__file__).parents[2]
ROUNDS = 6
# what every run does at its start, over and over, with a living sandbox in between
NEIGHBOUR = """
import asyncio, sys, tempfile
from pathlib import Path
from belayer.config import SandboxConfig
from belayer.ownership import RunLabel
from belayer.ownership.reap import reap
from belayer.sandbox import Sandboxes
from belayer.sandbox import reap as reap_sandboxes

async def one(folder):
    with RunLabel.new("neighbour") as label:
        print(label.name, flush=True)
        manager = await Sandboxes.open(SandboxConfig(), label, checkpoints=folder)
        try:
            box = await manager.create("s")
            manifest = await box.checkpoint(action=1)
            box = await manager.restore("s", manifest.id)
            assert (await box.exec("echo alive")).stdout == b"alive\\n"
            assert await box.healthy() is None
            await manager.discard("s")
        finally:
            await manager.close()

for number in range(int(sys.argv[2])):
    removed, failed = reap()
    assert not failed, failed
    reap_sandboxes()
    asyncio.run(one(Path(sys.argv[1]) / str(number)))
"""


def test_neighbours_that_reap_leave_each_other_alone(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", NEIGHBOUR, str(tmp_path / name), str(ROUNDS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for name in ("a", "b")
    ]
    names = []
    try:
        for process in running:
            out, err = process.communicate(timeout=120)
            names += out.split()
            assert process.returncode == 0, err[-3000:]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert len(set(names)) == 2 * ROUNDS
    for name in names:
        assert not labelled(name) and not leftovers(name), name
