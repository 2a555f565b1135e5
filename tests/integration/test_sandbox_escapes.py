"""Agent code is untrusted: the common ways out of a container fail, before and after restores."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import stat
import subprocess
import time
from pathlib import Path

import pytest
from tests.conftest import needs_sandboxes
from tests.sandbox_kit import eventually, run, sandboxes, shell

from belayer.errors import CheckpointRefused, RestoreFailed
from belayer.ownership import RunLabel
from belayer.sandbox import Sandbox, Sandboxes, _cgroup
from belayer.sandbox.criu import MASKED

pytestmark = [pytest.mark.integration, needs_sandboxes]

ATTEMPTS = (Path(__file__).parent / "escape_attempts.py").read_bytes()
KEPT = sum(1 << number for number in (0, 1, 3, 4, 5, 6, 7, 8, 10, 31))  # chown, dac_override, fowner, … setfcap
ABSENT = {"io_uring_setup", "io_uring_enter", "clone3", "userfaultfd", "landlock_create_ruleset", "memfd_secret"}
ABSENT |= {"futuristic", "int 0x80", "x32"}
REFUSED = {"EPERM", "EACCES", "EROFS", "ENOSYS", "EAFNOSUPPORT", "ENETUNREACH", "EBUSY", "EXDEV", "ENOENT"}
PROCESSES, MEMORY = 64, 160 << 20


def host_state() -> dict[str, object]:
    """What an escape would have changed."""
    sysctls = ("core_pattern", "panic", "sysrq", "modprobe", "hostname", "domainname")
    return {
        "sysctls": {
            name: Path(f"/proc/sys/kernel/{name}").read_text()
            for name in sysctls
            if Path(f"/proc/sys/kernel/{name}").exists()
        },
        "mounts": sorted(
            line.split(" ", 5)[4]
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
            if "/pytest-" in line
        ),
        "hostname": socket.gethostname(),
        "devices": [os.stat(path).st_mode for path in ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/ptmx")],
        "modules": Path("/proc/modules").read_text() if Path("/proc/modules").exists() else "",
        "swaps": Path("/proc/swaps").read_text(),
        "clock": abs(time.time() - os.stat("/proc/self").st_ctime) < 3600,
    }


async def attempt_everything(box: Sandbox) -> dict[str, str]:
    """Run the attempts; returns them once none has got anywhere."""
    address = f"belayer-test-{os.getpid()}-{box.generation}"
    with socket.create_server(("127.0.0.1", 0)) as port, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{address}")
        abstract.listen()
        command = ["python3", "/srv/attempts.py", str(port.getsockname()[1]), address]
        result = await box.exec(command, timeout_s=60)
    assert result.ok, result.text[-3000:]
    found = json.loads(result.stdout)
    for name in ("CapPrm", "CapEff", "CapBnd"):
        assert int(found.pop(name), 16) == KEPT, name
    for name in ("CapInh", "CapAmb"):
        assert int(found.pop(name), 16) == 0, name
    assert (found.pop("Seccomp"), found.pop("Seccomp_filters"), found.pop("NoNewPrivs")) == ("2", "1", "1")
    assert (found.pop("interfaces"), found.pop("hostname"), found.pop("clock")) == ("lo", "sandbox", "True")
    assert found.pop("core") == "(0, 0)", "a core dump would go to the host's handler"
    for name in ("/proc/*/root", "/proc/*/fd", "the folder's parents"):
        assert found.pop(name) == "inside", name
    for path in MASKED:  # an empty file lies over them
        if Path(path).exists():
            assert found.pop(f"read {path}") == f"REACHED (\"{path}: b''\")"
    for name in ("the host's loopback", "the host's abstract socket"):
        assert found.pop(name) == "ECONNREFUSED", name
    for name, met in found.items():
        no_such_thing = met == "ENOTTY" and name.endswith("the file system")  # overlayfs knows neither of these
        assert met in REFUSED or no_such_thing, f"{name}: {met}"
        assert met != "ENOENT" or _not_here(name), f"{name} does not exist, which proves nothing"
        assert (met == "ENOSYS") == (name in ABSENT), f"{name}: {met}"
    assert len(found) > 110
    return found


def _not_here(name: str) -> bool:
    """May this path be missing? A container has no /sys and few devices, and of /proc what the host's kernel has."""
    path = name.split(" ", 1)[1]
    return path.startswith(("/sys/", "/dev/")) or (path.startswith("/proc/") and not Path(path).exists())


