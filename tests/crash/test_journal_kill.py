"""SIGKILL of a writing process: the journal that it leaves is whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from belayer.journal import Journal, scan

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


def test_a_killed_writer_leaves_a_whole_journal(tmp_path):
    rng = random.Random(5)
    before = 0
    for _ in range(8):
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
