"""The place of the next restore, made ahead: it is used, it never stands for another state, and none stays behind."""

from __future__ import annotations

import asyncio
import os

import pytest
from tests.conftest import needs_sandboxes
from tests.sandbox_kit import kill_init, run, sandboxes, shell

from belayer.sandbox import Sandboxes, _btrfs
from belayer.sandbox._place import Place
from belayer.sandbox._warm import mapped, read_ahead

pytestmark = [pytest.mark.integration, needs_sandboxes]

READY_S = 10.0


async def ready(manager: Sandboxes, name: str) -> Place:
    """The place that lies ready for `name`."""
    async with asyncio.timeout(READY_S):
        spare = manager.ground.ahead._spares[name]
        assert spare.made is not None
        place = await asyncio.shield(spare.made)
    assert place is not None
    return place


def places_ahead(manager: Sandboxes) -> list[str]:
    roots = manager.store.root / "runs" / manager.label.name
    return sorted(path.name for folder in (roots, roots / "agents") for path in folder.glob("ahead-*"))


def test_restores_take_what_was_made_ahead(tmp_path):
    async def body() -> None:
        async with sandboxes(tmp_path / "checkpoints") as manager:
            box = await manager.create("s")
            for turn in range(3):
                await shell(box, f"echo {turn} > /root/turn; x={turn}")
                manifest = await box.checkpoint(action=turn)
                place = await ready(manager, "s")
                await shell(box, "echo later > /root/turn; x=later")
                kill_init(box)
                box = await manager.restore("s", manifest.id)
                assert box.root == place.root and box.generation == place.generation == turn + 2
                assert await shell(box, "echo $x; cat /root/turn") == f"{turn}\n{turn}\n"
            # the older checkpoint has none; the newer one's must not be taken for it
            first, second = manager.manifests("s")[-2:]
            box = await manager.restore("s", first.id)
            assert await run(box, "cat /root/turn") == f"{first.action}\n"
            box = await manager.restore("s", second.id)
            assert await run(box, "cat /root/turn") == f"{second.action}\n"
            await box.checkpoint(action=9)
            await ready(manager, "s")
            await manager.discard("s")
            async with asyncio.timeout(READY_S):
                while places_ahead(manager):
                    await asyncio.sleep(0.02)

    asyncio.run(body())


def test_a_changed_place_is_not_taken(tmp_path):
    async def body() -> None:
        async with sandboxes(tmp_path / "checkpoints") as manager:
            box = await manager.create("s")
            await shell(box, "echo right > /root/file")
            manifest = await box.checkpoint(action=1)
            place = await ready(manager, "s")
            (place.root / "root/file").write_text("wrong\n")
            _btrfs.sync(place.root)
            kill_init(box)
            box = await manager.restore("s", manifest.id)
            assert box.root != place.root
            assert await run(box, "cat /root/file") == "right\n"

    asyncio.run(body())


def test_a_newer_checkpoint_takes_the_place_of_an_older_one(tmp_path):
    """Checkpoints that follow each other at once leave one place, and closing leaves none."""

    async def body() -> None:
        async with sandboxes(tmp_path / "checkpoints") as manager:
            box = await manager.create("s")
            for turn in range(4):
                await box.checkpoint(action=turn)
            place = await ready(manager, "s")
            async with asyncio.timeout(READY_S):
                while len(places_ahead(manager)) > 2:  # its root and its agent folder
                    await asyncio.sleep(0.02)
            assert place.root.is_dir()

    asyncio.run(body())


def test_reading_ahead_stays_in_its_folders(tmp_path, monkeypatch):
    root, agent = tmp_path / "root", tmp_path / "agent"
    for folder in (root, agent):
        folder.mkdir()
    (root / "lib").symlink_to("/usr/lib")
    os.mkfifo(root / "pipe")
    (root / "file").write_bytes(b"x" * 5000)
    (agent / "init").write_bytes(b"x" * 5000)
    names = ["/lib/os-release", "/pipe", "/../../etc/passwd", "/gone", "/file", "/run/agent/init", "/run/agent/../x"]
    seen = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *rest: seen.append(os.readlink(f"/proc/self/fd/{fd}")))
    read_ahead(root, agent, {name: {(0, 5000)} for name in names})
    assert seen == [str(root / "file"), str(agent / "init")]
    mine = mapped([os.getpid(), 1 << 22])
    sizes = [size for path, parts in mine.items() if "python" in path for _, size in parts]
    assert sizes and min(sizes) > 0
