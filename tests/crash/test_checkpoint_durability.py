"""What a checkpoint survives: a reboot, a flipped byte, a full disk, and a background write that does not end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec
import pytest
from tests.checkpoint_kit import make_tiny_image, tiny_image
from tests.conftest import needs_sandboxes
from tests.sandbox_kit import eventually, kill_init, sandboxes, shell

from belayer import events
from belayer.checkpoint.manifest import Manifest, read_manifest, write_manifest
from belayer.config import SandboxConfig
from belayer.errors import CheckpointDamaged, CheckpointUnfit, RestoreFailed, StorageFull
from belayer.events import Event
from belayer.faults import failpoints
from belayer.ownership import RunLabel, labels
from belayer.sandbox import Sandbox, Sandboxes, _btrfs, _pins, _writer, reap
from belayer.sandbox._data import RunData
from belayer.sandbox.store import Store

pytestmark = [pytest.mark.crash, needs_sandboxes]


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Iterator[str]:
    with tiny_image(tmp_path_factory.mktemp("image")) as name:
        yield name


@asynccontextmanager
async def durable(checkpoints: Path, seen: list[Event] | None = None, **config) -> AsyncIterator[Sandboxes]:
    """Like `sandboxes`, of a run whose durability is `host`."""
    with RunLabel.new("durability test") as label:
        manager = await Sandboxes.open(
            SandboxConfig(**config),
            label,
            checkpoints=checkpoints,
            durable=True,
            events=events.ignore if seen is None else seen.append,
        )
        try:
            yield manager
        finally:
            await manager.close()


async def written(manager: Sandboxes, manifest: Manifest) -> None:
    """Wait until the manifest says `host`, on disk and in memory."""

    def is_host() -> bool:
        return next(m for m in manager.manifests(manifest.sandbox) if m.id == manifest.id).durability == "host"

    await eventually(f"{manifest.id} is on disk", is_host, 20)
    assert read_manifest(manager.checkpoints.data.manifest_path(manifest.id)).durability == "host"


@contextmanager
def held(step: str) -> Iterator[threading.Event]:
    """The background write stands still at `step` until the block ends; the event says that it is there."""
    there, go = threading.Event(), threading.Event()

    def wait() -> None:
        there.set()
        go.wait(20)

    failpoints.arm(step, wait)
    try:
        yield there
    finally:
        go.set()
        failpoints.disarm(step)


def faults(seen: list[Event]) -> list[str]:
    return [event.data["how"] for event in seen if event.kind == events.FAULT_DETECTED]


def test_a_reboot_costs_only_what_was_not_written(tmp_path, image, monkeypatch):
    monkeypatch.setattr(_writer, "JOIN_S", 0.1)  # the write is held up on purpose
    folder, seen = tmp_path / "checkpoints", []

    async def before() -> tuple[Manifest, Manifest]:
        async with durable(folder, seen, image=image, drain_s=0) as manager:
            box = await manager.create("s")
            await shell(box, "x=first; echo first > /x")
            first = await box.checkpoint(action=1)
            assert first.durability == "process", "the caller had to wait for the disk"
            await written(manager, first)
            assert [event.data["id"] for event in seen if event.kind == events.CHECKPOINT_DURABLE] == [first.id]
            with held("checkpoint.write.file") as there:
                await shell(box, "x=second; echo second > /x")
                second = await box.checkpoint(action=2)
                await asyncio.to_thread(there.wait, 10)
                [writer] = [thread for thread in threading.enumerate() if thread.name == "belayer-write"]
                assert writer.native_id is not None and os.getpriority(os.PRIO_PROCESS, writer.native_id) == 15
                # checkpoints and restores do not wait for the write that is under way
                third = await asyncio.wait_for(box.checkpoint(action=3), 5)
                box = await asyncio.wait_for(manager.restore("s", second.id), 5)
                assert await shell(box, "echo $x; cat /x") == "second\nsecond\n"
                kept = [m.id for m in manager.manifests("s")]
                assert kept == [first.id, second.id, third.id], "the newest that survives a reboot has to stay"
                assert manager.newest("s") == third
                # the reboot: memory is gone, and what was being written has not got its name
                manager.checkpoints.writer.close(0)
            await asyncio.to_thread(time.sleep, 0.1)
            for manifest in (first, second, third):
                shutil.rmtree(manager.checkpoints.data.memory / manifest.id)
            return first, third

    async def after(first: Manifest, third: Manifest) -> None:
        seen.clear()
        async with durable(folder, seen, image=image) as manager:
            lost = [text for text in faults(seen) if "is lost" in text and "restarted" in text]
            assert len(lost) == 2 and third.id in lost[1], seen
            newest = manager.newest("s")
            assert newest is not None and newest.id == first.id and newest.durability == "host"
            with pytest.raises(CheckpointDamaged, match=r"images of checkpoint .* are gone"):
                await manager.restore("s", third.id)
            box = await manager.restore("s", first.id)
            assert await shell(box, "echo $x; cat /x") == "first\nfirst\n"
            await written(manager, await box.checkpoint(action=4))
            await manager.discard("s")
            assert not list(folder.glob("*.json")) and not list((folder / "images").iterdir())
        assert not list((folder / "pins").iterdir())

    asyncio.run(after(*asyncio.run(before())))


def test_a_run_that_lost_its_id_touches_nobody(tmp_path):
    """An id that a power failure has emptied would make all runs' folders its own."""
    store = Store.open()
    try:
        other = RunData(tmp_path / "other", store)
        (other.snapshots / "theirs").mkdir()
        (other.memory / "theirs").mkdir()
        for number, content in enumerate((b"", b"\n", b"..", b"\0\0\0\0", b"../../x", b"0123456789abcdeg")):
            folder = tmp_path / str(number)
            folder.mkdir()
            (folder / "run_id").write_bytes(content)
            data = RunData(folder, store)
            assert re.fullmatch("[0-9a-f]{16}", data.run_id) and data.run_id != other.run_id
            data.collect_garbage()
            data.close()
        # nor does it take another run for garbage whose description is about to be written
        assert json.loads((other.snapshots / "owner.json").read_text()) == {"checkpoints": str(tmp_path / "other")}
        assert (other.snapshots / "theirs").is_dir() and (other.memory / "theirs").is_dir()
        other.close()
    finally:
        store.close()


