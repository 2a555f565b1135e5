"""`belayer bench`: runs a benchmark of the benchmarks/ folder, prints its table, writes its JSON."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.table import Table

from belayer.errors import ConfigError
from belayer.versions import versions

console = Console(highlight=False, soft_wrap=True)


def _folder() -> Path:
    """benchmarks/ of the checkout that this package runs from, or beside the installed package."""
    here = Path(__file__).resolve().parents[1]
    for candidate in (here / "benchmarks", here.parents[1] / "benchmarks"):
        if candidate.is_dir():
            return candidate
    raise ConfigError("the benchmarks are not installed", next_step="run from a checkout of Belayer")


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"belayer_benchmarks.{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def bench_command(name: str, *, quick: bool, json_path: Path | None) -> int:
    folder = _folder()
    known = sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))
    if name not in known:
        raise ConfigError(f"no benchmark {name}", next_step=f"choose one of: {', '.join(known)}")
    result: dict[str, Any] = {"bench": name, "machine": _machine(), "versions": versions(), "quick": quick}
    result |= _load(folder / f"{name}.py").bench(quick)
    _print(result)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"written to {json_path}")
    return 0 if result["ok"] else 1


def _print(result: dict[str, Any]) -> None:
    table = Table("workload", "belayer", "baseline", "median", "ratio", title=f"belayer bench {result['bench']}")
    for cell in result["cells"]:
        subject = cell["subject"]["median_s"]
        for number, (name, baseline) in enumerate(cell["baselines"].items()):
            first = number == 0
            median = baseline.get("skipped") or f"{baseline['median_s'] * 1e3:.1f} ms"
            ratio = cell.get("ratios", {}).get(name)
            table.add_row(
                cell["workload"] if first else "",
                f"{subject * 1e3:.1f} ms" if first else "",
                name,
                median,
                "" if ratio is None else f"{ratio:.1f}x",
            )
    console.print(table)
    for cell in result["cells"]:
        phases = ", ".join(
            f"{k.removesuffix('_s')} {v * 1e3:.1f}" for k, v in cell["subject"].get("phases_s", {}).items()
        )
        console.print(f"{cell['workload']}: phases in ms (medians): {phases}")
        console.print(f"{cell['workload']}: checks: {cell['checks']}")
    console.print("all checks passed" if result["ok"] else "[bold red]a correctness check failed[/]")


def _machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
