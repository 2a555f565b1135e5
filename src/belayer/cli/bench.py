"""`belayer bench`: runs a benchmark of the benchmarks/ folder, prints its table, writes its JSON."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import platform
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.table import Table

from belayer.errors import ConfigError, StorageFull
from belayer.files import write_atomically
from belayer.sandbox.setup import separate_store
from belayer.versions import versions

PACKAGE = "belayer_benchmarks"
POSITIVE = frozenset({"faults", "scale", "kills"})

# a table that goes into a file is not to be as narrow as no terminal is
console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 150)


def _folder() -> Path:
    """benchmarks/ of the checkout that this package runs from, or beside the installed package."""
    here = Path(__file__).resolve().parents[1]
    for candidate in (here / "benchmarks", here.parents[1] / "benchmarks"):
        if candidate.is_dir():
            return candidate
    raise ConfigError("the benchmarks are not installed", next_step="run from a checkout of Belayer")


def _load(folder: Path, name: str) -> ModuleType:
    """A benchmark as a module of the package that its folder is, so that it finds its neighbours."""
    package = ModuleType(PACKAGE)
    package.__path__ = [str(folder)]
    sys.modules[PACKAGE] = package
    return importlib.import_module(f"{PACKAGE}.{name}")


def bench_command(name: str, *, quick: bool, json_path: Path | None, **options: Any) -> int:
    """Run the benchmark `name`; `options` are those that only it understands, None where not given."""
    folder = _folder()
    known = sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))
    if name not in known:
        raise ConfigError(f"no benchmark {name}", next_step=f"choose one of: {', '.join(known)}")
    given = {key: value for key, value in options.items() if value is not None}
    for key in given.keys() & POSITIVE:
        if given[key] <= 0:
            raise ConfigError(f"--{key} {given[key]} is too few", next_step="leave it out for the usual number")
    if json_path is not None:
        _check_writable(json_path)
    module = _load(folder, name)
    separate_store("store-bench")
    if unknown := given.keys() - inspect.signature(module.bench).parameters.keys():
        raise ConfigError(f"the benchmark {name} has no option {', '.join(f'--{key}' for key in sorted(unknown))}")
    result: dict[str, Any] = {"bench": name, "machine": _machine(), "versions": versions(), "quick": quick}
    result |= module.bench(quick, **given)
    _print(result)
    if hasattr(module, "show"):
        module.show(result, console)
    console.print("all checks passed" if result["ok"] else "[bold red]a correctness check failed[/]")
    if json_path is not None:
        write_atomically(json_path, (json.dumps(result, indent=1) + "\n").encode())
        console.print(f"written to {json_path}")
    return 0 if result["ok"] else 1


def _check_writable(path: Path) -> None:
    """Before hours of work, not after them. Raises `ConfigError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        write_atomically(path.with_name(f".{path.name}.probe"), b"")
        path.with_name(f".{path.name}.probe").unlink()
    except (OSError, StorageFull) as error:
        raise ConfigError(f"--json {path} cannot be written: {error}", next_step="choose another file") from None


def _print(result: dict[str, Any]) -> None:
    if not any(cell["baselines"] for cell in result["cells"]):
        return  # the benchmark shows what it has
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


def _machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
