"""The picture of `belayer bench env`: recovery time of each workload, by what recovers it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

QUESTION = "How long is an environment away after its container is killed?"
SERIES = {  # name: (legend, colour)
    "belayer": ("Belayer, full restore", "#0b6e4f"),
    "fs_only_restore": ("file system only, processes started again", "#2c6fbb"),
    "new_container_replay": ("new container, all actions again", "#b3262e"),
    "podman_runtime": ("Belayer on podman", "#7b2d8b"),
    "podman": ("podman checkpoint and restore", "#c7781f"),
}


def plot(result: dict[str, Any], into: Path) -> list[Path]:
    """Write bench-env.svg, .png and .csv (every sample drawn, one a row) into the folder `into`."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "belayer"
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    rows = points(result)
    into.mkdir(parents=True, exist_ok=True)
    table = into / "bench-env.csv"
    with open(table, "w", newline="") as file:
        writer = csv.DictWriter(file, ["workload", "series", "seconds"])
        writer.writeheader()
        writer.writerows(rows)

    figure = Figure(figsize=(8.6, 1.2 + 0.95 * len(result["cells"])), layout="constrained")
    axis = figure.subplots()
    shown = [name for name in SERIES if any(row["series"] == name for row in rows)]
    step = 0.8 / len(shown)
    for place, cell in enumerate(result["cells"]):
        for number, name in enumerate(shown):
            mine = [row["seconds"] for row in rows if row["workload"] == cell["workload"] and row["series"] == name]
            if not mine:
                continue
            legend, colour = SERIES[name]
            height = place - 0.4 + (number + 0.5) * step
            found = cell["subject"] if name == "belayer" else cell["baselines"][name]
            label = legend if place == 0 else None
            axis.barh(height, found["median_s"], step * 0.85, left=0, color=colour, alpha=0.35, label=label)
            axis.plot(mine, [height] * len(mine), "|", color=colour, markersize=6)
    axis.set_yticks(range(len(result["cells"])), [cell["workload"] for cell in result["cells"]])
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g} s"))
    axis.grid(True, axis="x", which="both", linewidth=0.3, alpha=0.5)
    axis.set_title(QUESTION, fontsize=11)
    figure.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=2)
    machine = result["machine"]
    axis.set_xlabel(
        f"from the signal to the first command's answer; bars are medians, every sample is drawn\n"
        f"{machine['cpus']} CPUs, {machine['machine']}, kernel {machine['kernel']}. Source data: {table.name}",
        fontsize=8,
    )
    files = [into / "bench-env.svg", into / "bench-env.png"]
    figure.savefig(files[0], metadata={"Date": None})
    figure.savefig(files[1], dpi=150)
    return [*files, table]


def points(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Every sample, as rows of the source data."""
    rows: list[dict[str, Any]] = []
    for cell in result["cells"]:
        samples = {"belayer": cell["subject"]["samples_s"]}
        samples |= {name: found.get("samples_s", []) for name, found in cell["baselines"].items()}
        for name, values in samples.items():
            rows += [{"workload": cell["workload"], "series": name, "seconds": value} for value in values]
    return rows
