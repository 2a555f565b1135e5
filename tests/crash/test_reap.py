"""Whatever a killed run leaves on the host is found by its label and removed; a live run is never touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.conftest import needs_root

from belayer.ownership import RunLabel
from belayer.ownership.reap import leftovers, live_labels, reap

pytestmark = [pytest.mark.crash, needs_root]

# a driver that leaves one of each kind behind, and a child that outlives it
DRIVER = """
import os, subprocess, sys, pathlib
from belayer.ownership import RunLabel
label = RunLabel.new("reap test")
child = subprocess.Popen(["sleep", "60"], env={**os.environ, **label.env}, start_new_session=True)
point = label.dir / "mnt"; point.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "belayer-test", str(point)], check=True)
inner = point / "inner"; inner.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "belayer-test", str(inner)], check=True)
subprocess.run(["ip", "netns", "add", label.name + "-a"], check=True)
(label.shm / "image").write_bytes(b"x" * 1000)
root = next(p for p in ("/sys/fs/cgroup/pids", "/sys/fs/cgroup/unified", "/sys/fs/cgroup") if os.path.isdir(p))
os.makedirs(f"{root}/belayer/{label.name}/inner")
print(label.name, child.pid, flush=True)
sys.stdin.read()
"""


def start_driver():
    process = subprocess.Popen([sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    name, child = process.stdout.readline().split()
    return process, name, int(child)


def test_a_killed_driver_leaves_nothing_after_reaping():
    process, name, child = start_driver()
    try:
        assert name in live_labels()
        assert not [thing for thing in leftovers() if thing.label == name], "a live run was taken for a dead one"
        reap()
        os.kill(child, 0)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    kinds = {thing.kind for thing in leftovers(name)}
    assert kinds == {"process", "mount", "netns", "cgroup", "shm", "folder"}
    removed, failed = reap(name)
    assert not failed
    assert {thing.kind for thing in removed} == kinds
    assert not leftovers(name)
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and os.path.exists(f"/proc/{child}"):
        time.sleep(0.01)
    stat = Path(f"/proc/{child}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z", "the orphan lives"


def test_a_closed_label_leaves_nothing():
    label = RunLabel.new("close test")
    (label.shm / "x").write_text("x")
    (label.dir / "deep" / "er").mkdir(parents=True)
    name = label.name
    assert name in live_labels()
    label.close()
    label.close()
    assert name not in live_labels()
    assert not leftovers(name)


def test_closing_does_not_delete_what_is_mounted_below(tmp_path):
    (tmp_path / "precious").write_text("precious")
    label = RunLabel.new("mount test")
    point = label.dir / "mnt"
    point.mkdir()
    subprocess.run(["mount", "--bind", str(tmp_path), str(point)], check=True)
    name = label.name
    label.close()
    assert (tmp_path / "precious").read_text() == "precious"
    assert {thing.kind for thing in leftovers(name)} == {"mount", "folder"}
    _, failed = reap(name)
    assert not failed and not leftovers(name)
    assert (tmp_path / "precious").read_text() == "precious"
