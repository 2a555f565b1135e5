"""Remove what dead runs left on the host. Follows the naming scheme of `labels`, and touches nothing else.

A label is dead when its lock can be taken. Kinds are removed in the order in which they hold each other: processes
first (they hold mounts and namespaces), then mounts, namespaces, cgroups, memory files, folders.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec

from belayer.ownership.labels import ENV_VAR, PREFIX, RUNTIME_DIR, SHM_DIR, mounts_below

KILL_DEADLINE_S = 5.0
NETNS_DIR = Path("/run/netns")
CGROUP_ROOT = Path("/sys/fs/cgroup")


class Leftover(msgspec.Struct, frozen=True):
    """One thing that carries a label. `kind`: process, mount, netns, cgroup, shm or folder."""

    label: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def live_labels() -> set[str]:
    """Labels whose run is alive: somebody holds the lock."""
    return {name for name in _labels_on_disk() if _is_alive(name)}


def leftovers(label: str | None = None) -> list[Leftover]:
    """What dead runs (or the one dead run `label`) have left, in the order in which it can be removed."""
    # in this order: a run that starts while we look is then among the living, and what ended meanwhile is dead for sure
    seen = everything_labelled()
    live = live_labels()
    return [thing for thing in seen if thing.label not in live and (label is None or thing.label == label)]


def everything_labelled() -> list[Leftover]:
    """All labelled things of live and dead runs."""
    return [*_processes(), *_mounts(), *_netns(), *_cgroups(), *_folders()]


def reap(label: str | None = None) -> tuple[list[Leftover], list[tuple[Leftover, str]]]:
    """Remove the leftovers of dead runs. Returns what was removed, and what could not be, with the reason."""
    removed: list[Leftover] = []
    failed: list[tuple[Leftover, str]] = []
    # a second look catches what the first removal set free: a process that forked, a mount in a dying namespace
    for _ in range(3):
        things = leftovers(label)
        failed = []
        if not things:
            break
        for thing in things:
            try:
                _REMOVE[thing.kind](thing)
                removed.append(thing)
            except OSError as error:
                failed.append((thing, error.strerror or str(error)))
            except subprocess.CalledProcessError as error:
                failed.append((thing, (error.stderr or b"").decode(errors="replace").strip() or str(error)))
    return list(dict.fromkeys(removed)), failed


# -- finding -------------------------------------------------------------------------------------


def _labels_on_disk() -> set[str]:
    if not RUNTIME_DIR.is_dir():
        return set()
    return {entry.name for entry in RUNTIME_DIR.iterdir() if entry.name.startswith(PREFIX)}


def _is_alive(label: str) -> bool:
    try:
        fd = os.open(RUNTIME_DIR / label / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except PermissionError:
        return True  # another user's, to whom we leave the judgement
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def _processes() -> Iterator[Leftover]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            label = label_of_process(entry.name)
            if label:
                yield Leftover(label, "process", entry.name)


def label_of_process(pid: int | str) -> str:
    """The label that a process carries, or "".

    Its cgroup decides before its environment does: a sandbox restored by a later run still has the environment of the
    run that checkpointed it, and an agent's process may have changed or cleared its own.
    """
    try:
        for line in Path("/proc", str(pid), "cgroup").read_text().splitlines():
            parts = line.rpartition(":")[2].split("/")
            if "belayer" in parts[:-1]:
                label = parts[parts.index("belayer") + 1]
                if label.startswith(PREFIX):
                    return label
        needle = f"{ENV_VAR}={PREFIX}".encode()
        for part in Path("/proc", str(pid), "environ").read_bytes().split(b"\0"):
            if part.startswith(needle):
                return part.partition(b"=")[2].decode()
    except OSError:  # it is gone, or a kernel thread
        pass
    return ""


def _mounts() -> Iterator[Leftover]:
    for point in mounts_below(RUNTIME_DIR):
        part = Path(point).relative_to(RUNTIME_DIR).parts
        if part and part[0].startswith(PREFIX):
            yield Leftover(part[0], "mount", point)


def _netns() -> Iterator[Leftover]:
    if NETNS_DIR.is_dir():
        for entry in NETNS_DIR.iterdir():
            if entry.name.startswith(PREFIX):
                yield Leftover(_label_of(entry.name), "netns", str(entry))


def _cgroups() -> Iterator[Leftover]:
    # os.walk passes over what another run removes while we look
    roots = [CGROUP_ROOT, *(p for p in CGROUP_ROOT.iterdir() if p.is_dir())] if CGROUP_ROOT.is_dir() else []
    for root in dict.fromkeys([*roots, *_cgroup_mounts()]):
        base = root / "belayer"
        for group in _names(base):
            # innermost first: a cgroup with children refuses to go
            for folder, _, _ in os.walk(base / group, topdown=False):
                yield Leftover(group, "cgroup", folder)


def _cgroup_mounts() -> Iterator[Path]:
    """Wherever a host has its hierarchies: not all have them below /sys/fs/cgroup."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, kind = line.partition(" - ")
        if kind.startswith(("cgroup ", "cgroup2 ")):
            yield Path(left.split(" ")[4].encode().decode("unicode_escape"))


def _names(folder: Path) -> list[str]:
    """Entries of `folder` that are named like a label; none when it is not there."""
    try:
        return [name for name in os.listdir(folder) if name.startswith(PREFIX)]
    except FileNotFoundError:
        return []


def _folders() -> Iterator[Leftover]:
    for base, kind in ((SHM_DIR, "shm"), (RUNTIME_DIR, "folder")):
        if base.is_dir():
            for entry in base.iterdir():
                if entry.name.startswith(PREFIX):
                    yield Leftover(entry.name, kind, str(entry))


def _label_of(name: str) -> str:
    """`bly-12345678-anything` → `bly-12345678`."""
    return "-".join(name.split("-")[:2])


# -- removing ------------------------------------------------------------------------------------


def _kill(thing: Leftover) -> None:
    """SIGKILL through a pidfd, after checking again that the process carries the label (pids are reused)."""
    try:
        fd = os.pidfd_open(int(thing.name))
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if label_of_process(thing.name) == thing.label:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                select.select([fd], [], [], KILL_DEADLINE_S)
    finally:
        os.close(fd)


def _unmount(thing: Leftover) -> None:
    subprocess.run(["umount", "-l", thing.name], check=True, capture_output=True)


def _delete_netns(thing: Leftover) -> None:
    subprocess.run(["umount", "-l", thing.name], check=False, capture_output=True)
    os.unlink(thing.name)


def _delete_cgroup(thing: Leftover) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(thing.name)


def _delete_folder(thing: Leftover) -> None:
    if mounts_below(Path(thing.name)):
        raise OSError(0, "still has mounts below it")
    shutil.rmtree(thing.name)


_REMOVE = {
    "process": _kill,
    "mount": _unmount,
    "netns": _delete_netns,
    "cgroup": _delete_cgroup,
    "shm": _delete_folder,
    "folder": _delete_folder,
}
