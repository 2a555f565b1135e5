"""Commands that read a run directory without owning it: compare and report."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from belayer.errors import RunError
from belayer.journal import compare_runs
from belayer.run_directory import check_format

console = Console(highlight=False, soft_wrap=True)


def need_run(run: Path) -> None:
    """Raises `RunError` unless `run` is a run directory, and of a format that this version reads."""
    if not run.is_dir():
        what = "is a file, not a run's folder" if run.exists() else "does not exist"
        raise RunError(f"{run} {what}", next_step="check the path; runs are usually below runs/")
    if not (run / "run.json").is_file():
        raise RunError(f"{run} is not a run directory: it has no run.json", next_step="check the path")
    check_format(run)


def compare_command(run: Path, reference: Path) -> int:
    """Print the comparison; 0 if there are common rollouts and all have the same tokens and reward."""
    need_run(run)
    need_run(reference)
    found = compare_runs(run, reference)
    console.print(
        f"{found.rollouts_identical} of {found.rollouts_compared} rollouts identical; "
        f"{found.tokens_changed} of {found.tokens_compared} tokens changed; {found.rewards_changed} rewards changed; "
        f"only in {run}: {found.only_here}; only in {reference}: {found.only_there}"
    )
    if not found.rollouts_compared:
        console.print("nothing to compare: no finished rollout is in both")
        return 1
    if found.first_difference:
        console.print(f"first difference: {found.first_difference}", markup=False)
    return 0 if found.same else 1


def need_metrics(run: Path) -> None:
    """Raises `RunError` unless `run` is a run directory whose driver records its events."""
    need_run(run)
    if not (run / "metrics.jsonl").is_file():
        raise RunError(
            f"{run} has no metrics.jsonl: only runs of `belayer train` record one",
            next_step=f"`belayer show {run}` prints its rollouts from the journal",
        )


def timeline_command(run: Path, rollout: str | None, output: Path | None) -> int:
    """Write the trace, or a page that shows it."""
    from belayer.observe import write_timeline

    need_metrics(run)
    path = write_timeline(run, output=output, rollout=rollout)
    where = "open it in a browser" if path.suffix == ".html" else "open it at ui.perfetto.dev or chrome://tracing"
    console.print(f"timeline: {path}  ({where})")
    return 0


def dashboard_command() -> int:
    """Print the Grafana dashboard."""
    from belayer.observe.dashboard import dashboard_json

    print(dashboard_json(), end="")
    return 0


def report_command(run: Path, reference: Path | None) -> int:
    from belayer.observe import write_report, write_timeline

    need_metrics(run)
    if reference is None and (run / "reference" / "run.json").is_file():
        reference = run / "reference"
    console.print(f"report:   {write_report(run, reference)}")
    console.print(f"timeline: {write_timeline(run)}  (open it at ui.perfetto.dev or chrome://tracing)")
    return 0
