"""What the adapters' tests share: the harnesses' own Python, programs run under a kill from outside."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def harness_python(name: str, module: str) -> str:
    """The interpreter that `module` is installed for: this one, or that of scripts/install_harness.sh."""
    if importlib.util.find_spec(module) is not None:
        return sys.executable
    where = subprocess.run(
        [ROOT / "scripts/install_harness.sh", "--path", name], capture_output=True, text=True, check=False, cwd=ROOT
    )
    python = where.stdout.strip()
    if where.returncode or not python:
        pytest.skip(f"{name} is not installed: {where.stderr.strip() or 'scripts/install_harness.sh makes it'}")
    return python


def run_struck(
    command: list[str], folder: Path, file: str, *, timeout_s: float = 240.0, **variables: str
) -> tuple[str, bool]:
    """Run `command` in `folder`; when `file` appears in a sandbox, SIGKILL that sandbox's init, once.

    Returns (what the program printed, whether there was anything to kill). Fails when the program does. `file` must be
    one that no other test's sandboxes have.
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MSWEA_SILENT_STARTUP": "1", **variables}
    # harnesses that keep settings in the home folder keep them here
    env |= {"MSWEA_GLOBAL_CONFIG_DIR": str(folder), "XDG_CONFIG_HOME": str(folder)}
    log = folder / "output.log"
    with open(log, "wb") as output:
        program = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT)
    struck = False
    deadline = time.monotonic() + timeout_s
    try:
        while program.poll() is None and time.monotonic() < deadline:
            struck = struck or _strike(file)
            time.sleep(0.01)
    finally:
        if program.poll() is None:
            program.kill()
        code = program.wait()
    said = log.read_text(errors="replace")
    assert code == 0, said[-4000:]
    return said, struck


@contextmanager
def striking(file: str) -> Iterator[list[str]]:
    """Meanwhile, when `file` appears in a sandbox, SIGKILL that sandbox's init, once. Yields what was struck."""
    struck: list[str] = []
    over = threading.Event()

    def watch() -> None:
        while not struck and not over.wait(0.01):
            if _strike(file):
                struck.append(file)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield struck
    finally:
        over.set()
        watcher.join()


def _strike(file: str) -> bool:
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            if not os.path.exists(f"{entry.path}/root{file}"):
                continue
            lines = Path(entry.path, "status").read_text().splitlines()
            pids = next(line for line in lines if line.startswith("NSpid")).split()[1:]
            if len(pids) > 1 and pids[-1] == "1":
                os.kill(int(entry.name), signal.SIGKILL)
                return True
        except (OSError, StopIteration):
            continue  # it ended meanwhile
    return False
