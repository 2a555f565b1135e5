"""SIGKILL of the driver, and of the keeper: nothing runs on, and nothing that was published is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import needs_sandboxes
from tests.sandbox_kit import State, labelled, run, sandboxes, shell

import belayer.sandbox
from belayer.errors import RunInUse, SandboxError
from belayer.ownership import labels
from belayer.ownership.reap import live_labels, reap

pytestmark = [pytest.mark.crash, needs_sandboxes]

GONE_S = 2.0  # a sandbox may outlive its driver this long
ROOT = Path(__file__).parents[2]

# prints one line when everything stands, then goes on as `mode` says until it is killed
DRIVER = """
import asyncio, dataclasses, json, os, sys, time
from pathlib import Path
from tests.sandbox_kit import State, run
from belayer.config import SandboxConfig
from belayer.ownership import RunLabel
from belayer.sandbox import Sandboxes

async def main(folder, mode):
    label = RunLabel.new("driver to be killed")
    manager = await Sandboxes.open(SandboxConfig(), label, checkpoints=Path(folder))
    box = await manager.create("s")
    state = await State.prepare(box)
    await state.advance(box)
    manifest = await box.checkpoint(action=1)
    await run(box, "echo unpublished > /etc/unpublished; setsid sleep 600 >/dev/null 2>&1 &")
    other = await manager.create("never-checkpointed")
    if mode == "forked" and os.fork() == 0:
        time.sleep(4)  # holds a copy of the keeper's socket, and of the locks
        os._exit(0)
    print(json.dumps({"label": label.name, "pids": box.processes() + other.processes(), "id": manifest.id,
        "keeper": manager._keeper.pid, "state": dataclasses.asdict(state)}), flush=True)
    while mode == "checkpointing":
        await box.checkpoint(action=2)
    await box.exec("sleep 600", timeout_s=600)

asyncio.run(main(*sys.argv[1:]))
"""


@contextmanager
def driver(folder: Path, mode: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder), mode], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"the driver ended with {process.wait()}"
        yield process, json.loads(line)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


class Watch:
    """pidfds of processes, taken while they live: no pid can be mistaken for another one later."""

    def __init__(self, pids: list[int]) -> None:
        self.fds: dict[int, int] = {}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # a short-lived one that ended since it was listed
                self.fds[os.pidfd_open(pid)] = pid

    def left_after(self, timeout_s: float) -> list[int]:
        deadline = time.monotonic() + timeout_s
        left = dict(self.fds)
        while left and time.monotonic() < deadline:
            ready, _, _ = select.select(list(left), [], [], max(0.0, deadline - time.monotonic()))
            for fd in ready:
                del left[fd]
        for fd in self.fds:
            os.close(fd)
        return list(left.values())


@pytest.mark.parametrize("mode", ["idle", "forked", "checkpointing"])
def test_sigkill_of_the_driver(tmp_path, mode):
    folder = tmp_path / "checkpoints"
    with driver(folder, mode) as (process, told):
        watch = Watch([*told["pids"], told["keeper"]])
        assert told["label"] in live_labels()
        assert len(told["pids"]) >= 6
        if mode == "checkpointing":
            time.sleep(0.35)  # somewhere in the second or third dump
        else:
            asyncio.run(refuse_a_second_user(folder))
        process.kill()
        left = watch.left_after(GONE_S)
        assert not left, f"still running {GONE_S} s after the driver's death: {left}"
        process.wait()
    # a child that was forked without exec shares the driver's locks: only when it ends too is the run dead
    deadline = time.monotonic() + (6 if mode == "forked" else 0)
    while told["label"] in live_labels():
        assert time.monotonic() < deadline, "the label outlives its run"
        time.sleep(0.05)
    assert not [thing for thing in labelled(told["label"]) if thing.kind not in ("shm", "folder")]
    _, failed = reap(told["label"])
    assert not failed and not labelled(told["label"])

    # what the reaper settles stays restorable: this run's directory still exists
    belayer.sandbox.reap()
    run_id = (folder / "run_id").read_text().strip()
    assert not (labels.SHM_DIR / f"data-{run_id}").exists(), "memory of a dead run is still held"

    async def resume() -> None:
        async with sandboxes(folder) as manager:
            manifest = manager.newest("s")
            assert manifest is not None
            assert manifest.id == told["id"] or mode == "checkpointing"
            assert manager.newest("never-checkpointed") is None
            box = await manager.restore("s", manifest.id)
            assert box.generation > manifest.generation
            assert manager.label.name != told["label"]
            assert await box.exists("/etc/unpublished") == (manifest.action == 2)
            await State(**told["state"]).check(box)
            # and once more from here: a resumed run is as good as a new one
            await shell(box, "resumed=yes")
            again = await box.checkpoint(action=3)
            os.kill(box.init_pid, signal.SIGKILL)
            box = await manager.restore("s", again.id)
            assert await shell(box, "echo $resumed") == "yes\n"
            await manager.discard("s")

    asyncio.run(resume())
    assert not list(folder.glob("*.json")) and not list(folder.glob("images/*"))


async def refuse_a_second_user(folder: Path) -> None:
    with pytest.raises(RunInUse):
        async with sandboxes(folder):
            pass


def test_sigkill_of_the_keeper(tmp_path):
    """The keeper is gone: its sandboxes count as lost at once, nothing of them stays, and the checkpoint is intact."""
    folder = tmp_path / "checkpoints"

    async def first() -> str:
        async with sandboxes(folder) as manager:
            box = await manager.create("s")
            await shell(box, "x=1")
            manifest = await box.checkpoint(action=1)
            gone = asyncio.Event()
            box.on_death(gone.set)
            watch = Watch(box.processes())
            os.kill(manager._keeper.pid, signal.SIGKILL)
            await asyncio.wait_for(gone.wait(), GONE_S)
            assert not await asyncio.to_thread(watch.left_after, GONE_S)
            with pytest.raises(SandboxError):
                await box.exec("true")
            return manifest.id

    checkpoint = asyncio.run(first())

    async def second() -> None:
        async with sandboxes(folder) as manager:
            box = await manager.restore("s", checkpoint)
            assert await shell(box, "echo $x") == "1\n"
            assert await run(box, "echo on") == "on\n"
            await manager.discard("s")

    asyncio.run(second())


def test_a_run_whose_directory_is_gone_is_cleared(tmp_path):
    """Memory and snapshots of a dead run are kept for a resume, and deleted once nobody can resume it any more."""
    folder = tmp_path / "checkpoints"
    with driver(folder, "idle") as (process, told):
        run_id = (folder / "run_id").read_text().strip()
        memory = labels.SHM_DIR / f"data-{run_id}" / "images"
        assert (memory / told["id"]).is_dir()
        belayer.sandbox.reap()
        assert (memory / told["id"]).is_dir(), "a living run's memory was touched"
        process.kill()
        process.wait()
    for path in (folder / "run_id", *folder.glob("*.json")):
        path.unlink()
    reap(told["label"])
    done = belayer.sandbox.reap()
    assert not memory.exists()
    assert any(run_id in line for line in done), done
    assert any("runs-data" in line and run_id in line for line in done), done
