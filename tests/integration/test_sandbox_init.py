"""The init inside: what a command may do to its descriptors, processes and limits without harm to the next one."""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path

import pytest
from tests.conftest import needs_sandboxes
from tests.sandbox_kit import eventually, processes_like, run, sandboxes, settled, shell

from belayer.sandbox import Sandbox

pytestmark = [pytest.mark.integration, needs_sandboxes]

EXECS = 2000
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3 if sys.argv[1] == "keeps" else 0, 3):
            os.close(fd)
        open("/tmp/daemon-" + sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(3600)
    os._exit(0)
os.wait()
print("started", sys.argv[1])
"""
# opens the pipes of init, of its own supervisor and of every other process, and writes an exit code into them
FORGE = """
import os, struct
opened = []
for pid in ("1", str(os.getppid()), *(p for p in os.listdir("/proc") if p.isdigit() and p != str(os.getpid()))):
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        continue
    for name in names:
        try:
            if os.readlink(f"/proc/{pid}/fd/{name}").startswith("pipe:") and pid in ("1", str(os.getppid())):
                fd = os.open(f"/proc/{pid}/fd/{name}", os.O_WRONLY | os.O_NONBLOCK)
                os.write(fd, struct.pack("ii", 0, 0))
                opened.append((pid, name))
        except OSError:
            pass
print(opened, flush=True)
os._exit(9)
"""


def init_facts(box: Sandbox) -> tuple[int, int]:
    """(open descriptors, resident kB) of the container's init."""
    fds = len(list(Path(f"/proc/{box.init_pid}/fd").iterdir()))
    lines = Path(f"/proc/{box.init_pid}/status").read_text().splitlines()
    return fds, next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def zombies(box: Sandbox) -> list[int]:
    found = []
    for pid in box.processes():
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                found.append(pid)
        except OSError:
            continue
    return found


def test_init(tmp_path):
    async def output_is_bytes(box: Sandbox) -> None:
        noise = random.Random(4).randbytes(300_000)
        result = await box.exec("tee /dev/stderr", stdin=noise)
        assert result.stdout == noise and result.stderr == noise and not result.truncated
        frames = b"\x18\0\0\0x" + bytes(28) + b"\0\0\0\0E\0\0\0\0o" * 50  # what the answers of init look like
        result = await box.exec("cat; exit 42", stdin=frames)
        assert (result.exit_code, result.stdout) == (42, frames)
        # and what the shell's own bookkeeping looks like
        for text in ("7 0", "belayer-done 0", "\\0337 0\\n\\0", "$_BLY_N $_BLY_S", "\\377\\376" * 24):
            result = await box.shell(f"printf '%b\\n' '{text}'; (exit 41)")
            assert result.exit_code == 41 and not result.shell_ended, text

    async def exit_codes_cannot_be_forged(box: Sandbox) -> None:
        result = await box.exec(["python3", "-c", FORGE])
        assert (result.exit_code, result.stdout) == (9, b"[]\n"), result
        for command in ("exec 198<&- 199>&-", "exec 199>/tmp/x 198</dev/null", "exec 5>&1 1>&5", "exec 0<&-"):
            result = await box.shell(command)
            assert not result.shell_ended, command
            assert await shell(box, "echo still here") == "still here\n", command
        quiet = await box.shell("echo 3 0 >&199; (exit 6)", timeout_s=10)
        assert quiet.exit_code == 6 and not quiet.timed_out

    async def closed_and_redirected(box: Sandbox) -> None:
        result = await box.exec("exec >&- 2>&- <&-; sleep 0.1; exit 3")
        assert (result.exit_code, result.stdout, result.stderr) == (3, b"", b"")
        result = await box.exec("echo a; exec >/tmp/elsewhere; echo b; exec 2>&1; echo c >&2; exit 4")
        assert (result.exit_code, result.stdout, result.stderr) == (4, b"a\n", b"")
        assert await box.read("/tmp/elsewhere") == b"b\nc\n"
        # everything that can be closed is closed, and the supervisor above is shot
        result = await box.exec('for fd in $(ls /proc/self/fd); do eval "exec $fd>&-"; done; exit 5')
        assert result.exit_code == 5
        result = await box.exec("kill -9 $PPID; sleep 1", timeout_s=5)
        assert result.signal == 9 and not result.timed_out
        assert await run(box, "echo on") == "on\n"

    async def daemons_go_on(box: Sandbox) -> None:
        await box.write("/tmp/daemon.py", DAEMON.encode())
        for kind in ("closes", "keeps"):
            begun = time.monotonic()
            assert await run(box, f"python3 /tmp/daemon.py {kind}") == f"started {kind}\n"
            assert time.monotonic() - begun < 10
        await asyncio.sleep(0.1)
        for kind in ("closes", "keeps"):
            pid = (await box.read(f"/tmp/daemon-{kind}")).decode()
            assert (await box.exec(f"kill -0 {pid}")).ok, f"the daemon that {kind} its descriptors is dead"
            assert await run(box, f"ps -o ppid= -p {pid} | tr -d ' '") == "1\n"
            await run(box, f"kill -9 {pid}")

    async def a_stopped_supervisor_is_no_hiding_place(box: Sandbox) -> None:
        before = set(box.processes())
        result = await box.exec("echo partial; kill -STOP $PPID; sleep 24680 & sleep 24680", timeout_s=0.5)
        assert result.timed_out and result.stdout == b"partial\n"
        await eventually("nothing of it is left", lambda: set(box.processes()) <= before)

    async def checkpoint_after_cancellation(box: Sandbox) -> None:
        for command in ("trap '' TERM INT; sleep 13579; sleep 13579", "yes", "setsid -w sleep 13579"):
            # what a command of the shell puts into a session of its own is the shell's, like a daemon
            for call in (box.exec,) if "setsid" in command else (box.exec, box.shell):
                task = asyncio.create_task(call(command))
                await asyncio.sleep(0.1)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                manifest = await box.checkpoint(action=1)
                assert manifest.level == "full"
                assert await shell(box, "echo on") == "on\n"
        await run(box, "pkill -9 sleep; true")

    async def thousands_leave_nothing(box: Sandbox) -> None:
        async def many(count: int) -> None:
            for _ in range(count // 50):
                await asyncio.gather(*(box.exec(["/bin/true"]) for _ in range(46)), box.exec("exit 3"), box.exec("x &"))
                await asyncio.gather(box.exists("/etc"), box.exec("cat", stdin=b"x" * 10_000))

        await many(200)
        fds, resident = init_facts(box)
        processes = len(box.processes())
        await many(EXECS)
        await eventually("all are reaped", lambda: not zombies(box))
        now_fds, now_resident = init_facts(box)
        assert now_fds <= fds, f"{now_fds - fds} descriptors more"
        assert now_resident <= resident + 400, f"{now_resident - resident} kB more"
        # `x &` is a command that ends before what it began
        await eventually("no process is more than before", lambda: len(box.processes()) <= processes)
        assert (await box.state()).jobs == 0

    async def body() -> None:
        async with sandboxes(tmp_path / "checkpoints") as manager:
            box = await manager.create("s")
            await settled(manager)
            before = len(os.listdir("/proc/self/fd"))
            for check in (
                output_is_bytes,
                exit_codes_cannot_be_forged,
                closed_and_redirected,
                daemons_go_on,
                a_stopped_supervisor_is_no_hiding_place,
                checkpoint_after_cancellation,
                thousands_leave_nothing,
            ):
                begun = time.monotonic()
                await check(box)
                assert not await processes_like(box, "13579"), check.__name__
                print(f"{check.__name__}: {time.monotonic() - begun:.1f} s")
            assert len(os.listdir("/proc/self/fd")) <= before + 2, "descriptors of ours"

    asyncio.run(body())


def test_truncation_is_explicit(tmp_path):
    async def body() -> None:
        async with sandboxes(tmp_path / "checkpoints", output_bytes=4096) as manager:
            box = await manager.create("s")
            for call in (box.exec, box.shell):
                result = await call("head -c 5000000 /dev/zero; (exit 12)")
                assert (result.exit_code, result.truncated, len(result.stdout)) == (12, True, 4096)
                assert result.dropped == 5_000_000 - 4096
            split = await box.exec("head -c 3000 /dev/zero; head -c 3000 /dev/zero >&2")
            assert len(split.stdout) + len(split.stderr) == 4096 and split.dropped == 6000 - 4096
            late = await box.exec("yes | head -c 100000; sleep 60", timeout_s=0.5)
            assert late.timed_out and late.truncated and len(late.stdout) == 4096
            assert init_facts(box)[1] < 8192, "the init kept what it should have dropped"

    asyncio.run(body())