def plant_devices(box: Sandbox) -> None:
    """Put real device nodes into the container from outside, as a hostile image could have them."""
    folder = box.root / "srv" / "planted"
    folder.mkdir(parents=True)
    disk = next(path for path in sorted(Path("/sys/block").iterdir()) if (path / "dev").is_file())
    for name, kind, numbers in (
        ("disk", stat.S_IFBLK, (disk / "dev").read_text().strip()),
        ("mem", stat.S_IFCHR, "1:1"),
        ("kmsg", stat.S_IFCHR, "1:11"),
        ("loop-control", stat.S_IFCHR, "10:237"),
    ):
        major, minor = map(int, numbers.split(":"))
        os.mknod(folder / name, kind | 0o666, os.makedev(major, minor))
        (folder / name).chmod(0o666)
    os.mknod(folder.parent / "harmless", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (folder.parent / "harmless").chmod(0o666)


def confined(box: Sandbox) -> None:
    """Every process of the container, as the host sees it, is under the filter and without the capabilities."""
    own = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "mnt", "net", "ipc", "uts")}
    looked_at = 0
    for pid in box.processes():
        try:
            status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            namespaces = {kind: os.readlink(f"/proc/{pid}/ns/{kind}") for kind in own}
            targets = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        assert status["Seccomp"] == "2" and status["NoNewPrivs"] == "1" and int(status["CapBnd"], 16) == KEPT, pid
        assert not set(namespaces.items()) & set(own.items()), pid
        for target in targets:
            assert target.startswith(("/dev/", "socket:", "pipe:", "anon_inode:", "/root", "/tmp", "/srv")), (
                pid,
                target,
            )
        looked_at += 1
    assert looked_at >= 2


async def limits_hold(box: Sandbox) -> None:
    result = await box.exec(["python3", "-c", f"x = bytearray({MEMORY}); print(len(x))"])
    assert result.oom and not result.ok
    result = await box.exec("for i in $(seq 200); do sleep 30 & done; wait", timeout_s=2)
    assert not result.ok and len(box.processes()) <= PROCESSES


async def twice_restored(manager: Sandboxes, box: Sandbox) -> Sandbox:
    for _ in range(2):
        manifest = await box.checkpoint(action=1)
        box = await manager.restore(box.name, manifest.id)
    return box


def test_the_common_escapes_fail_before_and_after_restores(tmp_path):
    async def body() -> None:
        before = host_state()
        async with sandboxes(tmp_path / "c", memory_bytes=MEMORY, pids=PROCESSES, cpus=1.5) as manager:
            box = await manager.create("s")
            plant_devices(box)
            await box.write("/srv/attempts.py", ATTEMPTS)
            await shell(box, "sleep 1000 & cat /proc/self/status > /dev/null")
            met = await attempt_everything(box)
            assert all(met[f"{how} planted {node}"] == "EPERM" for how in ("open", "write") for node in ("disk", "mem"))
            assert (await box.exec("echo x > /srv/harmless")).ok, "the device list is not what refused the others"
            confined(box)
            await limits_hold(box)
            box = await twice_restored(manager, box)
            assert await attempt_everything(box) == met
            confined(box)
            await limits_hold(box)
            periods = [folder / "cpu.cfs_quota_us" for folder in box.place.cgroup.folders]
            quota = [path.read_text().strip() for path in periods if path.exists()]
            quota += [
                (folder / "cpu.max").read_text().split()[0]
                for folder in box.place.cgroup.folders
                if (folder / "cpu.max").exists()
            ]
            assert quota in ([], ["150000"])
            assert await box.healthy() is None
        assert host_state() == before

    asyncio.run(body())


# swaps a folder for a link to a path of the host, as fast as it can
SWAP = """
import os, sys
os.makedirs("/data/real", exist_ok=True)
os.symlink(sys.argv[1], "/data/link")
os.rename("/data/real", "/data/box") if not os.path.lexists("/data/box") else None
print("swapping", flush=True)
while True:
    os.rename("/data/box", "/data/away"); os.rename("/data/link", "/data/box")
    os.rename("/data/box", "/data/link"); os.rename("/data/away", "/data/box")
"""


