"""A store that runs full, a store of one's own, and the doctor's look at all this."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import needs_sandboxes
from tests.sandbox_kit import eventually, kill_init, labelled, run, sandboxes, settled, shell

from belayer.config import SandboxConfig
from belayer.errors import StorageFull
from belayer.ownership import RunLabel
from belayer.ownership.reap import everything_labelled
from belayer.sandbox import _btrfs, images, probe
from belayer.sandbox.store import Store

FULL = re.compile("No space left|quota exceeded")

pytestmark = [pytest.mark.crash, needs_sandboxes]


def test_a_full_store_costs_only_the_checkpoint(tmp_path):
    """The agent's own write fails, as on any full disk; checkpoints are refused or whole; the older one restores."""
    folder, size = tmp_path / "store", 1 << 30
    ours = Store.open()
    store = Store.open(folder, size)
    try:
        images.import_directory(store, "small", images.find(ours, SandboxConfig().image).path)
        point = store.mount_point
    finally:
        store.close()
        ours.close()
    assert point is None or not os.path.ismount(point), "the last user of a store unmounts it"

    async def body() -> None:
        config = {"store": folder, "store_bytes": size, "image": "small"}
        async with sandboxes(tmp_path / "checkpoints", **config) as manager:
            box = await manager.create("s")
            await shell(box, "x=kept; echo kept > /kept")
            good = await box.checkpoint(action=1)
            filled = await box.exec("head -c 2G /dev/zero > /big", timeout_s=60)
            assert not filled.ok and FULL.search(filled.text), filled
            assert manager.store.free_bytes() > size // 4, "one sandbox could fill the store of all"
            for number in range(5):  # several together can
                try:
                    other = await manager.create(f"other-{number}")
                except StorageFull as error:
                    assert error.next_step
                    break
                filled = await other.exec("head -c 2G /dev/zero > /big", timeout_s=60)
                assert not filled.ok and FULL.search(filled.text), filled
            assert manager.store.free_bytes() < size // 4
            assert await shell(box, "echo $x") == "kept\n", "the full disk ended the sandbox"
            published = []
            for action in (2, 3):
                try:
                    published.append(await box.checkpoint(action=action))
                except StorageFull as error:
                    assert error.kept and error.next_step
            assert [m.id for m in manager.manifests("s")] == [m.id for m in [good, *published]][-2:]
            assert await shell(box, "echo $x") == "kept\n", "a refused checkpoint harmed the sandbox"
            kill_init(box)
            oldest = manager.manifests("s")[0]
            box = await manager.restore("s", oldest.id)
            assert await shell(box, "echo $x; cat /kept") == "kept\nkept\n"
            # room again: everything works as before
            for number in range(5):
                await manager.discard(f"other-{number}")
            for manifest in manager.manifests("s"):
                if manifest.id != oldest.id:
                    await asyncio.to_thread(manager.checkpoints.data.remove, manifest.id)
            await run(box, "rm -f /big; sync")
            deadline = time.monotonic() + 20
            while True:
                try:
                    again = await box.checkpoint(action=4)
                    break
                except StorageFull:
                    assert time.monotonic() < deadline, "the store stays full after its space was freed"
                    await asyncio.sleep(0.5)
            box = await manager.restore("s", again.id)
            assert await shell(box, "echo $x") == "kept\n"
            await manager.discard("s")

    asyncio.run(body())
    assert point is None or not os.path.ismount(point)
    assert point is None or not point.parent.exists(), "the folder of the store's locks is left"


def test_the_probe_leaves_nothing_and_disturbs_nobody(tmp_path):
    async def body() -> None:
        async with sandboxes(tmp_path / "checkpoints") as manager:
            box = await manager.create("s")
            await shell(box, "x=1; sleep 600 & true")
            await settled(manager)
            before = {str(thing) for thing in labelled(manager.label.name)}
            others = {thing.label for thing in everything_labelled()}
            begun = time.monotonic()
            found = {item.name: item for item in probe()}  # blocks, with an event loop running
            assert time.monotonic() - begun < 3
            missing = [item.name for item in found.values() if item.required and not item.ok]
            assert not missing
            assert {
                "checkpoint and restore (CRIU)",
                "sandbox store (btrfs)",
                "cgroups",
                "namespaces",
                "seccomp",
            } <= set(found)
            assert {"disk room", "root", f"sandbox image {SandboxConfig().image}"} <= set(found)
            assert "memory intact" in found["checkpoint and restore (CRIU)"].detail
            assert await shell(box, "echo $x; jobs -r | wc -l") == "1\n1\n"
            # a command's last process may take a moment to go
            await eventually("as before", lambda: {str(thing) for thing in labelled(manager.label.name)} == before)
            new = [thing for thing in everything_labelled() if thing.label not in others]
            assert not [thing for thing in new if json_info(thing.label) == "belayer doctor"], new

    asyncio.run(body())


def json_info(label: str) -> str:
    """What a label was taken for."""
    try:
        return json.loads((Path("/run/belayer") / label / "info.json").read_text())["purpose"]
    except (OSError, ValueError, KeyError):
        return ""


