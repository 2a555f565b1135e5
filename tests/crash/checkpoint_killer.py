"""Kills a driver at every named step of a checkpoint's life; after each the next one must see only whole checkpoints.

A program of its own, not a test module: it forks a driver per step, from a process that has no threads and has imported
everything already. Prints one line per step; exit code 0 when everything was as it must be.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from tests.checkpoint_kit import TINY
from tests.sandbox_kit import labelled, shell

import belayer.sandbox
from belayer.config import SandboxConfig
from belayer.faults import failpoints
from belayer.ownership import RunLabel, labels
from belayer.ownership.reap import reap
from belayer.sandbox import Sandbox, Sandboxes
from belayer.sandbox.store import Store
from belayer.sandbox.transfer import export_checkpoint, import_checkpoint

PUBLISH = (
    "checkpoint.publish.captured",
    "checkpoint.publish.written",
    "checkpoint.publish.renamed",
    "checkpoint.write.begin",
    "checkpoint.write.file",
    "checkpoint.write.copied",
    "checkpoint.write.renamed",
    "checkpoint.write.published",
    "checkpoint.remove.manifest",
    "checkpoint.remove.images",
    "checkpoint.move.copied",
    "checkpoint.move.renamed",
)
TRANSFER = (
    "checkpoint.export.images",
    "checkpoint.export.tree",
    "checkpoint.import.images",
    "checkpoint.import.tree",
)


async def driver(folder: Path, number: int, step: str, wanted: list[int]) -> None:
    """One life: look at what the one before left, then go on until the step kills it."""
    label = RunLabel.new("driver to be killed")
    (folder / "label").write_text(label.name)
    config = SandboxConfig(image=TINY)
    durable = not step.startswith("checkpoint.move")
    manager = await Sandboxes.open(config, label, checkpoints=folder / "run" / "checkpoints", durable=durable)
    data = manager.checkpoints.data
    whole = data.manifests()
    for manifest in whole:
        manager.checkpoints.verify(manifest)
    ids = {manifest.id for manifest in whole}
    # the background write of this very process has begun
    ours = f".{os.getpid()}.write.tmp"
    images = {entry.name for place in (data.memory, data.disk) if place.is_dir() for entry in place.iterdir()}
    left = {name for name in images if not name.endswith((ours, "lock", "owner.json"))}
    assert left == ids, f"images without a manifest: {left} {ids}"
    assert {entry.name for entry in data.snapshots.iterdir() if entry.is_dir()} == ids
    assert not list(data.checkpoints.glob("*.tmp"))
    assert not [place for place in manager.store.images.glob(".import-*") if label_is_dead(place.name)]
    newest = manager.newest("s")
    if newest is None:
        assert not wanted, f"checkpoint {wanted} is gone"
        box = await manager.create("s")
    else:
        assert newest.action in wanted, f"the newest is {newest.action}, not {wanted}"
        box = await manager.restore("s", newest.id)
        assert await shell(box, "echo $x; cat /x") == f"{newest.action}\n{newest.action}\n"
    await go_on(folder, manager, box, number, step)
    raise AssertionError("this driver has not come to its step")


async def go_on(folder: Path, manager: Sandboxes, box: Sandbox, number: int, step: str) -> None:
    failpoints.arm(step, "kill")
    # the last of these is the one that the step interrupts: a deletion needs some to delete
    for action in actions(number, step):
        await shell(box, f"x={action}; echo {action} > /x")
        manifest = await box.checkpoint(action=action)
        note_published(folder, action)
    if step in TRANSFER:
        archive = folder / f"{number}.tar"
        await asyncio.to_thread(export_checkpoint, folder / "run" / "checkpoints", manifest.id, archive, manager.store)
        await asyncio.to_thread(import_checkpoint, archive, folder / "other" / "checkpoints", manager.store)
    elif step.startswith("checkpoint.move"):
        await manager.close()
    else:
        await asyncio.sleep(10)


def actions(number: int, step: str) -> range:
    """Those that a life checkpoints; a deletion needs some to delete."""
    return range(number - (3 if ".remove." in step else 0), number + 1)


def note_published(folder: Path, action: int) -> None:
    """At once: the process may be killed in the middle."""
    (folder / ".published").write_text(str(action))
    os.replace(folder / ".published", folder / "published")


def label_is_dead(name: str) -> bool:
    return not (labels.RUNTIME_DIR / name.removeprefix(".import-")).exists()


def one(folder: Path, number: int, step: str, wanted: list[int]) -> None:
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(driver(folder, number, step, wanted))
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"{step}: {status}"
    print(f"{step} {time.monotonic() - begun:.2f} s", flush=True)


def settle(folder: Path) -> None:
    """What the start of every run does, or `belayer doctor --reap`."""
    name = (folder / "label").read_text()
    reap(name)
    belayer.sandbox.reap()
    assert not labelled(name), labelled(name)
    store = Store.open()
    try:
        assert not (store.root / "runs" / name).exists(), "a root in the store is left"
    finally:
        store.close()
    for run in ("run", "other"):
        if (folder / run / "checkpoints" / "run_id").exists():
            run_id = (folder / run / "checkpoints" / "run_id").read_text().strip()
            assert not (labels.SHM_DIR / f"data-{run_id}").exists(), "memory of a dead run is still held"


def check_nothing_imported(folder: Path) -> None:
    """No half of an import is left, and the whole archive can be imported after all."""
    other = folder / "other" / "checkpoints"
    assert not list(other.glob("*.json"))
    store = Store.open()
    try:
        assert not list(store.images.glob(".import-*")), "an image of a killed import"
        [archive] = folder.glob("*.tar")
        manifest = import_checkpoint(archive, other, store)
        assert [path.name for path in (other / "images").iterdir()] == [manifest.id]
        snapshots = store.root / "runs-data" / (other / "run_id").read_text().strip()
        assert [entry.name for entry in snapshots.iterdir() if entry.is_dir()] == [manifest.id]
    finally:
        store.close()
    (other / f"{manifest.id}.json").unlink()
    archive.unlink()


def main(folder: Path, steps: tuple[str, ...]) -> None:
    wanted: list[int] = []
    for number, step in enumerate(steps):
        action = 10 * (number + 1)
        one(folder, action, step, wanted)
        settle(folder)
        published = int((folder / "published").read_text()) if (folder / "published").exists() else 0
        if step == "checkpoint.publish.renamed":
            wanted = [action]
        elif not step.startswith("checkpoint.publish"):
            # what happens in the background may happen to an older one, before or while a new one is published
            wanted = [published, *[each for each in actions(action, step) if each > published][:1]]
        if step.startswith("checkpoint.export"):
            left = [path.name for path in folder.iterdir() if path.name not in ("run", "label", "published", "other")]
            assert not left, f"a killed export left {left}"
        if step.startswith("checkpoint.import"):
            check_nothing_imported(folder)


if __name__ == "__main__":
    chosen = {"publish": PUBLISH, "transfer": TRANSFER}[sys.argv[2]]
    main(Path(sys.argv[1]), chosen)
