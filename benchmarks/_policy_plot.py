"""The picture of `belayer bench policy`: what each policy costs in each cell."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

QUESTION = "How much longer do rollouts take under a fixed checkpoint policy than under the adaptive one?"
COLOURS = {
    "never": "#444444",
    "always": "#b3262e",
    "every-2": "#e0a458",
    "every-4": "#c7781f",
    "every-8": "#8f5413",
    "every-16": "#5c3508",
    "young-daly": "#2c6fbb",
    "paper": "#7b2d8b",
    "adaptive": "#0b6e4f",
}


def plot(result: dict[str, Any], into: Path) -> list[Path]:
    """Write bench-policy.svg, .png and .csv (every sample drawn, one a row) into the folder `into`."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "belayer"
    from matplotlib.figure import Figure

    into.mkdir(parents=True, exist_ok=True)
    rows = _rows(result)
    table = into / "bench-policy.csv"
    with open(table, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)

    panels = sorted({(cell["world"]["waits_for_disk"], cell["world"]["sandboxes"]) for cell in result["cells"]})
    figure = Figure(figsize=(4.2 * len(panels) + 2.0, 4.6), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, (waits, sandboxes) in zip(axes, panels, strict=True):
        cells = [
            c for c in result["cells"] if (c["world"]["waits_for_disk"], c["world"]["sandboxes"]) == (waits, sandboxes)
        ]
        for policy, colour in COLOURS.items():
            values = [cell["ratios"].get(policy, 1.0) for cell in cells]
            axis.plot(range(len(cells)), values, "o-", color=colour, label=policy, markersize=3.5, linewidth=1.0)
        axis.set_yscale("log")
        axis.set_title(
            f"{sandboxes} sandboxes, {'written before it counts' if waits else 'counts once in memory'}", fontsize=9
        )
        labels = [f"{c['world']['disk_bytes_per_s'] / 1e6:.0f} MB/s\n{c['world']['mtbf_s']:.0e} s" for c in cells]
        axis.set_xticks(range(len(cells)), labels, fontsize=6, rotation=45)
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("mean wall time / adaptive (log)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    figure.suptitle(QUESTION, fontsize=11)
    seeds = len(result["cells"][0]["subject"]["samples_s"])
    figure.supxlabel(
        f"disk bandwidth, mean time between failures of one sandbox\n\nSimulated; medians over "
        f"{seeds} seeds, paired. Source data: {table.name}, beside this file.",
        fontsize=8,
    )
    files = [into / "bench-policy.svg", into / "bench-policy.png"]
    figure.savefig(files[0], metadata={"Date": None})
    figure.savefig(files[1], dpi=150)
    return [*files, table]


def _rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for cell in result["cells"]:
        samples = {p: found["samples_s"] for p, found in cell["baselines"].items()}
        samples["adaptive"] = cell["subject"]["samples_s"]
        for policy, found in samples.items():
            for seed, seconds in enumerate(found):
                rows.append({**cell["world"], "policy": policy, "seed": seed, "mean_wall_s": seconds})
    return rows
