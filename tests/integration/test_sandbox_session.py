"""Commands, files and limits of one sandbox: what an agent does all day, and what it tries now and then."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from tests.conftest import needs_sandboxes
from tests.sandbox_kit import eventually, processes_like, run, said, sandboxes, shell

from belayer.errors import ImageError, StaleSandbox
from belayer.sandbox import Sandbox
from belayer.sandbox.criu import MASKED

pytestmark = [pytest.mark.integration, needs_sandboxes]


def with_sandbox(tmp_path: Path, *checks, **config) -> None:
    """Run the checks one after the other in one sandbox."""

    async def body() -> None:
        async with sandboxes(tmp_path / "checkpoints", **config) as manager:
            sandbox = await manager.create("s")
            for check in checks:
                await check(sandbox)
                assert await sandbox.healthy() is None, f"after {check.__name__}"

    asyncio.run(body())


def test_commands_and_files(tmp_path):
    async def exit_codes_and_streams(box: Sandbox) -> None:
        result = await box.exec("echo out; echo err >&2; exit 7")
        assert (result.exit_code, result.stdout, result.stderr, result.ok) == (7, b"out\n", b"err\n", False)
        assert 0 < result.wall_s < 10
        result = await box.exec(["/usr/bin/printf", "%s|", "a b", "$HOME", "*"])
        assert result.stdout == b"a b|$HOME|*|"
        killed = await box.exec("kill -9 $$")
        assert (killed.exit_code, killed.signal, killed.oom) == (None, 9, False)
        missing = await box.exec(["/no/such/program"])
        assert missing.exit_code in (126, 127)
        with pytest.raises(ValueError):
            await box.exec([])
        with pytest.raises(ValueError):
            await box.exec("echo a\0b")

    async def environment_directory_and_input(box: Sandbox) -> None:
        result = await box.exec('echo "$A|$PWD|$HOME"; cat', cwd="/tmp", env={"A": "x y"}, stdin=b"\0\xff bytes")
        assert result.stdout == b"x y|/tmp|/root\n\0\xff bytes"
        much = bytes(range(256)) * 4096
        assert (await box.exec("sha256sum", stdin=much)).stdout.split()[0] == (
            await box.exec("sha256sum", stdin=much)
        ).stdout.split()[0]
        assert said(await box.exec("wc -c", stdin=much)) == str(len(much))
        unread = await box.exec("exit 3", stdin=much)  # a command need not read its input
        assert unread.exit_code == 3

    async def many_at_once(box: Sandbox) -> None:
        results = await asyncio.gather(*(box.exec(f"echo {i}") for i in range(20)))
        assert [said(result) for result in results] == [str(i) for i in range(20)]

    async def fast_answers(box: Sandbox) -> None:
        # an answer may be there before the request is written to its end
        for _ in range(20):
            found = await asyncio.gather(*(box.exists("/none") for _ in range(30)))
            assert not any(found)
        for _ in range(20):
            await box.exec(["/no/such/program"], stdin=b"x" * 500_000)

    async def files(box: Sandbox) -> None:
        data = bytes(range(256)) * 1000
        await box.write("/deep/er/file", data, mode=0o640)
        assert await box.read("/deep/er/file") == data
        assert said(await box.exec("stat -c '%a %s' /deep/er/file")) == f"640 {len(data)}"
        assert await box.exists("/deep/er") and not await box.exists("/deep/none")
        assert not await box.exists("/deep/er/file/below")
        await box.write("in-home", b"")
        assert await box.read("/root/in-home") == b""
        for wrong, path in ((FileNotFoundError, "/none"), (IsADirectoryError, "/deep")):
            with pytest.raises(wrong):
                await box.read(path)
        with pytest.raises(OSError):
            await box.write("/deep/er/file/below", b"x")
        program = tmp_path / "program"
        program.write_text("#!/bin/sh\necho uploaded\n")
        program.chmod(0o755)
        await box.upload(program, "/opt/program")
        assert await run(box, "/opt/program") == "uploaded\n"
        await box.download("/deep/er/file", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == data
        # a name is only a name: nothing of the host is reached through a link
        await run(box, "ln -sf /etc/hostname /tmp/link; ln -sf ../../../../../../etc/shadow /tmp/up")
        assert await box.read("/tmp/link") == b"sandbox\n"

    async def fencing(box: Sandbox) -> None:
        ok = await box.exec("echo new", fence=(3, box.generation))
        assert ok.ok
        for old in ((2, box.generation + 9), (3, box.generation - 1)):
            with pytest.raises(StaleSandbox):
                await box.exec("touch /tmp/from-the-past", fence=old)
        assert not await box.exists("/tmp/from-the-past")

    with_sandbox(
        tmp_path, exit_codes_and_streams, environment_directory_and_input, many_at_once, fast_answers, files, fencing
    )


def test_the_persistent_shell(tmp_path):
    async def keeps_its_state(box: Sandbox) -> None:
        await shell(box, "cd /tmp; x=1; f() { echo f$1; }")
        assert await shell(box, "echo $x $PWD; f 2") == "1 /tmp\nf2\n"
        result = await box.shell("echo a; echo b >&2; false")
        assert (result.exit_code, result.stdout) == (1, b"a\nb\n")
        assert (await box.shell("echo $?")).stdout == b"1\n"
        assert await shell(box, "for i in 1 2\ndo\n  echo $i\ndone") == "1\n2\n"
        assert await shell(box, "cat <<'END'\n$x `y` \"z\"\nEND") == '$x `y` "z"\n'
        assert await shell(box, "printf 'no newline'") == "no newline"
        assert await shell(box, "echo äöü 漢字") == "äöü 漢字\n"
        broken = await box.shell("echo 'unclosed")
        assert broken.exit_code != 0 and not broken.shell_ended
        assert await shell(box, "echo $x; f 3") == "1\nf3\n"

    async def reads_no_input(box: Sandbox) -> None:
        begun = time.monotonic()
        result = await box.shell("cat", timeout_s=10)
        assert (result.exit_code, result.stdout, result.timed_out) == (0, b"", False)
        assert (await box.shell('read -r line; echo "[$line]"', timeout_s=10)).stdout == b"[]\n"
        assert said(await box.shell("python3 -c 'import sys; print(len(sys.stdin.read()))'", timeout_s=10)) == "0"
        assert time.monotonic() - begun < 8

    async def times_out_and_stays(box: Sandbox) -> None:
        begun = time.monotonic()
        result = await box.shell("echo begun; sleep 98765", timeout_s=0.5)
        assert result.timed_out and result.exit_code is None and result.stdout.startswith(b"begun")
        assert time.monotonic() - begun < 5
        result = await box.shell("while :; do :; done", timeout_s=0.5)
        assert result.timed_out
        assert not await processes_like(box, "98765")
        assert await shell(box, "echo $x") == "1\n"

    async def is_cancelled(box: Sandbox) -> None:
        task = asyncio.create_task(box.shell("sleep 87654"))
        await eventually("the command runs", lambda: processes_like(box, "87654"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        async def gone() -> bool:
            return not await processes_like(box, "87654")

        await eventually("the cancelled command is gone", gone)
        assert await shell(box, "echo $x") == "1\n"

    async def ends_and_begins_anew(box: Sandbox) -> None:
        result = await box.shell("echo bye; exit 5")
        assert (result.exit_code, result.shell_ended, result.stdout) == (5, True, b"bye\n")
        assert await shell(box, "echo [$x] $PWD") == "[] /root\n"
        result = await box.shell("exec true")
        assert result.shell_ended
        result = await box.shell("kill -9 $$")
        assert result.shell_ended and result.signal == 9
        assert await shell(box, "echo back") == "back\n"

    with_sandbox(tmp_path, keeps_its_state, reads_no_input, times_out_and_stays, is_cancelled, ends_and_begins_anew)


def test_limits(tmp_path):
    async def timeouts_leave_nothing(box: Sandbox) -> None:
        before = set(box.processes())
        begun = time.monotonic()
        # one that ignores SIGTERM, one in a session of its own: everything the command started goes
        command = "echo partial; trap '' TERM INT; setsid sleep 76543 & sleep 76543 & sleep 76543; sleep 76543"
        result = await box.exec(command, timeout_s=0.4)
        assert result.timed_out and result.exit_code is None and result.stdout == b"partial\n"
        assert time.monotonic() - begun < 4

        async def gone() -> bool:
            return set(box.processes()) <= before

        await eventually("nothing of the command is left", gone)

    async def cancellation_leaves_nothing(box: Sandbox) -> None:
        before = set(box.processes())
        task = asyncio.create_task(box.exec("sleep 65432 | sleep 65432"))
        await eventually("the command runs", lambda: processes_like(box, "65432"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        async def gone() -> bool:
            return set(box.processes()) <= before

        await eventually("nothing of the command is left", gone)
        assert (await box.exec("echo on")).ok

    async def silence(box: Sandbox) -> None:
        result = await box.exec("echo said; sleep 54321", quiet_s=0.3)
        assert result.was_quiet and result.exit_code is None and result.stdout == b"said\n"
        assert not await processes_like(box, "54321")

    async def output(box: Sandbox) -> None:
        for call in (box.exec, box.shell):
            result = await call("head -c 300000 /dev/zero | tr '\\0' x")
            assert result.truncated and result.exit_code == 0
            assert len(result.stdout) + result.dropped == 300_000 and len(result.stdout) <= 65536
        assert not (await box.exec("echo short")).truncated

    async def a_background_process_goes_on(box: Sandbox) -> None:
        begun = time.monotonic()
        result = await box.exec("sleep 43210 & echo started")
        assert result.stdout == b"started\n" and time.monotonic() - begun < 5
        assert await processes_like(box, "43210")
        await run(box, "kill %1 2>/dev/null; pkill -f '[4]3210'")

    async def memory(box: Sandbox) -> None:
        result = await box.exec(["python3", "-c", "x = bytearray(200 << 20); print(len(x))"])
        assert result.oom and not result.ok and result.stdout == b""
        assert (await box.exec("echo alive")).ok

    async def processes(box: Sandbox) -> None:
        result = await box.exec("for i in $(seq 100); do sleep 32109 & done; wait", timeout_s=3)
        assert not result.ok
        assert len(box.processes()) <= 64
        assert (await box.exec("echo alive")).ok

    with_sandbox(
        tmp_path,
        timeouts_leave_nothing,
        cancellation_leaves_nothing,
        silence,
        output,
        a_background_process_goes_on,
        memory,
        processes,
        output_bytes=65536,
        memory_bytes=100 << 20,
        pids=64,
    )


# each must fail; the names say what would have been reached
ESCAPES = {
    "mount": "mount -t tmpfs none /mnt",
    "proc/sys": "echo 1 > /proc/sys/kernel/panic",
    "core pattern": "echo '|/tmp/x' > /proc/sys/kernel/core_pattern",
    "sysrq": "echo h > /proc/sysrq-trigger",
    "proc made writable": "mount -o remount,rw /proc",
    "device": "mknod /tmp/disk b 254 0",
    "chroot": "mkdir -p /tmp/r && chroot /tmp/r /",
    "the agent's socket removed": "rm -f /run/agent/agent.sock; test ! -e /run/agent/agent.sock",
    "the init replaced": "cp /bin/true /run/agent/init",
    "a file beside the init": "touch /run/agent/more",
    "the init killed": "kill -9 1; sleep 0.1; ! kill -0 1",
    "the init stopped": "kill -STOP 1; sleep 0.1; grep -q '^State:.*stopped' /proc/1/status",
    "the clock": "date -s 2000-01-01",
    "the host's memory": "head -c 1 /proc/kcore || head -c 1 /dev/mem",
    "the host's network": "exec 3<>/dev/tcp/1.1.1.1/80",
    "immutable flag": "chattr -i /run/agent",
}
NEEDED_FOR_ESCAPES = ("rm", "cp", "touch", "kill", "date", "head", "mknod", "chroot", "sleep", "grep", "mkdir")
# system calls by ctypes: name, number on x86_64 (None: by symbol), arguments, errno values that count as refused
SYSTEM_CALLS = """
import ctypes, errno, os, platform, socket
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, call, *refusals):
    ctypes.set_errno(0)
    try:
        result = call()
        number = ctypes.get_errno()
    except OSError as error:
        result, number = -1, error.errno
    if not (isinstance(result, int) and result == -1 and number in refusals):
        print("REACHED", name, result, errno.errorcode.get(number, number))
