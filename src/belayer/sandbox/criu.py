"""CRIU as a program: where it is, dump and restore by its RPC.

RPC (`criu swrk`) for one reason: CRIU then asks before it lets the processes go on. In a dump the file-system snapshot
is taken exactly there; in a restore the container's surroundings are closed before its first process is awake. With the
command line's `--leave-stopped` every process would see a SIGSTOP and a SIGCONT that nobody sent.
Reference: images/rpc.proto and Documentation/criu.txt of CRIU 4.2.1.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from belayer import protobuf as pb
from belayer.errors import CheckpointRefused, CheckpointRefusedForNow, RestoreFailed, SandboxUnavailable
from belayer.ownership import cache_dir
from belayer.ownership.reap import live_labels
from belayer.sandbox._keeper import Keeper
from belayer.sandbox._mend import mend_files

MINIMUM = (4, 2)
KERNEL_FEATURES = Path("/dev/shm/criu.kdat")
REMAPPED = "remap-fpath.img"  # which open files have lost a name: CRIU has given some of them another one
GHOST_LIMIT = 512 << 20  # deleted files that are still open are stored up to this size
# files below /proc that native/launch.c covers with an empty file, as far as the kernel has them
MASKED = tuple(f"/proc/{name}" for name in ("keys", "timer_list", "sched_debug", "latency_stats"))
_NETWORK_LOCK_SKIP = 3
_PASSING = ("In-flight connection", "No such process")  # CRIU's words for what may be over a moment later
_DUMP, _RESTORE, _NOTIFY = 1, 2, 6


@cache
def find_criu() -> Path:
    """The CRIU to use: `$BELAYER_CRIU`, the one that set-up chose, or the system's. Raises `SandboxUnavailable`."""
    candidates = [os.environ.get("BELAYER_CRIU", "")]
    chosen = cache_dir() / "criu.path"
    if chosen.is_file():
        candidates.append(chosen.read_text().strip())
    candidates.append(shutil.which("criu", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin") or "")
    too_old = ""
    for candidate in candidates:
        if not candidate or not os.access(candidate, os.X_OK):
            continue
        version = criu_version(Path(candidate))
        if version >= MINIMUM:
            return Path(candidate)
        too_old = f"; {candidate} is version {'.'.join(map(str, version)) or 'unknown'}"
    raise SandboxUnavailable(
        f"no CRIU 4.2 or newer was found{too_old}",
        next_step=f"run scripts/install_criu.sh; where set-up used another BELAYER_CACHE than {cache_dir()}, export it",
    )


def forget_kernel_features() -> None:
    """Delete what our own build of CRIU remembers about the kernel, unless another run lives that needs it.

    The next call finds it out again in 30 ms. scripts/install_criu.sh builds CRIU to remember that on a tmpfs. A
    system's CRIU keeps its own elsewhere.
    """
    with suppress(SandboxUnavailable):
        if len(live_labels()) <= 1 and find_criu().is_relative_to(cache_dir()):
            KERNEL_FEATURES.unlink(missing_ok=True)


def criu_version(program: Path) -> tuple[int, ...]:
    """(major, minor, …) of `program`, or () if it does not say."""
    try:
        done = subprocess.run([program, "--version"], check=False, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"Version: ([0-9.]+)", done.stdout)
    return tuple(int(part) for part in found.group(1).split(".")) if found else ()


async def dump(
    keeper: Keeper,
    *,
    init_pid: int,
    images: Path,
    netns: int,
    while_frozen: Callable[[], Awaitable[None]],
    before_images: Callable[[], None] = lambda: None,
    repeatable: bool = False,
    timeout_s: float = 60.0,
) -> dict[str, float]:
    """Dump the process tree of `init_pid` into the folder `images` and let it run on.

    `before_images` is called in a thread when every process is frozen and none is looked at yet, and may refuse.
    `while_frozen` is awaited when the images are complete and every process is still frozen. If it is `repeatable`, it
    runs beside CRIU, and once more afterwards if CRIU had to add names to files. If one of them raises, the processes
    go on, the dump counts as failed and the exception passes. Returns seconds: `dump_s`, `frozen_s` and `fs_s`. Raises
    `CheckpointRefused` with CRIU's own reason, and `TimeoutError`: the processes are then in an unknown state.
    """
    begun = time.perf_counter()
    fs_s = waited_s = 0.0
    failure: BaseException | None = None
    beside: asyncio.Task[None] | None = None

    async def files() -> None:
        nonlocal fs_s
        at = time.perf_counter()
        try:
            await while_frozen()
        finally:
            fs_s += time.perf_counter() - at

    async def notice(stage: bytes) -> bool:
        nonlocal failure, waited_s, beside
        if stage == b"network-lock":
            try:
                await asyncio.to_thread(before_images)
            except BaseException as error:
                failure = error
            else:
                if repeatable:  # nothing runs any more that could write, but CRIU itself
                    beside = asyncio.create_task(files())
        elif stage == b"post-dump":
            at = time.perf_counter()
            try:
                mend_files(images)
                if beside is not None:
                    await beside
                if beside is None or (images / REMAPPED).exists():
                    await files()
            except BaseException as error:
                failure = error
            waited_s = time.perf_counter() - at
        return failure is None

    try:
        answer, _ = await _ask(
            keeper, [str(find_criu())], (), _dump_request(init_pid, images, netns), notice, timeout_s
        )
    except TimeoutError:
        raise TimeoutError(f"CRIU did not finish the dump within {timeout_s:.0f} s") from None
    finally:
        if beside is not None:  # what it makes must be there to be removed
            await asyncio.wait([beside])
    ended = time.perf_counter()
    if failure is not None:
        raise failure
    if not answer.get(2):
        why = _reason(images / "dump.log")
        refused = CheckpointRefusedForNow if any(words in why for words in _PASSING) else CheckpointRefused
        raise refused(
            f"CRIU cannot capture this sandbox{why}" if answer else f"CRIU ended without an answer{why}",
            kept="the sandbox runs on, and its earlier checkpoints are kept",
        )
    stats = _stats(images / "stats-dump")
    frozen_s = (stats.get(1, 0) + stats.get(2, 0)) / 1e6  # freezing_time, frozen_time in µs
    return {"dump_s": ended - begun - waited_s, "frozen_s": max(frozen_s, fs_s), "fs_s": fs_s}


async def restore(
    run: Callable[[list[str], float], Awaitable[tuple[int, str]]],
    *,
    images: Path,
    root: Path,
    agent: Path,
    work: Path,
    close_agent: bool = False,
    timeout_s: float = 60.0,
) -> int:
    """Restore the images into `root`; returns the pid of the container's init.

    `run` does a role of the program in the container's cgroups, with a fresh network namespace as descriptor 10.
    `close_agent`: nothing inside can change its agent folder any more before the first process runs. The conversation
    with CRIU is native/criu.c's, which a busy driver does not hold up. Raises `RestoreFailed` with CRIU's own reason.
    """
    command = ["restore", "--root", str(root), "--work", str(work)]
    command += ["--request", _restore_request(images, root, agent).hex()]
    if close_agent:
        command += ["--close", str(agent)]
    command += ["--", str(find_criu()), "swrk", "11"]
    try:
        code, output = await run(command, timeout_s)
    except TimeoutError:
        raise RestoreFailed(f"CRIU did not finish the restore within {timeout_s:.0f} s") from None
    found = re.search(r"^pid (\d+)$", output, re.MULTILINE)
    if code or found is None:
        why = f"{output}{_reason(work / 'restore.log')}" if output else _reason(work / "restore.log").removeprefix(": ")
        raise RestoreFailed(f"CRIU cannot restore the images in {images}: {why[:800]}")
    return int(found[1])


async def _ask(
    keeper: Keeper,
    command: list[str],
    fds: tuple[int, ...],
    request: bytes,
    notice: Callable[[bytes], Awaitable[bool]],
    timeout_s: float,
) -> tuple[dict[int, int | bytes], str]:
    """One request to a `criu swrk` that `command` starts with `fds` as descriptors 10, 11, …

    `notice` is awaited at every stage that CRIU reports and says whether to go on. Returns the fields of the answer,
    empty if CRIU ended without one, and what the helper printed. Raises `TimeoutError`.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    loop = asyncio.get_running_loop()
    line = [*command, "swrk", str(10 + len(fds))]
    helper = asyncio.create_task(keeper.run(line, fds=(*fds, theirs.fileno()), deadline_s=timeout_s))
    answer: dict[int, int | bytes] = {}
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.sleep(0)  # the helper's request takes its own copy of the descriptor
            with suppress(ConnectionError):  # the helper ended before CRIU began: its output says why
                await loop.sock_sendall(ours, request)
                theirs.close()
                while data := await loop.sock_recv(ours, 1 << 16):
                    fields = pb.fields(data)
                    if fields.get(1) != _NOTIFY:
                        answer = fields
                        break
                    inner = fields.get(5)
                    stage = pb.fields(inner).get(1) if isinstance(inner, bytes) else None
                    good = await notice(stage if isinstance(stage, bytes) else b"")
                    await loop.sock_sendall(ours, pb.number(1, _NOTIFY) + pb.number(3, int(good)))
    finally:
        theirs.close()
        ours.close()  # ends `criu swrk`, which lets the processes go on
        done = (await asyncio.gather(helper, return_exceptions=True))[0]
    return answer, "" if isinstance(done, BaseException) else done[1]


def _restore_request(images: Path, root: Path, agent: Path) -> bytes:
    options = b"".join(
        [
            pb.number(1, -1),
            pb.number(5, 1),  # tcp_established
            pb.number(8, 1),  # file_locks
            pb.number(9, 1),  # log_level: errors
            pb.content(10, b"restore.log"),
            pb.number(12, 1),  # notify_scripts
            pb.content(13, os.fsencode(root)),
            pb.number(17, 20),  # work_dir_fd: of native/criu.c
            pb.number(24, 1),  # manage_cgroups …
            pb.content(27, pb.content(1, b"extnet") + pb.number(2, 10)),  # inherit_fd: the fresh network namespace
            pb.number(34, 0),  # … in mode IGNORE
            pb.content(37, b"mnt[agent]:" + os.fsencode(agent)),
            pb.content(37, b"mnt[mask]:" + os.fsencode(agent / "mask")),
            pb.number(64, _NETWORK_LOCK_SKIP),
            pb.content(68, os.fsencode(images)),
        ]
    )
    return pb.number(1, _RESTORE) + pb.content(2, options)


def _dump_request(pid: int, images: Path, netns: int) -> bytes:
    external = [b"mnt[/run/agent]:agent", f"net[{netns}]:extnet".encode()]
    external += [f"mnt[{path}]:mask".encode() for path in MASKED]
    options = b"".join(
        [
            pb.number(1, -1),  # images_dir_fd: not used, the path below is
            pb.number(2, pid),
            pb.number(3, 1),  # leave_running
            pb.number(5, 1),  # tcp_established
            pb.number(8, 1),  # file_locks
            pb.number(9, 1),  # log_level: errors
            pb.content(10, b"dump.log"),
            pb.number(12, 1),  # notify_scripts
            # link_remap: an open file that lost one of its names gets another for the snapshot's sake. CRIU removes it
            # when the processes go on, and after a restore
            pb.number(18, 1),
            pb.number(24, 1),  # manage_cgroups …
            pb.number(34, 0),  # … in mode IGNORE
            pb.number(35, GHOST_LIMIT),
            *(pb.content(37, item) for item in external),
            pb.number(64, _NETWORK_LOCK_SKIP),
            pb.content(68, os.fsencode(images)),
        ]
    )
    return pb.number(1, _DUMP) + pb.content(2, options)


def _reason(log: Path, output: str = "") -> str:
    """The errors of CRIU's log, shortened."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    # every dump fails to raise its own limit of descriptors; it does not need to
    wanted = [line.split(") ", 1)[-1] for line in lines if "Error" in line and "RLIMIT_NOFILE" not in line]
    # the first errors name the cause, the later ones what followed from it
    text = "; ".join(wanted[:4]) or output
    return f": {text[:600]}" if text else ""


def log_errors(log: Path) -> str:
    """The errors in a log of CRIU, shortened; "" when there is none or no such file."""
    return _reason(log).removeprefix(": ")


def frozen_seconds(stats: Path) -> float:
    """How long the processes stood still, from the statistics that a dump leaves; 0 when there are none."""
    found = _stats(stats)
    return (found.get(1, 0) + found.get(2, 0)) / 1e6  # freezing_time, frozen_time in µs


def _stats(path: Path) -> dict[int, int]:
    """The dump statistics that CRIU leaves: field number to value, times in µs."""
    try:
        _, found = pb.read_image(path)
        return pb.numbers(pb.parse(pb.messages(pb.parse(found[0]), 1)[0]))
    except (OSError, ValueError, IndexError):
        return {}