def test_without_durability_nothing_is_written(tmp_path, image):
    async def body() -> None:
        async with sandboxes(tmp_path / "checkpoints", image=image) as manager:
            box = await manager.create("s")
            manifest = await box.checkpoint(action=1)
            await asyncio.sleep(0.3)
            assert manager.newest("s") == manifest and manifest.durability == "process"
            assert not (tmp_path / "checkpoints" / "images").exists()
            await manager.discard("s")
            assert not [thread for thread in threading.enumerate() if thread.name == "belayer-write"]

    asyncio.run(body())


def test_a_power_failure_right_after_the_write(tmp_path):
    """The store's disk as it is at the moment at which a checkpoint becomes `host`, and nothing after it."""
    folder, store_folder = tmp_path / "checkpoints", tmp_path / "store"
    config = {"store": store_folder, "store_bytes": 1 << 30, "image": "test-tiny"}
    store = Store.open(store_folder, 1 << 30)
    make_tiny_image(store, tmp_path)
    assert store.file is not None, "this host's own file system is btrfs: the disk cannot be looked at from outside"
    file = store.file
    store.close()

    def barriers() -> bool:
        """Of the store as a run opens it that has not to survive a reboot itself."""
        store = Store.open(store_folder, 1 << 30, durable=False)
        try:
            options = [
                line.split()[3]
                for line in Path("/proc/mounts").read_text().splitlines()
                if line.split()[1] == str(store.root)
            ]
            return "nobarrier" not in options[0].split(",")
        finally:
            store.close()

    assert not barriers()

    async def before() -> Manifest:
        async with durable(folder, **config) as manager:
            box = await manager.create("s")
            await shell(box, "x=kept; printf -v big %01000000d 0; echo $big > /big; sync -f /big")
            manifest = await box.checkpoint(action=1)
            await written(manager, manifest)
            (tmp_path / "power").mkdir()
            subprocess.run(["cp", "--sparse=always", file, tmp_path / "power" / "store.btrfs"], check=True)
            shutil.copytree(folder, tmp_path / "power" / "checkpoints")
            shutil.rmtree(manager.checkpoints.data.memory / manifest.id)
            return manifest

    async def after(manifest: Manifest) -> None:
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "power" / "checkpoints", folder)
        config["store"] = tmp_path / "power"
        async with durable(folder, **config) as manager:
            box = await manager.restore("s", manifest.id)
            assert (
                await shell(box, 'echo $x ${#big}; [ "$(cat /big)" = "$big" ] && echo same') == "kept 1000000\nsame\n"
            )
            await manager.discard("s")

    manifest = asyncio.run(before())
    assert barriers(), "another run may not endanger what survives a reboot"
    asyncio.run(after(manifest))


