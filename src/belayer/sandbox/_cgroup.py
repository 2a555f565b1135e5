"""Control groups of a run and its sandboxes, on v1, v2 and mixed hosts.

    <hierarchy>/belayer/<label>/<sandbox>-<g>

The v2 hierarchy, even without controllers, gives an atomic kill of everything inside. Limits go wherever the memory and
pids controllers are. The cgroup is also the label of a sandbox's processes: a restored process keeps the environment it
was dumped with, so the environment cannot carry the label.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from belayer.errors import SandboxUnavailable

ROOT = "belayer"
INNER = "libpod-*"  # what podman names a container's own cgroup
_CONTROLLERS = ("memory", "pids", "cpu", "devices")
_CPU_PERIOD_US = 100_000
# type major:minor; the same list is in native/devices.c, for v2
_DEVICES = ("c 1:3", "c 1:5", "c 1:7", "c 1:8", "c 1:9", "c 5:0", "c 5:2", "c 136:*")


@dataclass(frozen=True)
class Hierarchies:
    """Mount points: `unified` of cgroup v2, `v1` by controller; `delegable` controllers of v2."""

    unified: Path | None = None
    v1: dict[str, Path] = field(default_factory=dict)
    delegable: frozenset[str] = frozenset()

    @property
    def flavour(self) -> str:
        """For people: "v2", "v1", "mixed (v1 and v2)" or "none"."""
        if self.unified and self.v1:
            return "mixed (v1 and v2)"
        return "v2" if self.unified else "v1" if self.v1 else "none"

    @property
    def limits(self) -> set[str]:
        """Which of memory, pids, cpu and devices can be limited here."""
        return set(self.v1) | set(self.delegable) | ({"devices"} if self.unified else set())

    def bases(self) -> list[Path]:
        """One folder per hierarchy that sandboxes join."""
        # v2 limits devices without a controller: v1's is joined only where there is no other
        names = [name for name in _CONTROLLERS if name != "devices" or not self.unified]
        found = [self.v1[name] for name in names if name in self.v1]
        if self.unified:
            found.append(self.unified)
        return [base / ROOT for base in dict.fromkeys(found)]


@cache
def hierarchies() -> Hierarchies:
    """What this host has mounted."""
    return choose(Path("/proc/self/mountinfo").read_text(), _controllers)


def choose(mountinfo: str, controllers: Callable[[Path], set[str]]) -> Hierarchies:
    """The hierarchies to use, from the content of /proc/self/mountinfo; `controllers` of a v2 mount.

    A mount that we may not write to is as good as none. Of several mounts of one hierarchy the one that shows most of
    it counts, else the first: on a host whose cgroups are managed by somebody (systemd) ours are made beside theirs.
    """
    found: dict[str, tuple[int, Path]] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(" "), right.split(" ")
        if len(fields) < 6 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        options = kind[2].split(",")
        if "ro" in fields[5].split(",") or "ro" in options:
            continue
        point = Path(fields[4].encode().decode("unicode_escape"))
        # "/" is all of it; "/docker/…" a part; "/../.." a mount from outside our own cgroup namespace
        hidden = 0 if fields[3] == "/" else len(Path(fields[3]).parts)
        names = ["v2"] if kind[0] == "cgroup2" else [name for name in _CONTROLLERS if name in options]
        for name in names:
            if name not in found or hidden < found[name][0]:
                found[name] = (hidden, point)
    unified = found.pop("v2", (0, None))[1]
    delegable = controllers(unified) & set(_CONTROLLERS) if unified else set()
    return Hierarchies(unified, {name: point for name, (_, point) in found.items()}, frozenset(delegable))


def _controllers(unified: Path) -> set[str]:
    try:
        return set((unified / "cgroup.controllers").read_text().split())
    except OSError:
        return set()


def run_folders(label: str) -> list[Path]:
    """The run's cgroup in each hierarchy."""
    return [base / label for base in hierarchies().bases()]


def make_run(label: str) -> None:
    """Make the run's cgroups and pass the controllers of v2 down to them. Raises `SandboxUnavailable`."""
    host = hierarchies()
    for folder in run_folders(label):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SandboxUnavailable(
                f"no cgroup can be made at {folder}: {error.strerror}",
                next_step="an outer container needs --privileged and a writable /sys/fs/cgroup",
            ) from error
    if host.unified:
        for name in sorted(host.delegable):
            for folder in (host.unified, host.unified / ROOT, host.unified / ROOT / label):
                # a host that is itself a container may refuse: then there is no limit, and `belayer doctor` says so
                with contextlib.suppress(OSError):
                    (folder / "cgroup.subtree_control").write_text(f"+{name}")


