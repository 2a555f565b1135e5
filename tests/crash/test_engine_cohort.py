"""A worker that loses a child ends, whatever its main thread does; one whose children end by themselves does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from belayer.engine.workers.cohort import RANK_DIED

pytestmark = pytest.mark.crash

PROGRAM = """
import ctypes, subprocess, sys
from belayer.engine.workers import cohort
cohort.watch()
ended = subprocess.Popen(["true"])  # nobody has waited for it, and it must not hide the other
rank = subprocess.Popen(["sleep", "60"])
print(rank.pid, flush=True)
def native():
    # code that never comes back to Python, as a collective operation that waits for the dead rank
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # nobody will give it back
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
native() if sys.argv[1] == "native" else exec("while True: pass")
"""


@pytest.mark.parametrize("doing", ["native", "python"])
def test_a_killed_rank_ends_the_worker(doing: str) -> None:
    worker = subprocess.Popen([sys.executable, "-c", PROGRAM, doing], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert worker.stdout is not None and worker.stderr is not None
    rank = int(worker.stdout.readline())
    time.sleep(0.3)
    assert worker.poll() is None
    os.kill(rank, signal.SIGKILL)
    assert worker.wait(timeout=5) == RANK_DIED
    assert f"child {rank} of the cohort was killed by SIGKILL" in worker.stderr.read().decode()
    worker.stdout.close()
    worker.stderr.close()


def test_children_that_end_by_themselves_change_nothing() -> None:
    program = """
import subprocess, time
from belayer.engine.workers import cohort
cohort.watch()
for status in (0, 3):
    assert subprocess.run(["sh", "-c", f"exit {status}"]).returncode == status
unwaited = subprocess.Popen(["false"])
time.sleep(0.3)
assert unwaited.wait() == 1
print("alive")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False)
    assert (ended.stdout, ended.returncode) == ("alive\n", 0), ended.stderr