def test_a_flipped_byte_anywhere_is_refused(tmp_path, image):
    """In every image file, in memory and on disk, and in the manifest; the sandbox that runs is not touched."""

    async def refused(manager: Sandboxes, manifest: Manifest, path: Path, at: int) -> None:
        content = bytearray(path.read_bytes())
        content[at] ^= 0x10
        path.write_bytes(content)
        with pytest.raises(CheckpointDamaged, match=f"{path.name.removesuffix('.json')}"):
            await manager.restore("s", manifest.id)
        content[at] ^= 0x10
        path.write_bytes(content)

    async def body() -> None:
        async with durable(tmp_path / "checkpoints", image=image) as manager:
            data = manager.checkpoints.data
            box = await manager.create("s")
            await shell(box, "x=kept; sleep 600 & mkfifo /fifo")
            manifest = await box.checkpoint(action=1)
            await written(manager, manifest)
            assert len(manifest.images) > 20
            for number, (name, file) in enumerate(sorted(manifest.images.items())):
                await refused(manager, manifest, data.memory / manifest.id / name, number * 7919 % file.size)
            shutil.rmtree(data.memory / manifest.id)  # from here on those on disk are used
            for name, file in sorted(manifest.images.items())[::4]:
                await refused(manager, manifest, data.disk / manifest.id / name, file.size - 1)
            path = data.manifest_path(manifest.id)
            for at in range(0, path.stat().st_size, path.stat().st_size // 12):
                await refused(manager, manifest, path, at)
            assert manifest.host is not None
            newer = msgspec.structs.replace(manifest.host, kernel="99.0.0")
            write_manifest(path, msgspec.structs.replace(manifest, host=newer), durable=False)
            with pytest.raises(CheckpointUnfit, match="kernel 99"):
                await manager.restore("s", manifest.id)
            write_manifest(path, manifest, durable=False)
            extra = data.disk / manifest.id / "core-99.img"
            extra.write_bytes(b"x")
            with pytest.raises(CheckpointDamaged, match=r"core-99\.img is not of this checkpoint"):
                await manager.restore("s", manifest.id)
            extra.unlink()
            await snapshot_changed(manager, manifest)
            assert await shell(box, "echo $x; jobs -r") != "kept\n", "a refused restore touched the running sandbox"
            box = await manager.restore("s", manifest.id)
            assert await shell(box, "echo $x") == "kept\n"
            await manager.discard("s")

    async def snapshot_changed(manager: Sandboxes, manifest: Manifest) -> None:
        data = manager.checkpoints.data
        snapshot = data.snapshots / manifest.id
        # it is read-only: whoever changes it has made it anew
        other = data.snapshots / "other"
        _btrfs.snapshot(snapshot, other)
        (other / "foreign").write_text("x")
        kept = data.snapshots / "kept"
        snapshot.rename(kept)
        with pytest.raises(CheckpointDamaged, match=r"snapshot of checkpoint .* is gone"):
            await manager.restore("s", manifest.id)
        other.rename(snapshot)
        with pytest.raises(CheckpointDamaged, match=r"snapshot of checkpoint .* was changed"):
            await manager.restore("s", manifest.id)
        _btrfs.delete_subvolume(snapshot)
        kept.rename(snapshot)

    asyncio.run(body())


def test_damaged_blocks_of_a_snapshot_are_never_read_as_data(tmp_path):
    """The disk below the store returns something else than was written: reading fails, or the restore does."""
    store_folder = tmp_path / "store"
    store = Store.open(store_folder, 1 << 30)
    make_tiny_image(store, tmp_path)
    assert store.file is not None
    file = store.file
    store.close()

    async def body() -> None:
        folder = tmp_path / "checkpoints"
        config = {"store": store_folder, "store_bytes": 1 << 30, "image": "test-tiny"}
        async with durable(folder, **config) as manager:
            box = await manager.create("s")
            mark = "a mark that is nowhere else on this disk; " * 200
            await box.write("/marked", mark.encode())
            manifest = await box.checkpoint(action=1)
            await written(manager, manifest)
            await manager.retire(box)
        with open(file, "r+b") as disk:
            disk.seek(place_of(mark.encode(), disk) + 100)
            disk.write(b"X")
        async with durable(folder, **config) as manager:
            try:
                box = await manager.restore("s", manifest.id)
            except RestoreFailed:
                return
            with pytest.raises(OSError):
                await box.read("/marked")
            await manager.discard("s")

    asyncio.run(body())


def place_of(mark: bytes, disk: BinaryIO) -> int:
    """Where a sparse file has `mark`, which begins a block."""
    end = 0
    while True:  # ends with an OSError where there is no more data
        start = os.lseek(disk.fileno(), end, os.SEEK_DATA)
        end = os.lseek(disk.fileno(), start, os.SEEK_HOLE)
        at = os.pread(disk.fileno(), end - start, start).find(mark)
        if at >= 0:
            return start + at


@contextmanager
def small_tmpfs(point: Path, size: str) -> Iterator[Path]:
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "belayer-test", str(point)], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