class SandboxCgroup:
    """The cgroups of one sandbox generation."""

    def __init__(self, label: str, name: str) -> None:
        self.folders = [folder / name for folder in run_folders(label)]

    def make(self, *, memory_bytes: int, pids: int) -> None:
        """Create them, with limits where this host has the controllers."""
        for folder in self.folders:
            folder.mkdir(exist_ok=True)
            for name, value in (
                ("memory.limit_in_bytes", memory_bytes),
                ("memory.memsw.limit_in_bytes", memory_bytes),  # v1; must follow the line above
                ("memory.max", memory_bytes),
                ("memory.swap.max", 0),
                ("pids.max", pids),
            ):
                _set(folder / name, str(value))
            if _set(folder / "devices.deny", "a"):
                for device in _DEVICES:
                    _set(folder / "devices.allow", f"{device} rwm")

    def limit_cpu(self, cpus: float) -> None:
        """At most `cpus` processors' time. Not part of `make`: a restore would be slowed down with the sandbox."""
        quota = max(1000, round(cpus * _CPU_PERIOD_US))
        for folder in self.folders:
            _set(folder / "cpu.cfs_period_us", str(_CPU_PERIOD_US))
            _set(folder / "cpu.cfs_quota_us", str(quota))
            _set(folder / "cpu.max", f"{quota} {_CPU_PERIOD_US}")

    def oom_kills(self) -> int:
        """How many processes the kernel has killed here for lack of memory."""
        return self._event((("memory.oom_control", "oom_kill"), ("memory.events", "oom_kill")))

    def refused_processes(self) -> int:
        """How often the process limit has refused a new process."""
        return self._event((("pids.events.local", "max"), ("pids.events", "max")))

    def _event(self, places: tuple[tuple[str, str], ...]) -> int:
        found = 0  # v1 counts where the processes are, v2 there and above
        for folder in self._with_inner():
            for name, key in places:
                with contextlib.suppress(OSError, ValueError):
                    for line in (folder / name).read_text().splitlines():
                        if line.startswith(f"{key} "):
                            found = max(found, int(line.split()[1]))
        return found

    def _with_inner(self) -> list[Path]:
        """Its folders, and below each the one that another runtime made for the container."""
        return [place for folder in self.folders for place in _with_inner(folder)]

    def memory_bytes(self) -> int:
        """Memory charged to the sandbox, file cache included; 0 where this host does not count it."""
        for folder in self.folders:
            for name in ("memory.usage_in_bytes", "memory.current"):
                with contextlib.suppress(OSError, ValueError):
                    return int((folder / name).read_text())
        return 0

    def pids(self) -> list[int]:
        """Processes inside, as the host numbers them."""
        for folder in self.folders:
            with contextlib.suppress(OSError):
                return [
                    int(pid) for place in _with_inner(folder) for pid in (place / "cgroup.procs").read_text().split()
                ]
        return []

    def kill(self, timeout_s: float = 5.0) -> bool:
        """SIGKILL everything inside and wait until it is gone. True when nothing is left. Blocking."""
        return kill_below(self.folders, timeout_s)

    def remove(self) -> None:
        """Remove the (empty) cgroups. Blocking."""
        for folder in self.folders:
            remove_folder(folder)


def _with_inner(folder: Path) -> list[Path]:
    """The folder, and those below it that another runtime made for the container; empty if it is gone by now."""
    try:
        return [folder, *folder.glob(INNER)]
    except FileNotFoundError:  # `glob` looks first and reads then, and a dead sandbox's folder goes in between
        return []


def _set(file: Path, text: str) -> bool:
    """Write a limit. False where the file is absent: another hierarchy's, or a kernel that does not count swap."""
    try:
        fd = os.open(file, os.O_WRONLY)
    except (FileNotFoundError, PermissionError):
        return False
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
    return True


def freeze(folder: Path, timeout_s: float) -> None:
    """Stop every process in this cgroup (v2). Writing "0" to its `cgroup.freeze` lets them go on. Blocking.

    Raises `TimeoutError`; they may then be stopped in part.
    """
    (folder / "cgroup.freeze").write_text("1")
    deadline = time.monotonic() + timeout_s
    while "frozen 1" not in (folder / "cgroup.events").read_text():
        if time.monotonic() > deadline:
            raise TimeoutError(f"its processes did not stop within {timeout_s:.0f} s")
        time.sleep(0.0005)


def kill_below(folders: list[Path], timeout_s: float = 5.0) -> bool:
    """Kill everything in these cgroups and below; True when nothing is left."""
    deadline = time.monotonic() + timeout_s
    pause = 0.0005
    while True:
        left = [place for folder in folders for place in _below(folder) if _kill_once(place)]
        if not left:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.01)


def _kill_once(place: Path) -> bool:
    """Kill what is directly in one cgroup; was there anything?"""
    try:
        pids = (place / "cgroup.procs").read_text().split()
    except OSError:
        return False
    if pids:
        try:
            (place / "cgroup.kill").write_text("1")
        except OSError:  # v1, or a kernel before 5.14
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
    return bool(pids)


def remove_folder(folder: Path, timeout_s: float = 2.0) -> None:
    """Remove a cgroup and those below it. A cgroup stays busy for a moment after its last process was reaped."""
    deadline = time.monotonic() + timeout_s
    for place in _below(folder):
        while True:
            try:
                place.rmdir()
                break
            except FileNotFoundError:
                break
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.002)


def _below(folder: Path) -> list[Path]:
    """`folder` and all cgroups below it, deepest first."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                found.extend(_below(Path(entry.path)))
        found.append(folder)
    return found
