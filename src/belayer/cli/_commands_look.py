"""Commands that look at a run: compare, report, status, timeline, metrics, show, verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from belayer.cli._root import app


@app.command
def compare(
    run: Annotated[Path, Parameter(help="A run's folder, e.g. runs/shell_grpo.")],
    reference: Annotated[Path, Parameter(help="The run to compare with, e.g. runs/shell_grpo/reference.")],
    /,
) -> int:
    """Compare two runs of the same seed, rollout by rollout and token by token."""
    from belayer.cli.inspect import compare_command

    return compare_command(run, reference)


@app.command
def report(
    run: Annotated[Path, Parameter(help="The folder of a `train` run, e.g. runs/shell_grpo.")],
    /,
    *,
    reference: Annotated[Path | None, Parameter(help="A run to compare with.")] = None,
) -> int:
    """Write `report.html` and `trace.json` of a run, from its metrics."""
    from belayer.cli.inspect import report_command

    return report_command(run, reference)


@app.command
def status(
    run: Annotated[Path, Parameter(help="A run's folder, e.g. runs/shell_grpo.")],
    /,
    *,
    watch: Annotated[bool, Parameter(negative="--once", help="Again every second until the run ends.")] = False,
    json: Annotated[bool, Parameter(negative="", help="As JSON, one line each time.")] = False,
) -> int:
    """How a run is doing: progress, rollouts in flight, engine, sandboxes, faults and recoveries.

    Reads the run's folder and locks nothing, so anybody may ask at any time. Exits with 1 when the driver is gone
    before the run's end (and says how to resume), or when not every rollout was delivered.

    Example: `belayer status runs/shell_grpo --watch`
    """
    from belayer.cli.status import status_command

    return status_command(run, as_json=json, watch=watch)


@app.command
def timeline(
    run: Annotated[Path, Parameter(help="The folder of a `train` run, e.g. runs/shell_grpo.")],
    /,
    *,
    rollout: Annotated[str | None, Parameter(help="Only this rollout; `belayer show RUN` lists them.")] = None,
    output: Annotated[
        Path | None, Parameter(help="Where to; .html makes a page that shows it. Default: trace.json of the run.")
    ] = None,
) -> int:
    """Write a run's timeline for Perfetto or chrome://tracing: turns, actions, checkpoints, faults, recoveries.

    Example: `belayer timeline runs/shell_grpo --output timeline.html`
    """
    from belayer.cli.inspect import timeline_command

    return timeline_command(run, rollout, output)


metrics = App(name="metrics", help="Prometheus metrics of runs; `belayer train --metrics-port` serves them.")
app.command(metrics)


@metrics.command(name="dashboard")
def metrics_dashboard() -> int:
    """Print a Grafana dashboard for them. Example: `belayer metrics dashboard > belayer.json`, then import it."""
    from belayer.cli.inspect import dashboard_command

    return dashboard_command()


@app.command
def show(
    run: Annotated[Path, Parameter(help="A run's folder, e.g. runs/shell_grpo.")],
    rollout: Annotated[str | None, Parameter(help="An id from the list; without it all are listed.")] = None,
    /,
    *,
    json: Annotated[bool, Parameter(negative="", help="The same, and every token, as JSON.")] = False,
) -> int:
    """Print a run's rollouts, or one rollout turn by turn, from the journal.

    Ids of `train` runs are sSTEP-GROUP-MEMBER. restored: times the sandbox was brought back; cut: times the context was
    shortened; try: the attempt, from 0. A rollout is shown with its checkpoints, losses and cuts; [void] marks what was
    cut off and reaches no trainer. Tokens are shown as text where the run's model has a tokenizer.json.
    """
    from belayer.cli.show import show_command

    return show_command(run, rollout, as_json=json)


@app.command
def verify(
    run: Annotated[Path, Parameter(help="A run's folder, e.g. runs/shell_grpo.")],
    /,
    *,
    replay: Annotated[
        int, Parameter(help="Execute so many finished rollouts again in new sandboxes, and compare what they observe.")
    ] = 0,
    seed: Annotated[int, Parameter(help="Which rollouts --replay draws.")] = 0,
    json: Annotated[bool, Parameter(negative="", help="The same as JSON.")] = False,
) -> int:
    """Check from a run's journal that every trajectory describes what its environment did.

    By other code than that which recovers runs: no action in a state nobody knows, no context that does not fit its
    environment, nothing delivered that was not journalled. A run in progress may be checked. Exits with 1 when a
    promise is broken, or when an action observes something else in a replay (as dates and process ids do).

    Example: `belayer verify runs/shell_grpo --replay 20`
    """
    from belayer.cli.verify import verify_command

    return verify_command(run, replay=replay, seed=seed, as_json=json)