def test_a_full_disk_costs_only_the_write(tmp_path, image):
    """The run's directory runs full: during a background write, during a publication, and when the run ends."""
    seen: list[Event] = []

    async def first(folder: Path, disk: Path) -> tuple[str, str]:
        async with durable(folder, seen, image=image) as manager:
            box = await manager.create("s")
            await shell(box, "x=small")
            small = await box.checkpoint(action=1)
            await written(manager, small)
            await shell(box, "printf -v big %020000000d 0; x=big")
            big = await box.checkpoint(action=2)
            assert big.image_bytes > 16 << 20
            await eventually("the write is given up", lambda: faults(seen), 20)
            assert big.id in faults(seen)[0] and "reboot" in faults(seen)[0]
            left = [path.name for path in (folder / "images").iterdir()]
            assert left == [small.id], "half of a write was left"
            found = manager.newest("s")
            assert found is not None and (found.id, found.durability) == (big.id, "process")
            (disk / "hog").write_bytes(bytes(shutil.disk_usage(disk).free))
            with pytest.raises(StorageFull) as caught:
                await box.checkpoint(action=3)
            assert caught.value.kept and caught.value.next_step
            assert [m.id for m in manager.manifests("s")] == [small.id, big.id]
            assert not list(folder.glob("*.tmp")), "half a manifest"
            box = await manager.restore("s", big.id)
            assert await shell(box, "echo $x ${#big}") == "big 20000000\n"
        return small.id, big.id

    async def second(folder: Path, disk: Path, small: str, big: str) -> None:
        run_id = (folder / "run_id").read_text().strip()
        memory = labels.SHM_DIR / f"data-{run_id}" / "images"
        assert any(big in text and "stay" in text for text in faults(seen)), faults(seen)
        assert [path.name for path in memory.iterdir() if path.is_dir()] == [big]
        done = reap()
        assert any("stays" in line and str(memory) in line for line in done), done
        (disk / "hog").unlink()
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        assert any("moved" in line for line in reap()) and not memory.exists()
        async with durable(folder, image=image) as manager:
            newest = manager.newest("s")
            assert newest is not None and newest.id == big
            await written(manager, newest)  # what an earlier process could not write is written now
            box = await manager.restore("s", big)
            assert await shell(box, "echo $x ${#big}") == "big 20000000\n"
            assert small in [m.id for m in manager.manifests("s")]
            await manager.discard("s")

    with small_tmpfs(tmp_path / "disk", "12m") as disk:
        folder = disk / "checkpoints"
        asyncio.run(second(folder, disk, *asyncio.run(first(folder, disk))))