def test_the_probe_says_what_is_missing(tmp_path):
    """With an empty cache: no image, no store, no CRIU of our own. Each line has its own reason and a way out."""
    code = "import json, msgspec; from belayer.sandbox import probe; print(json.dumps(msgspec.to_builtins(probe())))"
    environment = {**os.environ, "BELAYER_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin", "BELAYER_CRIU": ""}
    environment.pop("BELAYER_STORE", None)
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
    )
    found = {item["name"]: item for item in json.loads(done.stdout)}
    image = found["sandbox image base"]
    assert not image["ok"] and image["required"] and "setup" in image["how_to_get"]
    assert found["namespaces"]["ok"] and found["seccomp"]["ok"]
    assert found["sandbox store (btrfs)"]["ok"] and "not made" in found["sandbox store (btrfs)"]["detail"]
    assert not (tmp_path / "store").exists(), "looking made a store"
    criu = found["checkpoint and restore (CRIU)"]
    assert criu["ok"] or ("CRIU" in criu["detail"] and "install_criu" in criu["how_to_get"])
    assert found["sandbox store (overlay)"]["ok"]
    level = found["checkpoint level"]
    assert level["ok"] and level["detail"].startswith("full" if criu["ok"] else "fs+shell, on a store of btrfs")
    assert criu["ok"] or ('allow_level = "fs+shell"' in level["how_to_get"] and "no CRIU 4.2" in level["detail"])


def test_checkpoints_move_to_disk_at_close_and_come_back(tmp_path):
    async def first() -> str:
        async with sandboxes(tmp_path / "checkpoints") as manager:
            box = await manager.create("s")
            await shell(box, "x=1; sleep 600 & true")
            return (await box.checkpoint(action=1)).id

    checkpoint = asyncio.run(first())
    assert (tmp_path / "checkpoints" / "images" / checkpoint).is_dir()

    async def second() -> None:
        with RunLabel.new("test, resumed") as label:
            async with sandboxes(tmp_path / "checkpoints", label) as manager:
                assert [m.id for m in manager.manifests("s")] == [checkpoint]
                box = await manager.restore("s", checkpoint)
                assert box.generation == 2
                assert await shell(box, "echo $x; jobs -r | wc -l") == "1\n1\n"
                # nothing of the new process carries the old label: what a reaper would go by
                pids = {str(pid) for pid in box.processes()}
                mine = {thing.name for thing in labelled(label.name) if thing.kind == "process"}
                assert pids <= mine
                await manager.discard("s")
            assert not [thing for thing in labelled(label.name) if thing.kind == "process"]

    asyncio.run(second())
    assert not (tmp_path / "checkpoints" / "images" / checkpoint).exists()


def test_a_store_that_must_outlive_a_power_failure_has_write_barriers(tmp_path):
    """For all its users, from the moment on at which one of them asks for it."""

    def options(store: Store) -> set[str]:
        with open("/proc/self/mountinfo") as table:
            lines = [line.split() for line in table]
        (found,) = (line for line in lines if line[4] == str(store.mount_point))
        return set(found[-1].split(","))

    first = Store.open(tmp_path / "store", 1 << 30, durable=False)
    if first.mount_point is None:
        first.close()
        pytest.skip("the folder is on btrfs: its mount is the host's own")
    try:
        assert "nobarrier" in options(first)
        (first.root / "runs" / "file").write_text("kept")
        second = Store.open(tmp_path / "store", 1 << 30)
        try:
            assert "nobarrier" not in options(first)
            third = Store.open(tmp_path / "store", 1 << 30, durable=False)
            third.close()
            assert "nobarrier" not in options(second)
            assert (second.root / "runs" / "file").read_text() == "kept"
        finally:
            second.close()
    finally:
        first.close()
    assert first.mount_point is not None and not os.path.ismount(first.mount_point)


def test_quota_groups_of_deleted_subvolumes_are_removed():
    """The kernel forgets those from which something lives on in a snapshot."""
    store = Store.open(kind="btrfs")
    root, copy = (store.root / f"{name}-{os.getpid()}" for name in ("root", "copy"))
    try:
        if not store.has_quota:
            pytest.skip("this kernel has no simple quotas")

        def gone() -> bool:
            fd = os.open(store.root, os.O_RDONLY)
            fcntl.ioctl(fd, 0x9408)  # BTRFS_IOC_SYNC: wakes the thread that takes deleted subvolumes apart
            os.close(fd)
            _btrfs.forget_deleted(store.root)
            return not group.is_dir()

        _btrfs.create_subvolume(root)
        (root / "file").write_bytes(b"x" * 100_000)
        number = _btrfs.subvolume_number(root)
        group = _btrfs.quota_groups(store.root) / f"0_{number}"
        assert group.is_dir() and not gone(), "a group in use was removed"
        _btrfs.snapshot(root, copy, read_only=True)
        _btrfs.delete_subvolume(root)
        _wait(lambda: gone() or not _btrfs.subvolume_exists(store.root, number))
        assert group.is_dir(), "the copy still holds what was written there"
        _btrfs.delete_subvolume(copy)
        _wait(gone)
    finally:
        for path in (root, copy):
            _btrfs.delete_subvolume(path)
        store.close()


def _wait(until: Callable[[], bool]) -> None:
    end = time.monotonic() + 120  # the kernel takes apart whatever other tests have deleted first
    while not until():
        assert time.monotonic() < end
        time.sleep(0.05)
