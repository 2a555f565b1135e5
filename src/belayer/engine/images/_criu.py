"""The CRIU program as it is used for images: dump a namespace and let it die, restore one as our child."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from belayer.errors import EngineError

_COMMON = ("--manage-cgroups=ignore", "--network-lock", "skip", "-v1")


class CriuFailed(EngineError):
    """CRIU refused or failed; the message is its own reason."""


def program() -> Path:
    """The CRIU to use. Raises `CriuFailed` with the reason why there is none that works here."""
    from belayer.errors import SandboxUnavailable
    from belayer.sandbox.criu import find_criu

    if os.geteuid() != 0:
        raise CriuFailed("images need root: CRIU restores processes with their pids and namespaces")
    try:
        return find_criu()
    except SandboxUnavailable as error:
        raise CriuFailed(error.what, next_step=error.next_step) from None


def forget_kernel_features() -> None:
    """Delete what CRIU remembers about the kernel in /dev/shm; the next call finds it out again in 30 ms."""
    from belayer.sandbox import criu

    criu.forget_kernel_features()


async def dump(pid: int, images: Path, *, timeout_s: float) -> None:
    """Write the process tree of `pid`, the init of a pid namespace, into `images`; the processes are gone then."""
    command = [str(program()), "dump", "-t", str(pid), "-D", str(images), "-o", "dump.log", *_COMMON, "--file-locks"]
    code, output = await run(command, timeout_s=timeout_s)
    if code:
        raise CriuFailed(f"CRIU cannot dump the worker{reason(images / 'dump.log', output)}")


def restore_command(images: Path, work: Path, inherited: dict[str, int]) -> list[str]:
    """The command that restores `images` as a child of its parent; files named in `inherited` become descriptors."""
    command = [str(program()), "restore", "-d", "--restore-sibling", "-D", str(images), "-W", str(work)]
    command += ["-o", "restore.log", "--pidfile", str(work / "pid"), *_COMMON, "--file-locks"]
    for name, fd in inherited.items():
        command += ["--inherit-fd", f"fd[{fd}]:{name}"]
    return command


async def run(
    command: Sequence[str], *, timeout_s: float, fds: Sequence[int] = (), env: dict[str, str] | None = None
) -> tuple[int, str]:
    """Run a helper as a child of the calling thread; returns exit code and output. `TimeoutError`: it was killed."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=tuple(fds),
        env=env,
        cwd="/",
        start_new_session=True,  # killed half-way it would leave processes behind, so it does not die with a group
    )
    loop = asyncio.get_running_loop()
    pidfd = os.pidfd_open(process.pid)
    ended = loop.create_future()
    loop.add_reader(pidfd, lambda: ended.done() or ended.set_result(None))
    try:
        async with asyncio.timeout(timeout_s):
            await ended
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        if process.poll() is None:
            process.kill()
            process.wait()
        assert process.stderr is not None
        os.set_blocking(process.stderr.fileno(), False)  # what it started may still hold the other end
        output = (process.stderr.read() or b"").decode(errors="replace").strip()
        process.stderr.close()
    return process.returncode, output


def reason(log: Path, output: str = "") -> str:
    """The errors of CRIU's log, shortened, to be appended to a sentence."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    # the limit it complains about is one it wants for itself and does without
    wanted = [line.split(") ", 1)[-1] for line in lines if "Error" in line and "RLIMIT_NOFILE" not in line]
    text = "; ".join(wanted[:4]) or output
    return f": {text[:600]}" if text else ""