def test_deleting_needs_no_room(tmp_path):
    with small_tmpfs(tmp_path / "disk", "1m,nr_inodes=8") as disk:
        (disk / _pins._FOLDER).mkdir()
        with pytest.raises(OSError, match="No space left"):
            for number in range(20):
                (disk / str(number)).touch()
        with _pins.unpinned(disk, "a") as free:
            assert free
        (disk / "0").unlink()
        with _pins.pinned(disk, "a") as there, _pins.unpinned(disk, "a") as free:
            assert there and not free


def test_garbage_is_not_written_and_closing_does_not_wait_for_ever(tmp_path, image):
    folder, seen = tmp_path / "checkpoints", []

    async def body() -> str:
        async with durable(folder, seen, image=image, drain_s=0.3) as manager:
            with held("checkpoint.write.file") as there:
                box = await manager.create("gone")
                await box.checkpoint(action=1)
                await asyncio.to_thread(there.wait, 10)
                await manager.discard("gone")  # while it is being written
            await eventually("the write was given up", lambda: not list((folder / "images").iterdir()))
            assert not faults(seen) and not list(folder.glob("*.json"))

            box = await manager.create("s")
            await shell(box, "x=kept")
            failpoints.arm("checkpoint.write.file", lambda: time.sleep(1.0))
            manifest = await box.checkpoint(action=1)
            begun = time.monotonic()
        assert time.monotonic() - begun < 4
        assert ["drain_s" in text for text in faults(seen)] == [True], faults(seen)
        return manifest.id

    async def again(checkpoint: str) -> None:
        assert not list((folder / "images").glob("*.tmp"))
        async with durable(folder, image=image) as manager:
            newest = manager.newest("s")
            assert newest is not None and (newest.id, newest.durability) == (checkpoint, "process")
            await written(manager, newest)
            box = await manager.restore("s", checkpoint)
            assert await shell(box, "echo $x") == "kept\n"
            await manager.discard("s")

    asyncio.run(again(asyncio.run(body())))


def test_forks_keep_what_they_came_from(tmp_path, image):
    async def body() -> None:
        async with sandboxes(tmp_path / "checkpoints", image=image) as manager:
            box = await manager.create("origin")
            await shell(box, "x=prepared")
            forks: list[Sandbox] = await box.fork(2)
            source = forks[0].parent
            assert source is not None
            for action in range(1, 4):
                await box.checkpoint(action=action)
            await manager.discard("origin")
            assert not manager.manifests("origin")
            await eventually("the rest is deleted", lambda: len(manager.checkpoints.data.manifests()) == 1)
            for number, fork in enumerate(forks):  # neither has a checkpoint of its own yet
                kill_init(fork)
                forks[number] = await manager.restore(fork.name, source)
                assert await shell(forks[number], "echo $x") == "prepared\n"
            for fork in forks:
                await fork.checkpoint(action=1)
            await eventually("now nobody needs it", lambda: not manager.checkpoints.data.manifest_path(source).exists())
            with pytest.raises(CheckpointDamaged):
                await manager.restore(forks[0].name, source)
            # one that still needs its origin's when the run ends: it stays no longer than the run
            await forks[0].fork(1)
            await manager.discard(forks[0].name)
            assert len(manager.checkpoints.data.manifests()) == 2
        assert [read_manifest(path).sandbox for path in (tmp_path / "checkpoints").glob("*.json")] == [forks[1].name]
        async with sandboxes(tmp_path / "checkpoints", image=image) as manager:
            await manager.discard(forks[1].name)

    asyncio.run(body())


