"""SIGKILL of a driver whose sandboxes are on the overlay store: no mount, layer or process stays, checkpoints do."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.conftest import needs_sandboxes
from tests.sandbox_kit import labelled, overlay_store, run, sandboxes, shell

import belayer.sandbox
from belayer.ownership import RunLabel
from belayer.ownership.labels import RUNTIME_DIR, mounts_below
from belayer.ownership.reap import reap
from belayer.sandbox._overlay import mount_overlay

pytestmark = [pytest.mark.crash, needs_sandboxes]

ROOT = Path(__file__).parents[2]

DRIVER = """
import asyncio, json, sys
from pathlib import Path
from tests.sandbox_kit import run, shell
from belayer.config import SandboxConfig
from belayer.ownership import RunLabel
from belayer.sandbox import Sandboxes

async def main(folder, store):
    config = SandboxConfig(store=Path(store), store_kind="overlay", allow_level="fs+shell")
    label = RunLabel.new("driver to be killed")
    manager = await Sandboxes.open(config, label, checkpoints=Path(folder))
    box = await manager.create("s")
    await shell(box, "cd /var; x=kept; echo one > file; sleep 600 & true")
    full = await box.checkpoint(action=1)
    await shell(box, "echo two > file; rm /etc/hostname")
    low = await box.checkpoint(action=2, level="fs+shell")
    await run(box, "echo unpublished > /etc/unpublished")
    other = await manager.create("other")
    print(json.dumps({"label": label.name, "pids": box.processes() + other.processes(), "full": full.id,
        "low": low.id}), flush=True)
    while True:
        await box.checkpoint(action=3)
        await box.restore((await other.checkpoint(action=1)).id)
        box = await manager.restore("s", full.id)

asyncio.run(main(*sys.argv[1:]))
"""


def test_nothing_stays_of_a_killed_driver_but_its_checkpoints(tmp_path):
    store = overlay_store()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path / "checkpoints"), str(store)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"the driver ended with {process.wait()}"
        found = json.loads(line)
        assert mounts_below(RUNTIME_DIR / found["label"]), "the roots are mounted below the label"
        time.sleep(0.3)  # somewhere in a checkpoint or a restore
        process.send_signal(signal.SIGKILL)
        process.wait()
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    deadline = time.monotonic() + 3
    while any(thing.kind == "process" for thing in labelled(found["label"])):
        assert time.monotonic() < deadline, "processes outlive their driver"
        time.sleep(0.02)
    _, failed = reap(found["label"])
    assert not failed
    assert not labelled(found["label"]) and not mounts_below(RUNTIME_DIR / found["label"])
    belayer.sandbox.reap(store)
    assert not (store / "overlay" / "runs" / found["label"]).exists(), "layers of the killed run stayed"

    async def resume() -> None:
        config = {"store": store, "store_kind": "overlay", "allow_level": "fs+shell"}
        async with sandboxes(tmp_path / "checkpoints", **config) as manager:
            known = {manifest.id for manifest in manager.manifests("s")}
            for which, text in (("full", "one"), ("low", "two")):
                if found[which] not in known:
                    continue  # newer ones took its place before the kill
                box = await manager.restore("s", found[which])
                assert await shell(box, "echo $x $PWD; cat file") == f"kept /var\n{text}\n"
                assert not await box.exists("/etc/unpublished")
            newest = manager.newest("s")
            assert newest is not None
            box = await manager.restore("s", newest.id)
            assert (await run(box, "cat /var/file")).strip() in ("one", "two")
            for name in ("s", "other"):
                await manager.discard(name)

    asyncio.run(resume())
    data = store / "overlay" / "runs-data"
    run_id = (tmp_path / "checkpoints" / "run_id").read_text().strip()
    assert not (data / run_id).exists()


def test_a_mount_of_a_dead_label_is_found_by_its_name(tmp_path):
    label = RunLabel.new("to be abandoned")
    for name in ("lower", "upper", "work"):
        (tmp_path / name).mkdir()
    point = label.dir / "s-1" / "root"
    point.mkdir(parents=True)
    mount_overlay(tmp_path / "lower", tmp_path, point)
    (point / "kept").write_text("in the layer")
    os.close(label._lock_fd)  # what the kernel does when the process dies
    label._lock_fd = -1
    removed, failed = reap(label.name)
    assert not failed and any(thing.kind == "mount" and thing.name == str(point) for thing in removed)
    assert not mounts_below(label.dir) and not label.dir.exists()
    assert (tmp_path / "upper" / "kept").read_text() == "in the layer", "the reaper reached through the mount"
