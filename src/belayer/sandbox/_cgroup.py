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
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = "belayer"


@dataclass(frozen=True)
class Hierarchies:
    """Mount points: `unified` of cgroup v2, `v1` by controller; `v2_controllers` that can be delegated to us."""

    unified: Path | None = None
    v1: dict[str, Path] = field(default_factory=dict)
    v2_controllers: frozenset[str] = frozenset()

    @property
    def flavour(self) -> str:
        if self.unified and self.v1:
            return "mixed (v1 and v2)"
        return "v2" if self.unified else "v1" if self.v1 else "none"

    def bases(self) -> list[Path]:
        """One folder per hierarchy that sandboxes join."""
        found = [self.v1[name] for name in ("memory", "pids") if name in self.v1]
        if self.unified:
            found.append(self.unified)
        return [base / ROOT for base in dict.fromkeys(found)]


@cache
def hierarchies() -> Hierarchies:
    """What this host has mounted."""
    unified: Path | None = None
    v1: dict[str, Path] = {}
    with open("/proc/self/mountinfo") as table:
        for line in table:
            left, _, right = line.partition(" - ")
            point, (kind, _, options) = Path(left.split(" ")[4]), right.split(" ", 2)
            if kind == "cgroup2" and unified is None:
                unified = point
            elif kind == "cgroup":
                for name in ("memory", "pids"):
                    if name in options.strip().split(","):
                        v1[name] = point
    controllers: frozenset[str] = frozenset()
    if unified:
        with contextlib.suppress(OSError):
            controllers = frozenset((unified / "cgroup.controllers").read_text().split()) & {"memory", "pids"}
    return Hierarchies(unified, v1, controllers)


def run_folders(label: str) -> list[Path]:
    """Make the run's cgroups and return them, one per hierarchy."""
    host = hierarchies()
    folders = [base / label for base in host.bases()]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    if host.unified and host.v2_controllers:
        enable = " ".join(f"+{name}" for name in sorted(host.v2_controllers))
        for folder in (host.unified, host.unified / ROOT, host.unified / ROOT / label):
            with contextlib.suppress(OSError):  # a container host may not delegate them: then without limits
                (folder / "cgroup.subtree_control").write_text(enable)
    return folders


class SandboxCgroup:
    """The cgroups of one sandbox generation."""

    def __init__(self, run: list[Path], name: str) -> None:
        self.folders = [folder / name for folder in run]
        for folder in self.folders:
            folder.mkdir(exist_ok=True)

    def limit(self, memory_bytes: int, pids: int) -> list[str]:
        """Set the limits; returns the names of those that this host cannot give."""
        missing = []
        for what, files, value in (
            ("memory", ("memory.limit_in_bytes", "memory.max"), memory_bytes),
            ("pids", ("pids.max",), pids),
        ):
            for folder in self.folders:
                target = next((folder / name for name in files if (folder / name).exists()), None)
                if target is not None:
                    target.write_text(str(value))
                    break
            else:
                missing.append(what)
        return missing

    def oom_kills(self) -> int:
        """How many processes the kernel has killed here for lack of memory."""
        for folder in self.folders:
            for name in ("memory.oom_control", "memory.events"):
                with contextlib.suppress(OSError, ValueError):
                    for line in (folder / name).read_text().splitlines():
                        if line.startswith("oom_kill "):
                            return int(line.split()[1])
        return 0

    def pids(self) -> list[int]:
        """Processes inside, as the host numbers them."""
        for folder in self.folders:
            with contextlib.suppress(OSError):
                return [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]
        return []

    def kill(self, timeout_s: float = 5.0) -> bool:
        """SIGKILL everything inside and wait until it is gone. True when nothing is left."""
        return kill_below(self.folders, timeout_s)

    def remove(self) -> None:
        """Remove the (empty) cgroups."""
        for folder in self.folders:
            remove_folder(folder)


def kill_below(folders: list[Path], timeout_s: float = 5.0) -> bool:
    """Kill everything in these cgroups and below; True when nothing is left."""
    deadline = time.monotonic() + timeout_s
    pause = 0.0005
    while True:
        left = False
        for folder in folders:
            for place in _below(folder):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError, OSError):
                    pids = (place / "cgroup.procs").read_text().split()
                    if not pids:
                        continue
                    left = True
                    try:
                        (place / "cgroup.kill").write_text("1")
                    except OSError:
                        for pid in pids:
                            with contextlib.suppress(ProcessLookupError):
                                os.kill(int(pid), 9)
        if not left:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.01)


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
