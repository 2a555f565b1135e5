"""The podman runtime: the same sandboxes, with podman's containers and podman's checkpoints."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.conftest import needs_sandboxes
from tests.sandbox_kit import OWN_FOLDERS, State, died, eventually, kill_init, labelled, run, sandboxes, shell

from belayer.errors import CheckpointDamaged, CheckpointRefused, StaleSandbox
from belayer.ownership.reap import reap
from belayer.sandbox import Sandbox, podman

_reason = podman.missing()
pytestmark = [
    pytest.mark.integration,
    needs_sandboxes,
    pytest.mark.skipif(_reason is not None, reason=f"podman: {_reason}"),
]
ROOT = Path(__file__).parents[2]


async def damage(box: Sandbox) -> None:
    """What must be gone after a restore."""
    await run(box, "rm -rf /srv /data/a* /dev/shm/*; echo later > /etc/later; echo later > /etc/hostname")
    await shell(box, "cd /; unset EXPORTED; kill $job")


def test_full_restore_fork_and_resume(tmp_path):
    async def first() -> tuple[str, State]:
        async with sandboxes(tmp_path / "checkpoints", runtime="podman") as manager:
            box = await manager.create("s")
            assert (await run(box, "hostname; cat /etc/hostname")).split() == ["sandbox", "sandbox"]
            state = await State.prepare(box)
            await state.advance(box)
            # outside the root file system, in it but below another mount, deleted and still open
            await run(box, "echo mine > /etc/hostname; echo shared > /dev/shm/x")
            await shell(box, "exec 7<>/tmp/deleted; head -c 3000000 /dev/urandom >&7; rm /tmp/deleted")
            digest = await shell(box, "sha256sum < /proc/self/fd/7")

            async def check(found: Sandbox, kept: State) -> None:
                await kept.copy().check(found)
                assert await run(found, "cat /etc/hostname /dev/shm/x") == "mine\nshared\n"
                assert not await found.exists("/etc/later")
                assert await shell(found, "sha256sum < /proc/self/fd/7") == digest
                assert int(await run(found, "cat /sys/class/net/lo/flags"), 16) & 1, "lo is down"
                assert await found.healthy() is None

            manifest = await box.checkpoint(action=1, rollout="r")
            assert (manifest.level, manifest.runtime, manifest.parent) == ("full", "podman", None)
            assert 0 < manifest.timings.fs_s < manifest.timings.frozen_s < manifest.timings.total_s
            kept = state.copy()
            await check(box, state)  # the checkpoint disturbed nothing
            for generation in (2, 3):  # the second time from a checkpoint of the restored container
                await damage(box)
                kill_init(box)
                assert await died(box) < 2
                folder = manager.checkpoints.data.images(manifest.id)
                assert folder is not None
                for file in folder.iterdir():  # what is not in the manifest is in no copy of the checkpoint either
                    if file.name not in manifest.images:
                        file.unlink()
                old, box = box, await box.restore(manifest.id)
                assert (box.generation, box.parent) == (generation, manifest.id)
                with pytest.raises(StaleSandbox):
                    await old.exec("true")
                manifest = await box.checkpoint(action=generation)
                assert manifest.parent == box.parent
                await check(box, kept)

            forks = await box.fork(2)
            await run(forks[0], "echo other > /data/turn; echo other > /dev/shm/x")
            assert await forks[1].read("/dev/shm/x") == b"shared\n"
            assert await box.read("/data/turn") == b"1\n"
            assert len({fork.init_pid for fork in (box, *forks)}) == 3
            for fork in forks:
                assert set(fork.processes()).isdisjoint(box.processes())
                assert len(fork.processes()) >= 4  # init, shell, job, server
                await manager.discard(fork.name)
            return manifest.id, kept

    async def second(checkpoint_id: str, kept: State) -> None:
        async with sandboxes(tmp_path / "checkpoints") as manager:
            with pytest.raises(CheckpointDamaged, match="podman"):
                await manager.restore("s", checkpoint_id)
        async with sandboxes(tmp_path / "checkpoints", runtime="podman") as manager:  # under another label
            box = await manager.restore("s", checkpoint_id)
            await kept.copy().check(box)

    checkpoint_id, kept = asyncio.run(first())
    asyncio.run(second(checkpoint_id, kept))


def test_limits_refusals_and_deadlines(tmp_path):
    async def body() -> None:
        async with sandboxes(tmp_path / "checkpoints", runtime="podman", memory_bytes=96 << 20, pids=64) as manager:
            box = await manager.create("s")
            greedy = await box.exec("python3 -c 'x = bytearray(400 << 20)'")
            assert greedy.oom and greedy.exit_code != 0, greedy
            status = await run(box, "cat /proc/self/status")
            fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            assert (fields["Seccomp"], fields["NoNewPrivs"]) == ("2", "1")
            assert not int(fields["CapEff"], 16) >> 21 & 1, "CAP_SYS_ADMIN"
            assert "resolv.conf" not in await run(box, "cat /proc/self/mounts")  # nothing of the host's network

            # a container that cannot be captured runs on, and later it can be
            await run(box, "head -c 70000 /dev/zero > /etc/hostname")
            with pytest.raises(CheckpointRefused, match="hostname"):
                await box.checkpoint(action=1)
            assert (await box.exec("true")).ok
            assert not manager.manifests("s") and not any(manager.checkpoints.data.snapshots.glob("s-*"))
            await run(box, "echo small > /etc/hostname")
            await shell(box, "cd /tmp; here=yes")
            manifest = await box.checkpoint(action=1)
            box = await box.restore(manifest.id)
            assert await shell(box, "echo $here $PWD") == "yes /tmp\n"
            assert (await box.exec("sleep 60", timeout_s=0.2)).timed_out

    asyncio.run(body())


DRIVER = """
import asyncio, sys
from pathlib import Path
from belayer.config import SandboxConfig
from belayer.ownership import RunLabel
from belayer.sandbox import Sandboxes

async def main(folder):
    label = RunLabel.new("driver to be killed")
    manager = await Sandboxes.open(SandboxConfig(runtime="podman"), label, checkpoints=Path(folder))
    box = await manager.create("s")
    await box.shell("sleep 600 &")
    manifest = await box.checkpoint(action=1)
    print(label.name, manifest.id, *box.processes(), flush=True)
    await box.exec("sleep 600", timeout_s=600)

asyncio.run(main(*sys.argv[1:]))
"""


def test_a_killed_driver_leaves_nothing_running(tmp_path):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "checkpoints")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        label, checkpoint_id, *pids = process.stdout.readline().split()
        watched = [os.pidfd_open(int(pid)) for pid in pids]
        assert len(watched) >= 3
    finally:
        process.kill()
        process.communicate()

    async def body() -> None:
        deadline = time.monotonic() + 5
        for fd in watched:
            ready = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().add_reader(fd, lambda f=ready: f.done() or f.set_result(None))
            await asyncio.wait_for(ready, deadline - time.monotonic())
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
        await eventually("no process carries its label", lambda: not processes(label))
        removed, failed = await asyncio.to_thread(reap, label)
        assert removed and not failed, failed
        left = [thing for thing in labelled(label) if thing.kind not in OWN_FOLDERS]
        assert not left, left
        async with sandboxes(tmp_path / "checkpoints", runtime="podman") as manager:
            box = await manager.restore("s", checkpoint_id)
            assert "Running" in await shell(box, "jobs")

    asyncio.run(body())


def processes(label: str) -> list[str]:
    return [thing.name for thing in labelled(label) if thing.kind == "process"]