def test_no_link_of_the_agent_leads_the_host_anywhere(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    secret = outside / "secret"
    secret.write_bytes(b"of the host")

    async def body() -> None:
        async with sandboxes(tmp_path / "c") as manager:
            box = await manager.create("s")
            await run(box, f"mkdir /data; ln -s {secret} /data/file; ln -s {outside} /data/folder")
            for path in ("/data/file", "/data/folder/secret", f"/proc/1/root{secret}", f"/proc/1/cwd/../../..{secret}"):
                with pytest.raises((FileNotFoundError, PermissionError)):
                    await box.read(path)
            for path in ("/data/folder/planted", "../../../../../../../../../../" + str(outside / "planted")):
                with pytest.raises(OSError) if path.startswith("/data") else _allowed():
                    await box.write(path, b"x")
            await box.write("/srv/swap.py", SWAP.encode())
            await shell(box, f"python3 /srv/swap.py {outside} > /tmp/said 2>&1 &")
            await eventually("the swapping began", lambda: _exists(box, "/tmp/said"))
            source = tmp_path / "source"
            source.write_bytes(b"x" * 10000)
            for number in range(60):
                for place in (f"/data/box/file{number}", "/data/box/secret"):
                    try:
                        await box.upload(source, place)
                    except OSError:
                        continue  # the container's own trouble
                try:
                    await box.download("/data/box/secret", tmp_path / "back")
                    assert (tmp_path / "back").read_bytes() in (b"", b"x" * 10000)
                except OSError:
                    continue
            assert [path.name for path in outside.iterdir()] == ["secret"]
            assert secret.read_bytes() == b"of the host"

    asyncio.run(body())


class _allowed:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


async def _exists(box: Sandbox, path: str) -> bool:
    return await box.exists(path)


# floods the init's socket from inside, says garbage, and tries to answer in the init's place
NUISANCE = """
import os, socket, threading, time
def flood():  # a connection that waits to be accepted stands in the way of a checkpoint: that is over before it
    while not os.path.exists("/tmp/enough"):
        s = socket.socket(socket.AF_UNIX)
        try:
            s.connect("/run/agent/agent.sock"); s.sendall(os.urandom(4096)); s.recv(10)
        except OSError:
            pass
        s.close()
def take_over():
    state = (48).to_bytes(4, "little") + b"p" + bytes(48)
    while True:
        try:
            os.unlink("/run/agent/agent.sock")
            s = socket.socket(socket.AF_UNIX); s.bind("/run/agent/agent.sock"); s.listen(9)
            open("/tmp/taken", "w").write("x")
            while True:
                c, _ = s.accept(); c.sendall(state); c.close()
        except OSError:
            pass
        for trick, args in ((os.symlink, ("/etc", "/run/agent/more")), (os.rename, ("/run/agent/init", "/tmp/i"))):
            try:
                trick(*args); open("/tmp/taken", "w").write("x")
            except OSError:
                pass
for work in (flood, flood, take_over):
    threading.Thread(target=work, daemon=True).start()
print("begun", flush=True)
time.sleep(1000)
"""


def test_nobody_answers_in_the_place_of_the_init(tmp_path):
    async def body() -> None:
        async with sandboxes(tmp_path / "c") as manager:
            box = await manager.create("s")
            await box.write("/srv/nuisance.py", NUISANCE.encode())
            await shell(box, "python3 /srv/nuisance.py > /tmp/said 2>&1 &")
            await eventually("the nuisance began", lambda: _said(box, "/tmp/said", b"begun"))
            for number in range(20):
                assert (await box.exec(f"echo {number}")).stdout == f"{number}\n".encode()
            assert not await box.exists("/tmp/taken")
            assert await box.healthy() is None
            await box.write("/tmp/enough", b"")
            await asyncio.sleep(0.1)
            manifest = await box.checkpoint(action=1)
            for _ in range(4):
                # its folder is closed while it still sleeps: it is never fast enough
                box = await manager.restore("s", manifest.id)
                assert (await box.exec("echo real")).stdout == b"real\n"
                assert {entry.name for entry in os.scandir(box.place.agent)} == {"init", "mask", "agent.sock"}
                await asyncio.sleep(0.05)
                assert not await box.exists("/tmp/taken")

    asyncio.run(body())


def test_a_folder_that_was_tampered_with_ends_the_restore(tmp_path, monkeypatch):
    async def body() -> None:
        async with sandboxes(tmp_path / "c") as manager:
            box = await manager.create("s")
            # Appends, so that the file is there whether or not the shell has it open at the checkpoint.
            await shell(box, "(while :; do echo awake >> /tmp/awake; sleep 0.01; done) & sleep 0.1")
            manifest = await box.checkpoint(action=1)
            prepare = manager._places.prepare
            roots: list[Path] = []
            written: list[int] = []

            def tampering(*args, **kwargs):
                place = prepare(*args, **kwargs)
                (place.agent / "planted").write_text("x")
                roots.append(place.root)
                # Held open: the size can be read after the folder has been deleted.
                awake = os.open(place.root / "tmp/awake", os.O_RDONLY)
                written.extend((awake, os.fstat(awake).st_size))
                return place

            manager.ground.ahead.drop("s")  # so that one is made now
            monkeypatch.setattr(manager._places, "prepare", tampering)
            with pytest.raises(RestoreFailed, match="tampered with the folder"):
                await manager.restore("s", manifest.id)
            monkeypatch.undo()
            awake, size = written
            assert size > 0 and os.fstat(awake).st_size == size, "a process ran before the folder had been checked"
            os.close(awake)
            back = await manager.restore("s", manifest.id)
            assert (await back.exec("echo fine")).stdout == b"fine\n"
            assert len(roots) == 1 and not roots[0].exists()

    asyncio.run(body())


async def _said(box: Sandbox, path: str, text: bytes) -> bool:
    return await box.exists(path) and text in await box.read(path)


def test_a_moved_run_folder_costs_the_checkpoint_and_nothing_else(tmp_path):
    async def body() -> None:
        async with sandboxes(tmp_path / "c") as manager:
            box = await manager.create("s")
            good = await box.checkpoint(action=1)
            await run(box, "mv /run /elsewhere; ln -s /etc /run")
            assert (await box.exec("echo on")).stdout == b"on\n"
            with pytest.raises(CheckpointRefused):
                await box.checkpoint(action=2)
            assert (await box.exec("echo on")).stdout == b"on\n"
            back = await manager.restore("s", good.id)
            assert (await back.exec("test -S /run/agent/agent.sock")).ok

    asyncio.run(body())


def test_output_cannot_flood_the_driver(tmp_path):
    async def body() -> None:
        async with sandboxes(tmp_path / "c", output_bytes=65536) as manager:
            box = await manager.create("s")
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for call in (box.exec, box.shell):
                result = await call("yes flood | head -c 100000000", timeout_s=60)
                assert result.truncated and len(result.stdout) <= 65536 and result.dropped > 90_000_000
            await shell(box, "(yes background) & (yes background >&2) &")
            for number in range(5):
                assert (await box.exec(f"echo {number}")).stdout == f"{number}\n".encode()
                assert (await box.shell("true", timeout_s=10)).exit_code == 0
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            assert grown < 64 << 10, f"the driver grew by {grown >> 10} MB"

    asyncio.run(body())


def test_the_device_list_of_cgroup_v1(tmp_path):
    """Where there is no cgroup v2, its controller for devices gets the same list."""
    controller = Path("/sys/fs/cgroup/devices")
    if not (controller / "devices.allow").exists():
        pytest.skip("no devices controller of cgroup v1 is mounted here")
    with RunLabel.new("test") as label:
        cgroup = _cgroup.SandboxCgroup(label.name, "s-1")
        cgroup.folders = [controller / _cgroup.ROOT / label.name / "s-1"]
        cgroup.folders[0].parent.mkdir(parents=True)
        disk = next(path for path in sorted(Path("/sys/block").iterdir()) if (path / "dev").is_file())
        os.mknod(tmp_path / "disk", stat.S_IFBLK | 0o600, os.makedev(*map(int, (disk / "dev").read_text().split(":"))))
        try:
            cgroup.make(memory_bytes=1 << 30, pids=10)
            script = (
                f"echo $$ > {cgroup.folders[0]}/cgroup.procs; head -c 1 {tmp_path}/disk; echo x > /dev/null && echo ok"
            )
            done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
            assert "Operation not permitted" in done.stderr and done.stdout == "ok\n", done
        finally:
            (tmp_path / "disk").unlink()
            cgroup.kill()
            cgroup.remove()
            cgroup.folders[0].parent.rmdir()