def test_a_budget_for_all_checkpoints_of_a_run(tmp_path, image):
    async def body() -> None:
        async with sandboxes(tmp_path / "checkpoints", image=image) as manager:
            boxes = [await manager.create(name) for name in ("a", "b", "c")]
            for box in boxes:
                await shell(box, "printf -v big %01000000d 0")
            sizes = []
            for action in (1, 2):
                for box in boxes:
                    sizes.append((await box.checkpoint(action=action)).image_bytes)
        config = {"image": image, "checkpoints_bytes": max(1 << 20, 2 * max(sizes) + max(sizes) // 2)}
        async with sandboxes(tmp_path / "checkpoints", **config) as manager:
            box = await manager.restore("a", manager.manifests("a")[-1].id)
            await box.checkpoint(action=3)
            kept = {name: [m.action for m in manager.manifests(name)] for name in ("a", "b", "c")}
            assert kept == {"a": [3], "b": [], "c": [2]}, "what runs, and then the newest, is kept"
            await eventually("the rest is deleted", lambda: len(manager.checkpoints.data.manifests()) == 2)
            for name in "abc":
                await manager.discard(name)

    asyncio.run(body())


def test_a_hundred_generations(tmp_path, image):
    """Checkpoint, kill, restore, over and over: the state goes on, and nothing piles up anywhere."""
    rounds = 100

    async def body() -> None:
        async with durable(tmp_path / "checkpoints", image=image) as manager:
            box = await manager.create("s")
            await shell(box, "n=0")
            begun = time.monotonic()
            after_warm_up = None
            for number in range(1, rounds + 1):
                assert await shell(box, "n=$((n+1)); echo $n > /n; echo $n") == f"{number}\n"
                manifest = await box.checkpoint(action=number)
                if number % 2:
                    kill_init(box)
                box = await manager.restore("s", manifest.id)
                assert box.generation == number + 1
                if number == 10:
                    after_warm_up = await footprint(manager)
            wall_s = time.monotonic() - begun
            assert await shell(box, "echo $n; cat /n") == f"{rounds}\n{rounds}\n"
            now = await footprint(manager)
            print(f"{rounds} rounds in {wall_s:.1f} s", after_warm_up, now)
            assert after_warm_up is not None
            for name, value in now.items():
                slack = {"memory": 2 << 20, "open files": 3, "threads": 4, "resident": 24 << 20}.get(name, 2)
                assert value <= after_warm_up[name] + slack, (name, after_warm_up, now)
            assert len(manager.manifests("s")) <= 3
            await manager.discard("s")

    asyncio.run(body())


async def footprint(manager: Sandboxes) -> dict[str, int]:
    """What the run takes on the host once its background work is done."""
    await manager.chores.end()
    newest = manager.newest("s")
    assert newest is not None
    await written(manager, newest)
    data = manager.checkpoints.data
    status = Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]
    return {
        "memory": sum(path.stat().st_size for path in data.memory.rglob("*") if path.is_file()),
        "on disk": len(list(data.disk.iterdir())),
        "snapshots": len([path for path in data.snapshots.iterdir() if path.is_dir()]),
        "roots": len([path for path in (manager.store.root / "runs" / manager.label.name).iterdir() if path.is_dir()]),
        "runtime folders": len(list(manager.label.dir.iterdir())),
        "mounts": sum(
            manager.label.name in line or "criu" in line
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
        ),
        "open files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "resident": int(status) << 10,
    }
