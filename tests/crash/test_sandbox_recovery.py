"""Containers that are really killed, damaged and restored, with files, memory, shell, jobs and servers checked."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from tests.conftest import needs_sandboxes
from tests.sandbox_kit import State, died, kill_init, labelled, run, sandboxes, shell

from belayer.errors import CheckpointDamaged, SandboxLost, StaleSandbox, StorageFull
from belayer.ownership import RunLabel, labels
from belayer.sandbox import Sandbox

pytestmark = [pytest.mark.crash, needs_sandboxes]


def test_kill_and_damage_are_seen_and_repaired(tmp_path):
    async def body() -> None:
        async with sandboxes(tmp_path / "checkpoints") as manager:
            box = await manager.create("s")
            state = await State.prepare(box)
            await state.advance(box)
            kept = state.copy()
            manifest = await box.checkpoint(action=1, context_hash="h", rollout="r", attempt=0)
            assert manifest.level == "full" and manifest.parent is None and manifest.action == 1
            assert manifest.image_bytes > 8 << 20 and 0 < manifest.timings.frozen_s <= manifest.timings.total_s
            await state.check(box)  # the checkpoint disturbed nothing
            await state.advance(box)
            await run(box, "rm -rf /srv /data/a*; echo later > /etc/later")

            # killed from outside
            kill_init(box)
            assert await died(box) < 1
            assert "died" in (await box.healthy() or "")
            with pytest.raises(SandboxLost):
                await box.exec("true")
            with pytest.raises(SandboxLost):
                await box.checkpoint(action=2)
            old = box
            begun = time.monotonic()
            box = await old.restore(manifest.id)
            assert time.monotonic() - begun < 3
            assert box.generation == old.generation + 1 and box.parent == manifest.id
            assert await box.healthy() is None
            assert not await box.exists("/etc/later")
            await kept.check(box)

            # handles of the past
            for call in (old.exec("true"), old.shell("true"), old.read("/etc/hosts"), old.checkpoint(action=9)):
                with pytest.raises(StaleSandbox):
                    await call
            await old.close()  # closing a stale handle does nothing to the new generation
            assert (await box.exec("true")).ok

            # damaged from outside, twice in a row, the second time right after the first restore
            for folder in ("usr", "etc"):
                subprocess.run(["rm", "-rf", "--one-file-system", str(box.root / folder)], check=False)
                wrong = await box.healthy()
                assert wrong is not None and folder in wrong, wrong
                box = await manager.restore("s", manifest.id)
                assert await box.healthy() is None
            again = kept.copy()
            again.asked -= 1  # the memory is that of the checkpoint: it never saw the questions asked since
            await again.check(box)

            # an action that deletes system files is the agent's own doing, once it was accepted
            await run(box, "rm -rf /usr/share")
            assert await box.healthy() is not None
            box.accept()
            assert await box.healthy() is None

            # killed while a command runs: the command is lost, not answered
            running = asyncio.create_task(box.exec("sleep 60"))
            await asyncio.sleep(0.2)
            kill_init(box)
            with pytest.raises(SandboxLost):
                await asyncio.wait_for(running, 5)

    asyncio.run(body())


def test_a_chain_of_restores(tmp_path):
    """Checkpoint, go on, kill, restore, ten times over: nothing of a later state ever shows, nothing is lost."""

    async def body() -> None:
        async with sandboxes(tmp_path / "checkpoints") as manager:
            box = await manager.create("chain")
            state = await State.prepare(box, size=1 << 20)
            for turn in range(1, 11):
                await state.advance(box)
                manifest = await box.checkpoint(action=turn)
                kept = state.copy()
                await kept.copy().advance(box)
                if turn % 2:
                    kill_init(box)
                    await died(box)
                before = box.generation
                box = await manager.restore("chain", manifest.id)
                assert box.generation == before + 1
                if turn in (1, 2, 5, 10):
                    await kept.check(box)
                state = kept
            kept = manager.manifests("chain")
            assert [m.action for m in kept] == [9, 10], "older checkpoints are removed, the newest two are kept"
            assert manager.newest("chain") == kept[-1]
            assert kept[-1].parent == kept[0].id
            roots = [
                path.name
                for path in box.place.tree.home.parent.iterdir()
                if path.is_dir() and path.name.startswith("chain-")
            ]
            assert len([name for name in roots if not name.endswith(".agent")]) <= 2, roots

    asyncio.run(body())


def test_damaged_checkpoints_are_refused(tmp_path):
    async def body() -> None:
        async with sandboxes(tmp_path / "checkpoints") as manager:
            box = await manager.create("d")
            await shell(box, "x=first")
            older = await box.checkpoint(action=1)
            await shell(box, "x=second")
            newer = await box.checkpoint(action=2)

            def page_image(manifest) -> Path:
                found = list(labels.SHM_DIR.glob(f"data-*/images/{manifest.id}/pages-1.img"))
                assert len(found) == 1
                return found[0]

            # one flipped bit in the memory of a process
            pages = page_image(newer)
            content = bytearray(pages.read_bytes())
            content[len(content) // 2] ^= 1
            pages.write_bytes(content)
            with pytest.raises(CheckpointDamaged, match="pages-1"):
                await manager.restore("d", newer.id)
            assert await shell(box, "echo $x") == "second\n", "a refused restore touched the running sandbox"
            content[len(content) // 2] ^= 1
            pages.write_bytes(content[:-4096])
            with pytest.raises(CheckpointDamaged):
                await manager.restore("d", newer.id)
            pages.unlink()
            with pytest.raises(CheckpointDamaged):
                await manager.restore("d", newer.id)
            kill_init(box)
            box = await manager.restore("d", older.id)
            assert await shell(box, "echo $x") == "first\n"

            # a manifest that does not parse, one of another format, and none
            path = tmp_path / "checkpoints" / f"{newer.id}.json"
            text = path.read_text()
            for damage in (text[: len(text) // 2], text.replace('"format": 2', '"format": 99'), ""):
                path.write_text(damage)
                with pytest.raises(CheckpointDamaged):
                    await manager.restore("d", newer.id)
            path.unlink()
            for name in (newer.id, "no-such-checkpoint", "../../etc/passwd"):
                with pytest.raises(CheckpointDamaged):
                    await manager.restore("d", name)
            assert await shell(box, "echo $x") == "first\n"

    asyncio.run(body())


def test_full_memory_costs_only_the_checkpoint(tmp_path, monkeypatch):
    """The place of the process images runs full: that checkpoint does not exist, everything else goes on."""
    small = tmp_path / "shm"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=112m", "belayer-test", str(small)], check=True)
    monkeypatch.setattr(labels, "SHM_DIR", small)

    async def body() -> None:
        async with sandboxes(tmp_path / "checkpoints") as manager:
            box = await manager.create("full")
            await shell(box, "x=kept")
            good = await box.checkpoint(action=1)
            hog = "import os, time; data = os.urandom(150 << 20); open('/tmp/up', 'w').close(); time.sleep(600)"
            await shell(box, f'python3 -c "{hog}" & while ! test -e /tmp/up; do sleep 0.05; done')
            with pytest.raises(StorageFull) as caught:
                await box.checkpoint(action=2)
            assert caught.value.kept and caught.value.next_step
            assert await shell(box, "echo $x; jobs -r | wc -l") == "kept\n1\n", "the sandbox did not go on"
            assert [m.id for m in manager.manifests("full")] == [good.id]
            left = [path.name for path in small.glob("data-*/images/*") if path.is_dir()]
            assert set(left) <= {good.id}, "half of a checkpoint was left"
            box = await manager.restore("full", good.id)
            assert await shell(box, "echo $x; jobs -r | wc -l") == "kept\n0\n"

    try:
        asyncio.run(body())
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_forks_go_their_own_ways(tmp_path):
    async def body() -> None:
        async with sandboxes(tmp_path / "checkpoints") as manager:
            box = await manager.create("origin")
            state = await State.prepare(box, size=1 << 20)
            await state.advance(box)
            forks: list[Sandbox] = await box.fork(3)
            assert len({fork.name for fork in forks} | {box.name}) == 4
            for number, fork in enumerate(forks):
                await state.copy().check(fork)
                await shell(fork, f"echo {number} >| /data/mine; x={number}")
            await state.copy().check(box)
            assert not await box.exists("/data/mine")
            for number, fork in enumerate(forks):
                assert await shell(fork, "cat /data/mine; echo $x") == f"{number}\n{number}\n"
            kill_init(forks[0])
            assert (await forks[1].exec("true")).ok and (await box.exec("true")).ok

    asyncio.run(body())


def test_nothing_is_left_after_close(tmp_path):
    """Of a run with a dead, a running, a restored and a discarded sandbox."""

    async def body(label: RunLabel) -> tuple[Path, list[int]]:
        async with sandboxes(tmp_path / "checkpoints", label) as manager:
            boxes = [await manager.create(name) for name in ("dead", "running", "restored", "discarded")]
            manifest = await boxes[2].checkpoint(action=1)
            await boxes[3].checkpoint(action=1)
            kill_init(boxes[0])
            boxes[2] = await manager.restore("restored", manifest.id)
            await manager.discard("discarded")
            assert not manager.manifests("discarded")
            await run(boxes[1], "sleep 600 >/dev/null 2>&1 &")
            pids = [pid for box in boxes[1:3] for pid in box.processes()]
            assert len(pids) >= 3
            root = boxes[1].place.tree.home.parent
            await manager.discard("restored")
        return root, pids

    before = loop_devices()
    with RunLabel.new("close test") as label:
        root, pids = asyncio.run(body(label))
        assert not [pid for pid in pids if Path(f"/proc/{pid}/cgroup").exists() and label.name in cgroup_of(pid)]
        assert not root.exists() or label.name not in {path.name for path in root.parent.iterdir()}
    assert not labelled(label.name)
    run_id = (tmp_path / "checkpoints" / "run_id").read_text().strip()
    assert not (labels.SHM_DIR / f"data-{run_id}").exists()
    assert not list((tmp_path / "checkpoints").glob("*.json"))
    assert loop_devices() <= max(before, 1), "more loop devices than the one of the store"
    shutil.rmtree(tmp_path / "checkpoints")


def cgroup_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""


def loop_devices() -> int:
    return len(list(Path("/sys/block").glob("loop*/loop/backing_file")))
