"""A run directory in use, of another version, or damaged: one clear error, and nothing is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from belayer.errors import RunError, RunInUse, RunVersionMismatch, StorageFull
from belayer.files import write_atomically
from belayer.run_directory import RunDirectory

pytestmark = pytest.mark.unit


def test_made_once_and_opened_again(tmp_path):
    first = RunDirectory.open(tmp_path / "run", about={"seed": 3})
    assert not first.resumed
    first.close()
    second = RunDirectory.open(tmp_path / "run", about={"seed": 4})
    assert second.resumed and second.about["seed"] == 3
    second.close()


def test_in_use_by_another_process(tmp_path):
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, pathlib; from belayer.run_directory import RunDirectory\n"
            f"d = RunDirectory.open(pathlib.Path({str(tmp_path / 'run')!r}), about={{}}); print('open', flush=True)\n"
            "sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"open\n"
    with pytest.raises(RunInUse, match=f"process {holder.pid}"):
        RunDirectory.open(tmp_path / "run")
    holder.kill()
    holder.wait()
    RunDirectory.open(tmp_path / "run").close()  # the kernel dropped the lock with its holder


def test_no_run_there(tmp_path):
    with pytest.raises(RunError, match=r"no run\.json"):
        RunDirectory.open(tmp_path)


def test_another_version(tmp_path):
    RunDirectory.open(tmp_path, about={}).close()
    about = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**about, "format": 99}))
    with pytest.raises(RunVersionMismatch, match="format 99"):
        RunDirectory.open(tmp_path)
    assert json.loads((tmp_path / "run.json").read_text())["format"] == 99


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_damaged(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(RunError, match="damaged"):
        RunDirectory.open(tmp_path)


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError):
        RunDirectory.open(tmp_path / "file" / "run", about={})


def test_a_full_disk(small_disk):
    fd = os.open(small_disk / "filler", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="No space"):
        while True:
            os.write(fd, b"x" * 4096)
    os.close(fd)
    with pytest.raises(StorageFull, match="no room"):
        RunDirectory.open(small_disk / "run", about={"seed": 1, "config": "x" * 5000})


def test_atomic_write_leaves_no_temporary_file(tmp_path):
    write_atomically(tmp_path / "a.json", b"1")
    write_atomically(tmp_path / "a.json", b"2")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_bytes() == b"2"
