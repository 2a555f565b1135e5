"""A checkpoint that is refused for something that passes is tried once more. What is made ahead is replaced."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from tests.conftest import needs_sandboxes
from tests.sandbox_kit import eventually, sandboxes, shell

from belayer import events
from belayer.errors import CheckpointRefused, CheckpointRefusedForNow
from belayer.sandbox import _capture, _cgroup

pytestmark = [pytest.mark.integration, needs_sandboxes]

# has a datagram that it does not read before it is told to
UNREAD = """
import os, socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("127.0.0.1", 0))
s.sendto(b"x", s.getsockname())
open("/tmp/sent", "w").close()
while not os.path.exists("/tmp/read"): time.sleep(0.005)
open("/tmp/got", "wb").write(s.recv(10))
time.sleep(600)
"""


def test_what_passes_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(_capture, "RETRY_AFTER_S", 1.0)
    seen: list[events.Event] = []
    tell: list[Path] = []

    def sink(event: events.Event) -> None:
        if event.kind == events.CHECKPOINT_RETRIED:
            seen.append(event)
            for file in tell:
                file.touch()

    async def body() -> None:
        async with sandboxes(tmp_path / "checkpoints", events=sink) as manager:
            box = await manager.create("s")
            await box.write("/root/unread.py", UNREAD.encode())
            await shell(box, "python3 /root/unread.py & true")
            await eventually("there is a datagram", lambda: box.exists("/tmp/sent"))
            with pytest.raises(CheckpointRefusedForNow, match="datagrams that nobody has read"):
                await box.checkpoint(action=1)
            assert len(seen) == 1, "not tried for ever"
            tell.append(box.root / "tmp" / "read")
            manifest = await box.checkpoint(action=1)
            assert manifest.level == "full" and len(seen) == 2
            assert seen[1].subject == "s" and "datagrams" in seen[1].data["reason"]
            box = await manager.restore("s", manifest.id)
            assert await shell(box, "cat /tmp/got") == "x"

            # what does not pass is not tried again
            await shell(
                box, "kill %1; python3 -c 'import os, time; os.eventfd(1, os.EFD_SEMAPHORE); time.sleep(600)' &"
            )
            await eventually("there is a semaphore", lambda: _refused(box))
            assert len(seen) == 2

    asyncio.run(body())


async def _refused(box) -> bool:
    try:
        await box.checkpoint(action=2)
    except CheckpointRefused as error:
        assert not isinstance(error, CheckpointRefusedForNow)
        return "semaphore" in error.what
    return False


def test_slots_that_died_are_not_used(tmp_path):
    async def body() -> None:
        async with sandboxes(tmp_path / "checkpoints") as manager:
            box = await manager.create("s")
            manifest = await box.checkpoint(action=1)
            await eventually("there are spare slots", lambda: _ready(manager))
            slots = list(manager.ground.slots._spare)
            spare = [slot.cgroup for slot in slots]
            for cgroup in spare:
                assert cgroup is not None
                for pid in cgroup.pids():
                    os.kill(pid, signal.SIGKILL)
            await eventually("they are dead", lambda: _dead(slots))
            box = await manager.restore("s", manifest.id)
            assert await shell(box, "echo up") == "up\n"
            await eventually("theirs are gone", lambda: _gone(spare))
            folders = _cgroup.run_folders(manager.label.name)
        assert not any(folder.exists() for folder in folders)

    asyncio.run(body())


async def _ready(manager) -> bool:
    spare = manager.ground.slots._spare
    return len(spare) == 2 and all(slot.cgroup.pids() for slot in spare)


async def _dead(slots) -> bool:
    return not any(slot.good for slot in slots)


async def _gone(cgroups) -> bool:
    return not any(folder.exists() for cgroup in cgroups for folder in cgroup.folders)