P, S = errno.EPERM, errno.ENOSYS
assert libc.getpid() == os.getpid()
x = platform.machine() == "x86_64"
attempt("mount", lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, b""), P)
attempt("umount", lambda: libc.umount2(b"/proc", 2), P)
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x8000000, 0x4000000, 0x2000000):
    attempt(f"unshare {flag:x}", lambda: libc.unshare(flag), P)
    attempt(f"clone {flag:x}", lambda: libc.syscall(56 if x else 220, flag | 17, 0, 0, 0, 0), P)
attempt("setns", lambda: libc.setns(os.open("/proc/self/ns/net", 0), 0), P)
attempt("ptrace", lambda: libc.syscall(101 if x else 117, 16, 1, 0, 0), P)
attempt("io_uring", lambda: libc.syscall(425, 8, 0), S)
attempt("bpf", lambda: libc.syscall(321 if x else 280, 0, 0, 0), P)
attempt("keyctl", lambda: libc.syscall(250 if x else 219, 0, 0), P)
attempt("sethostname", lambda: socket.sethostname("other"), P)
attempt("open_by_handle_at", lambda: libc.syscall(304 if x else 265, -100, 0, 0), P)
attempt("mknod", lambda: os.mknod("/tmp/disk", 0o60600, os.makedev(254, 0)) or 0, P)
attempt("packet socket", lambda: socket.socket(17, socket.SOCK_RAW).fileno(), errno.EAFNOSUPPORT, P)
attempt("vsock", lambda: socket.socket(40, socket.SOCK_STREAM).fileno(), errno.EAFNOSUPPORT)
attempt("raw ip socket", lambda: socket.socket(2, socket.SOCK_RAW, 1).fileno(), P)
attempt("subvolume", lambda: libc.ioctl(os.open("/tmp", 0), 0x5000940E, bytes(8) + b"inside" + bytes(4082)), P)
attempt("TIOCSTI", lambda: libc.ioctl(os.open("/dev/ptmx", 2), 0x5412, b"x"), P)
print("done")
"""


def test_escapes_fail(tmp_path):
    async def attempts(box: Sandbox) -> None:
        for program in NEEDED_FOR_ESCAPES:
            assert (await box.exec(f"command -v {program}")).ok, (
                f"{program} is missing: the attempt would prove nothing"
            )
        for name, command in ESCAPES.items():
            result = await box.exec(command, timeout_s=10)
            assert not result.ok, f"{name} was reached: {result}"
            assert not box.dead, name

    async def system_calls(box: Sandbox) -> None:
        assert await run(box, f"python3 - <<'END'\n{SYSTEM_CALLS}\nEND") == "done\n"

    async def confinement(box: Sandbox) -> None:
        assert await run(box, "uname -n") == "sandbox\n"
        inside = await run(box, "cat /proc/[0-9]*/comm 2>/dev/null; true")
        assert "pytest" not in inside and "python" not in inside
        fields = dict(line.split(":\t") for line in (await run(box, "cat /proc/self/status")).splitlines())
        assert (fields["Seccomp"], fields["NoNewPrivs"]) == ("2", "1")
        for kind in ("CapEff", "CapPrm", "CapBnd"):
            for capability in (2, 12, 13, 16, 17, 18, 19, 21, 22, 27):  # … net_admin, sys_admin, sys_boot, mknod
                assert not int(fields[kind], 16) >> capability & 1, (kind, capability)
        mounts = await run(box, "cat /proc/self/mounts")
        points = {line.split()[1] for line in mounts.splitlines()} - set(MASKED)
        assert points == {"/", "/proc", "/dev/pts", "/run/agent"}, mounts
        # no descriptor of the host is open in any process of the container
        for pid in box.processes():
            for link in Path(f"/proc/{pid}/fd").iterdir():
                try:
                    target = str(link.readlink())
                except OSError:
                    continue
                assert target.startswith(("/dev/", "socket:", "pipe:", "anon_inode:", "/root", "/tmp")), (pid, target)

    with_sandbox(tmp_path, attempts, system_calls, confinement)


def test_missing_image_and_taken_names(tmp_path):
    async def body() -> None:
        with pytest.raises(ImageError, match=r"no-such-image.*there: .*base"):
            async with sandboxes(tmp_path / "c", image="no-such-image"):
                pass
        async with sandboxes(tmp_path / "c", max_running=2) as manager:
            first = await manager.create("odd name/with ünicode …")
            await run(first, "echo 1 > /tmp/one")
            again = await manager.create("odd name/with ünicode …")
            assert first.stale and again.generation == first.generation + 1
            assert not await again.exists("/tmp/one")
            with pytest.raises(StaleSandbox):
                await first.exec("true")
            with pytest.raises(ImageError):
                await manager.create("other", image="none")
            assert (await again.exec("true")).ok

    asyncio.run(body())
