"""`belayer show`: the rollouts of a run, and one of them turn by turn."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from belayer.cli.inspect import need_run
from belayer.errors import JournalCorrupt, RunError
from belayer.groups import counting
from belayer.journal import AnyRecord, History, read_histories, result_gone, scan
from belayer.observe.summary import Summary
from belayer.observe.survivorship import survivorship
from belayer.observe.transcript import Entry, tokenizer_of, transcript
from belayer.run_directory import configured, read_about, unread_tail

LIMIT = 500  # characters shown of one text; --json has all of it
_QUIET = ("no checkpoint", "checkpoint", "policy", "value")
console = Console(highlight=False, soft_wrap=True)
errors = Console(highlight=False, soft_wrap=True, stderr=True)


def show_command(run: Path, rollout: str | None, *, as_json: bool) -> int:
    """Print it. Raises `RunError` for a run or a rollout that is not there."""
    need_run(run)
    histories = read_histories(run / "journal")
    if (tail := unread_tail(run)) is not None:
        errors.print(f"journal: {tail}", markup=False)
    if rollout is None:
        if as_json:
            console.print_json(data=[_summary(history) for history in histories.values()])
        else:
            _print_rollouts(histories)
            _print_recoveries(run / "metrics.jsonl")
        return 0
    if rollout not in histories:
        raise RunError(f"no rollout {rollout} in {run}", next_step=f"`belayer show {run}` lists them")
    records, lost = _records(run / "journal", rollout)
    entries = transcript(records, rollout, tokenizer_of(run, _model(run)))
    if as_json:
        data = {**_summary(histories[rollout]), "entries": msgspec.to_builtins(entries)}
        console.print_json(data=data | ({"archive": lost} if lost else {}))
    else:
        _print_entries(rollout, histories[rollout], entries)
        if lost:
            console.print(lost, markup=False)
    return 0


def _records(journal: Path, rollout: str) -> tuple[list[AnyRecord], str]:
    """The rollout's records with archived results put back; without them, and why, when an archive cannot be read."""
    try:
        return list(scan(journal, rollout=rollout, archived=True)), ""
    except JournalCorrupt as error:
        return list(scan(journal, rollout=rollout)), error.what  # which raises again unless it was the archive


def _model(run: Path) -> str | None:
    try:
        model = configured(read_about(run), "engine").get("model")
    except RunError as error:
        errors.print(f"without text, only token ids: {error}", markup=False)
        return None
    return model if isinstance(model, str) else None


def _summary(history: History) -> dict[str, Any]:
    return {
        "rollout": history.rollout,
        "state": _state(history),
        "reward": history.reward,
        "tokens": len(history.context()),
        "actions": len(history.actions()),
        "restored": history.restores,
        "cut": history.truncations,
        "attempt": history.attempt,
        "group_failed": history.group_failed.group if history.group_failed else "",
        "results_gone": sum(result_gone(call.result) is not None for call in history.calls),
    }


def _state(history: History) -> str:
    if history.failed:
        return f"failed: {history.failed.error}"
    return "delivered" if history.acknowledged else "finished" if history.finished else "unfinished"


def _print_rollouts(histories: dict[str, History]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("rollout", "state", "reward", "tokens", "actions", "restored", "cut", "try"):
        table.add_column(heading, no_wrap=True)
    for history in histories.values():
        row = _summary(history)
        del row["results_gone"], row["group_failed"]
        row["reward"] = "" if history.reward is None else f"{history.reward:.3f}"
        table.add_row(*map(str, row.values()))
    console.print(table)
    everyone = list(histories.values())
    console.print(
        f"{len(everyone)} rollouts: {sum(h.acknowledged for h in everyone)} delivered, "
        f"{sum(h.restores > 0 for h in everyone)} with a restored sandbox, "
        f"{sum(h.truncations > 0 for h in everyone)} with a context that was cut, "
        f"{sum(h.attempt > 0 for h in everyone)} started more than once"
    )
    for history in counting(histories):
        if failed := history.group_failed:
            console.print(f"group {failed.group} is short of {failed.rollout}: {failed.reason}", markup=False)
    if gone := sum(result_gone(call.result) is not None for history in everyone for call in history.calls):
        console.print(f"{gone} results of acknowledged rollouts were taken out of the journal by run.retention")
    console.print("by length (a trainer learns from what is delivered: it should not depend on the length):")
    for each in survivorship(everyone):
        length = f"{each.low}" if each.low == each.high else f"{each.low}-{each.high or ''}"
        console.print(
            f"  {length:>6} turns: {each.rollouts} rollouts, {each.delivered} delivered, {each.lost} lost, "
            f"{each.retried} retried, {each.restored} restored, {each.truncated} cut"
        )


def _print_recoveries(metrics: Path) -> None:
    """What the journal does not know: the engine's recoveries above all."""
    if not metrics.exists():
        return
    recoveries = Summary.from_metrics(metrics).result().recoveries
    kinds = Counter(f"{one.what} by {one.how}" for one in recoveries)
    if kinds:
        said = ", ".join(f"{count} of a {kind}" for kind, count in sorted(kinds.items()))
        console.print(f"{len(recoveries)} recoveries: {said} (`belayer status` and `belayer report` have the times)")


def _print_entries(rollout: str, history: History, entries: list[Entry]) -> None:
    console.print(
        f"rollout {rollout}: {_state(history)}, attempt {history.attempt}, sandbox generation {history.generation}, "
        f"restored {history.restores} times, context cut {history.truncations} times"
    )
    for entry in entries:
        style = "dim strike" if entry.void else "dim" if entry.kind in _QUIET else ""
        number = "" if entry.call is None else str(entry.call)
        console.print(Text(f"{number:>4} {_line(entry)}", style=style))


def _line(entry: Entry) -> str:
    mark = "[void] " if entry.void else ""
    match entry.kind:
        case "turn" | "observation":
            said = _short(repr(entry.text) if entry.text is not None else str(entry.ids))
            about = f"{len(entry.ids)} tokens"
            if entry.kind == "turn":
                about += f", policy version {', '.join(map(str, entry.versions))}, {entry.finish or 'under way'}"
            return f"{mark}{entry.kind}: {said}  ({about})"
        case "action":
            result = "no completion journalled" if entry.result is None else _short(repr(entry.result))
            extra = f"  ({entry.detail})" if entry.detail else ""
            return f"{mark}action {entry.k} in generation {entry.generation}: {entry.action} -> {result}{extra}"
        case "checkpoint" | "no checkpoint" | "context cut":
            where = "before" if entry.kind == "context cut" else "after"
            return f"{mark}{entry.kind} {where} action {entry.k}: {entry.detail}"
        case "restored":
            return f"environment restored with {entry.k} actions, generation {entry.generation}: {entry.detail}"
        case _:
            return f"{mark}{entry.kind}{': ' + entry.detail if entry.detail else ''}"


def _short(text: str) -> str:
    return text if len(text) <= LIMIT else f"{text[:LIMIT]}… ({len(text)} characters)"
