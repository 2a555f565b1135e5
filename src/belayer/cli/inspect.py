"""Commands that read a run directory without owning it: compare, report, show."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from belayer.errors import RunError
from belayer.journal import History, compare_runs, read_histories
from belayer.recovery.actions import action_of, describe, from_journal

console = Console(highlight=False, soft_wrap=True)


def need_run(run: Path) -> None:
    """Raises `RunError` unless `run` is a run directory."""
    if not run.is_dir():
        raise RunError(f"{run} does not exist", next_step="check the path; runs are usually below runs/")
    if not (run / "run.json").is_file():
        raise RunError(f"{run} is not a run directory: it has no run.json", next_step="check the path")


def compare_command(run: Path, reference: Path) -> int:
    """Print the comparison; 0 if every common rollout has the same tokens and reward."""
    need_run(run)
    need_run(reference)
    found = compare_runs(run, reference)
    console.print(
        f"{found.rollouts_identical} of {found.rollouts_compared} rollouts identical; "
        f"{found.tokens_changed} of {found.tokens_compared} tokens changed; {found.rewards_changed} rewards changed; "
        f"only in {run}: {found.only_here}; only in {reference}: {found.only_there}"
    )
    if found.first_difference:
        console.print(f"first difference: {found.first_difference}", markup=False)
    return 0 if found.same else 1


def report_command(run: Path, reference: Path | None) -> int:
    from belayer.observe import write_report, write_timeline

    need_run(run)
    if not (run / "metrics.jsonl").is_file():
        raise RunError(
            f"{run} has no metrics.jsonl: only runs of `belayer train` record one",
            next_step=f"`belayer show {run}` prints its rollouts from the journal",
        )
    if reference is None and (run / "reference" / "run.json").is_file():
        reference = run / "reference"
    console.print(f"report:   {write_report(run, reference)}")
    console.print(f"timeline: {write_timeline(run)}  (open it at ui.perfetto.dev or chrome://tracing)")
    return 0


def show_command(run: Path, rollout: str | None) -> int:
    need_run(run)
    histories = read_histories(run / "journal")
    if rollout is None:
        _print_rollouts(histories)
        return 0
    if rollout not in histories:
        raise RunError(f"no rollout {rollout} in {run}", next_step=f"`belayer show {run}` lists them")
    _print_rollout(histories[rollout])
    return 0


def _print_rollouts(histories: dict[str, History]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("rollout", "state", "reward", "tokens", "actions", "restored", "cut", "try"):
        table.add_column(heading, no_wrap=True)
    for name, history in histories.items():
        state = "delivered" if history.acknowledged else "finished" if history.finished else "unfinished"
        if history.failed:
            state = f"failed: {history.failed.error}"
        reward = "" if history.reward is None else f"{history.reward:.3f}"
        counts = [
            len(history.context()),
            len(history.actions()),
            history.restores,
            history.truncations,
            history.attempt,
        ]
        table.add_row(name, state, reward, *map(str, counts))
    console.print(table)
    everyone = list(histories.values())
    console.print(
        f"{len(everyone)} rollouts: {sum(h.acknowledged for h in everyone)} delivered, "
        f"{sum(h.restores > 0 for h in everyone)} with a restored sandbox, "
        f"{sum(h.truncations > 0 for h in everyone)} with a context that was cut, "
        f"{sum(h.attempt > 0 for h in everyone)} started more than once"
    )


def _print_rollout(history: History) -> None:
    console.print(
        f"rollout {history.rollout}, attempt {history.attempt}, sandbox generation {history.generation}, "
        f"restored {history.restores} times"
    )
    for number, call in enumerate(history.calls):
        if call.kind == "action":
            result = from_journal(call.result) if call.done else None
            shown = getattr(result, "text", result)
            text = f"action {call.k}: {describe(action_of(call.asked))} -> {shown!r}"
        elif call.kind == "value":
            text = f"{call.asked} = {call.value}"
        else:
            versions = sorted(set(call.versions))
            suffix = (
                f" (policy version {versions}, ended by {call.finish or 'nothing yet'})"
                if call.kind == "generate"
                else ""
            )
            text = f"{call.kind}: {call.ids}{suffix}"
        console.print(f"{number:4} {text}", markup=False)
    if history.finished:
        console.print(f"reward {history.reward}")
