"""What an engine holds on the host: a fault that leaves something behind shows as growth."""

from __future__ import annotations

import contextlib
import os
import statistics
from pathlib import Path

import msgspec

from belayer.faults.engine_strikes import Striker
from belayer.ownership import RunLabel
from belayer.ownership.reap import everything_labelled

# more than this between the begin and the end of a campaign is a leak; a worker from an image brings an init process
TOLERANCE = {"driver_fds": 3, "driver_threads": 4, "driver_mib": 100, "processes": 2, "owner_fds": 3, "nursery_fds": 3}
EDGE = 5  # samples at either end that are compared, by their medians


class Usage(msgspec.Struct, frozen=True):
    """Taken while owner, worker and shadow are all well; the pids say whose numbers these are."""

    driver_fds: int
    driver_threads: int
    driver_mib: int
    processes: int
    owner_fds: int
    nursery_fds: int
    owner_pid: int
    nursery_pid: int


def usage(label: RunLabel, striker: Striker) -> Usage:
    owner, nursery = striker.pid("owner") or 0, striker.pid("nursery") or 0
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Usage(
        driver_fds=_fds("self"),
        driver_threads=len(os.listdir("/proc/self/task")),
        driver_mib=pages * os.sysconf("SC_PAGE_SIZE") >> 20,
        processes=sum(thing.kind == "process" and thing.label == label.name for thing in everything_labelled()),
        owner_fds=_fds(owner),
        nursery_fds=_fds(nursery),
        owner_pid=owner,
        nursery_pid=nursery,
    )


def _fds(pid: int | str) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def growth(samples: list[Usage]) -> dict[str, float]:
    """By how much each number rose over one engine's samples; of owner and nursery, over the longest life of one."""
    result: dict[str, float] = {}
    for name in TOLERANCE:
        series = [getattr(sample, name) for sample in samples]
        if name in ("owner_fds", "nursery_fds"):
            key = name.replace("fds", "pid")
            lives: dict[int, list[int]] = {}
            for sample in samples:
                lives.setdefault(getattr(sample, key), []).append(getattr(sample, name))
            series = max(lives.values(), key=len, default=[])
        if len(series) >= 2 * EDGE:
            result[name] = statistics.median(series[-EDGE:]) - statistics.median(series[:EDGE])
    return result


def leaks(grown: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in grown.items() if value > TOLERANCE[name]}


def left_behind(label: RunLabel) -> list[str]:
    """What still carries the label: after the engine was closed, anything but the label's own folders; then nothing."""
    found = [str(thing) for thing in everything_labelled() if thing.label == label.name]
    own = {f"folder {label.dir}", f"shm {label.shm}"}
    return [thing for thing in found if thing not in own] + [str(path) for path in label.shm.rglob("*")]
