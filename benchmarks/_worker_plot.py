"""The picture of `belayer bench worker`: recovery time against the length of what must be prefilled again."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

QUESTION = (
    "How long do requests wait after their worker is killed, and how much of it is prefill that nobody can avoid?"
)
SERIES = {  # name in the legend: colour, marker
    "recovery, shadow": ("#0b6e4f", "o"),
    "recovery, shadow, sealed blocks adopted": ("#7b2d8b", "D"),
    "prefill floor": ("#444444", "_"),
    "image standby": ("#c7781f", "s"),
    "standby without retained weights": ("#2c6fbb", "^"),
    "cold start": ("#b3262e", "x"),
}


def plot(result: dict[str, Any], into: Path) -> list[Path]:
    """Write bench-worker.svg, .png and .csv (every sample drawn, one a row) into the folder `into`."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "belayer"
    from matplotlib.figure import Figure

    rows = points(result)
    into.mkdir(parents=True, exist_ok=True)
    table = into / "bench-worker.csv"
    with open(table, "w", newline="") as file:
        writer = csv.DictWriter(file, ["model", "requests", "prefix_tokens", "total_tokens", "series", "seconds"])
        writer.writeheader()
        writer.writerows(rows)

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(5.6 * len(models) + 2.6, 5.0), layout="constrained")
    axes = figure.subplots(1, len(models), squeeze=False, sharey=True)[0]
    for axis, model in zip(axes, models, strict=True):
        _panel(axis, model, [row for row in rows if row["model"] == model])
    axes[0].set_ylabel("from the signal to the last request's next token")
    handles: dict[str, Any] = {}
    for axis in axes:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False, fontsize=9)
    figure.suptitle(QUESTION, fontsize=11)
    machine, versions = result["machine"], result["versions"]
    about = ", ".join(f"{name} {versions[name]}" for name in ("belayer", "vllm", "torch") if versions.get(name))
    source = f"Source data: {table.name}, beside this file."
    figure.supxlabel(
        f"tokens to prefill again (requests × prefix)\n\nEvery sample is drawn, lines join medians. "
        f"{machine['cpus']} CPUs, {machine['machine']}, kernel {machine['kernel']}; {about}. {source}",
        fontsize=8,
    )
    files = [into / "bench-worker.svg", into / "bench-worker.png"]
    figure.savefig(files[0], metadata={"Date": None})
    figure.savefig(files[1], dpi=150)
    return [*files, table]


def points(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Every sample of the cells that measured a recovery, as rows of the source data."""
    rows: list[dict[str, Any]] = []
    for cell in result["cells"]:
        if "prefill_floor" not in cell:
            continue
        recovery = "recovery, shadow" + (", sealed blocks adopted" if cell["adopt"] else "")
        samples = {recovery: cell["subject"]["samples_s"]}
        if not cell["adopt"]:
            samples["prefill floor"] = cell["prefill_floor"]["samples_s"]
        for name, baseline in cell["baselines"].items():
            if cell["adopt"] and name != "cold_start":
                continue  # they adopt too
            if (series := name.replace("_", " ")) in SERIES:
                samples[series] = baseline.get("samples_s", [])
        total = cell["requests"] * cell["prefix_tokens"]
        for series, values in samples.items():
            for seconds in values:
                rows.append(
                    {
                        "model": cell["model"],
                        "requests": cell["requests"],
                        "prefix_tokens": cell["prefix_tokens"],
                        "total_tokens": total,
                        "series": series,
                        "seconds": seconds,
                    }
                )
    return rows


def _panel(axis: Any, model: str, rows: list[dict[str, Any]]) -> None:
    import statistics

    from matplotlib.ticker import FuncFormatter, ScalarFormatter

    for series, (colour, marker) in SERIES.items():
        mine = [row for row in rows if row["series"] == series]
        if not mine:
            continue
        by_length: dict[int, list[float]] = {}
        for row in mine:
            by_length.setdefault(row["total_tokens"], []).append(row["seconds"])
        if series == "cold start":  # it hardly depends on the prefix: one line through all
            axis.axhline(statistics.median(row["seconds"] for row in mine), color=colour, linewidth=1, label=series)
        else:
            lengths = sorted(by_length)
            medians = [statistics.median(by_length[length]) for length in lengths]
            style = "--" if series == "prefill floor" else "-"
            axis.plot(lengths, medians, style, color=colour, marker=marker, markersize=5, linewidth=1, label=series)
        axis.plot(
            [row["total_tokens"] for row in mine],
            [row["seconds"] for row in mine],
            marker,
            color=colour,
            alpha=0.35,
            markersize=4,
        )
    axis.set_title(model, fontsize=10)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g} s"))
    axis.grid(True, which="both", linewidth=0.3, alpha=0.5)
