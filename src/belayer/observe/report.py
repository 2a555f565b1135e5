"""`report.html`: one page about a run that needs nothing but itself, and that may be opened anywhere, for years."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from belayer.files import write_atomically
from belayer.observe._figure_reward import reward_figure
from belayer.observe._figures_faults import groups_of, phase_names, phases_figure, timeline_figure
from belayer.observe._figures_rollouts import checkpoints_figure, lanes_figure
from belayer.observe._history import History, history_of
from belayer.observe._markup import Markup, join, tag
from belayer.observe._style import CSS
from belayer.observe._values import count, duration, json_for_html, phase_label, quantile
from belayer.observe._viewer import VIEWER_CSS, viewer, viewer_script
from belayer.observe.metrics import scan_metrics
from belayer.observe.summary import Recovery, RunSummary, Summary, read_summary
from belayer.observe.timeline import trace_events

_VIEWER_EVENTS = 8_000  # about 1.2 MB of page


@dataclass(frozen=True, slots=True)
class _Source:
    """A run directory, read. `notes` say what was wrong with its files."""

    path: Path
    summary: RunSummary
    history: History
    notes: list[str]


def write_report(run_dir: Path, reference: Path | None = None) -> Path:
    """Write `report.html` into `run_dir` from its `metrics.jsonl` (and `summary.json`), and return its path.

    `reference` is the run directory of the same seed without faults, for the comparisons. A figure that cannot be drawn
    says why. Raises `FileNotFoundError` when `run_dir` has no `metrics.jsonl`, and `StorageFull`.
    """
    run = _read(run_dir)
    other: _Source | None = None
    why = "this report was made without a reference run."
    if reference is not None:
        try:
            other = _read(reference)
        except OSError as error:
            why = f"the reference run {reference} cannot be read ({error.strerror or error})."
    path = run_dir / "report.html"
    write_atomically(path, _page(run, other, why).encode("utf-8", "replace"))
    return path


def _read(run_dir: Path) -> _Source:
    metrics = scan_metrics(run_dir / "metrics.jsonl")
    notes = []
    if metrics.unreadable:
        notes.append(f"{metrics.unreadable} line(s) of metrics.jsonl were torn or no events; they are left out.")
    try:
        summary = read_summary(run_dir / "summary.json")
    except FileNotFoundError:
        notes.append("There is no summary.json: the numbers are counted from metrics.jsonl.")
        summary = Summary.from_events(metrics.events).result()
    except msgspec.DecodeError as error:
        notes.append(f"summary.json cannot be read ({error}): the numbers are counted from metrics.jsonl.")
        summary = Summary.from_events(metrics.events).result()
    return _Source(run_dir, summary, history_of(metrics.events), notes)


def _page(run: _Source, other: _Source | None, why: str) -> str:
    summary = run.summary
    name = run.path.resolve().name
    figures = [
        reward_figure(run.history, other.history if other else None, why),
        timeline_figure(run.history),
        phases_figure(summary.recoveries),
    ]
    later = [checkpoints_figure(run.history), lanes_figure(run.history)]
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"Belayer run {name}"),
        tag("style", Markup(CSS + VIEWER_CSS)),
    ]
    body = tag(
        "main",
        _header(run, name),
        _verdict(summary),
        _cards(run, other, why),
        [figure.render() for figure in figures],
        _phase_table(summary.recoveries),
        [figure.render() for figure in later],
        _viewer(run),
        _footer(run, other),
    )
    page = tag("html", tag("head", head), tag("body", body, _embedded(run, other), viewer_script()), lang="en")
    return f"<!doctype html>\n{page}\n"


def _header(run: _Source, name: str) -> Markup:
    summary = run.summary
    facts = [
        f"seed {summary.seed}" if summary.seed is not None else "seed unknown",
        f"{summary.steps} of {summary.steps_planned} steps" if summary.steps_planned else f"{summary.steps} steps",
        f"{duration(summary.wall_s)} of run time",
    ]
    if summary.sessions > 1:
        facts.append(f"resumed {summary.sessions - 1} time(s)")
    versions = {"belayer": summary.belayer, **summary.versions} if summary.belayer else summary.versions
    facts += [f"{package} {version}" for package, version in sorted(versions.items())]
    return tag("header", tag("h1", f"Run {name}"), tag("p", " · ".join(fact for fact in facts if fact)))


def _verdict(summary: RunSummary) -> Markup:
    faults = summary.faults_injected
    compared = (
        "tokens were not compared with a run without faults"
        if summary.tokens_changed is None
        else f"{count(summary.tokens_changed)} of {count(summary.tokens_compared)} compared tokens changed"
    )
    counts = (
        f"{count(summary.rollouts_delivered)} of {count(summary.rollouts_started)} rollouts delivered, "
        f"{count(summary.lost)} lost, {count(summary.duplicated)} delivered twice, {compared}"
    )
    through = f"through {faults} injected fault{'s' if faults != 1 else ''}" if faults else "with no fault injected"
    if summary.lost or summary.duplicated or summary.tokens_changed or summary.ok is False:
        state, lead = "bad", "This run did not keep its promise"
    elif not summary.finished:
        state, lead = "open", "This run has not finished"
    elif not summary.rollouts_started:
        state, lead = "open", "This run did nothing"
    else:
        state, lead = "good", "Nothing was lost"
    return tag("p", tag("strong", f"{lead} "), f"{through}: {counts}.", class_=f"verdict {state}", role="status")


def _cards(run: _Source, other: _Source | None, why: str) -> Markup:
    summary = run.summary
    kinds = " · ".join(f"{kind}\u00a0{number}" for kind, number in summary.faults_injected_by_kind.items())
    cards = [
        _card(
            "Rollouts delivered / started",
            f"{count(summary.rollouts_delivered)} / {count(summary.rollouts_started)}",
            f"lost {summary.lost} · duplicated {summary.duplicated} · in flight {summary.rollouts_in_flight} "
            f"(counted from the {'journal' if summary.rollouts_counted_from == 'journal' else 'events'})",
            bad=bool(summary.lost or summary.duplicated),
        ),
        _card(
            "Tokens changed",
            "not compared" if summary.tokens_changed is None else count(summary.tokens_changed),
            f"of {count(summary.tokens_compared)} compared; {count(summary.rollouts_identical)} of "
            f"{count(summary.rollouts_compared)} rollouts identical"
            if summary.tokens_changed is not None
            else f"{why[:1].upper()}{why[1:]}"
            if other is None
            else "the run recorded no comparison",
            bad=bool(summary.tokens_changed),
        ),
        _card(
            "Faults injected",
            count(summary.faults_injected),
            f"{kinds or 'none'} · {len(summary.recoveries)}\u00a0recoveries",
        ),
        _recovery_card("worker", "Worker recovery, median", summary.recoveries),
        _recovery_card("sandbox", "Sandbox recovery, median", summary.recoveries),
        _wall_card(run, other, why),
        _card(
            "Checkpoint time hidden",
            "none taken" if summary.hidden_checkpoint_share is None else f"{summary.hidden_checkpoint_share:.1%}",
            f"{count(summary.checkpoints)} checkpoints, {duration(summary.checkpoint_wall_s)} in all, "
            f"{duration(summary.checkpoint_exposed_s)} waited for",
        ),
        _card(
            "Mean reward, first → last step",
            "unknown"
            if summary.reward_first is None or summary.reward_last is None
            else f"{summary.reward_first:.2f} → {summary.reward_last:.2f}",
            "no step reported a reward"
            if summary.reward_first_3 is None or summary.reward_last_3 is None
            else f"over three steps each: {summary.reward_first_3:.2f} → {summary.reward_last_3:.2f}",
        ),
    ]
    return tag("div", cards, class_="cards")


def _card(name: str, big: str, small: str, *, bad: bool = False) -> Markup:
    values = [tag("dd", big, class_="big"), tag("dd", small, class_="small")]
    return tag("dl", tag("dt", name), values, class_="card bad" if bad else "card", style="margin:0")


def _recovery_card(what: str, name: str, recoveries: list[Recovery]) -> Markup:
    mine = [one for one in recoveries if (one.what == "worker") == (what == "worker")]
    if not mine:
        return _card(name, "none needed", f"no {what} had to be recovered")
    totals = [one.total_s for one in mine]
    kinds = [
        f"{how}\u00a0×\u00a0{len(group)}, median\u00a0{duration(quantile([one.total_s for one in group], 0.5))}"
        for (_, how), group in groups_of(mine).items()
    ]
    return _card(name, duration(quantile(totals, 0.5)), f"{' · '.join(kinds)} · longest\u00a0{duration(max(totals))}")


def _wall_card(run: _Source, other: _Source | None, why: str) -> Markup:
    name = "Time added by faults"
    if other is None:
        return _card("Run time", duration(run.summary.wall_s), f"nothing to compare with: {why}")
    mine = {step.step: step.wall_s for step in run.history.steps if step.wall_s is not None}
    theirs = {step.step: step.wall_s for step in other.history.steps if step.wall_s is not None}
    shared = mine.keys() & theirs.keys()
    with_faults, without = sum(mine[step] for step in shared), sum(theirs[step] for step in shared)
    if not shared or without <= 0:
        return _card(name, "unknown", "no step has its time in both runs")
    change = with_faults / without - 1
    return _card(
        name,
        f"{change:+.1%}",
        f"{duration(with_faults)} with, {duration(without)} without, over the {len(shared)} steps that both did "
        "(one run each: noise is in it)",
    )


def _phase_table(recoveries: list[Recovery]) -> Markup:
    question = "How long did each phase of a recovery take?"
    if not recoveries:
        return tag("section", tag("h2", question), tag("p", "Nothing had to be recovered.", class_="missing"))
    rows: list[Markup] = []
    for (what, how), group in groups_of(recoveries).items():
        rows.append(tag("tr", tag("td", f"{what}: {how}", colspan=6), class_="group"))
        for name in phase_names(group):
            rows.append(_row(phase_label(name), [one.phases[name] for one in group if name in one.phases]))
        rows.append(_row("whole recovery", [one.total_s for one in group], "total"))
    heads = [tag("th", "phase", class_="word", scope="col")]
    heads += [tag("th", name, scope="col") for name in ("count", "median ms", "p90 ms", "max ms", "sum s")]
    reading = (
        "Milliseconds over all recoveries of a kind. “Whole recovery” runs from the fault until the part was usable "
        "again; it is measured on its own, so the phases' medians need not add up to it."
    )
    table = tag("table", tag("thead", tag("tr", heads)), tag("tbody", rows))
    return tag(
        "section",
        tag("h2", question),
        tag("p", reading, class_="reading"),
        tag("div", table, class_="scroll"),
        id="table",
    )


def _row(name: str, values: list[float], class_: str | None = None) -> Markup:
    cells = [len(values), *(f"{seconds * 1e3:.1f}" for seconds in _spread(values)), f"{sum(values):.3f}"]
    return tag("tr", tag("td", name, class_="word"), [tag("td", cell) for cell in cells], class_=class_)


def _spread(values: list[float]) -> tuple[float, float, float]:
    return quantile(values, 0.5), quantile(values, 0.9), max(values)


def _viewer(run: _Source) -> Markup:
    question = "What happened at a given moment?"
    events = trace_events(run.history)
    slices = sum(event["ph"] == "X" for event in events)
    if not slices:
        inside = tag("p", tag("strong", "Not drawn: "), "no event of this run has a length.", class_="missing")
    elif len(events) > _VIEWER_EVENTS:
        name = run.path.resolve().name
        inside = tag(
            "p",
            tag("strong", "Left out: "),
            f"{count(len(events))} events would make this page too large. ",
            tag("code", f"belayer timeline {name} --output timeline.html"),
            " writes them to a page of their own, with --rollout only one rollout's.",
            class_="missing",
        )
    else:
        reading = (
            "The whole run, zoomable: drag to move, + and − or Ctrl and the wheel to zoom, 0 for all. A red line leads "
            "from a fault to the recovery that answered it. The same is in trace.json, for ui.perfetto.dev."
        )
        answer = f"Point at any of the {count(slices)} pieces of work below."
        inside = join(
            [tag("p", answer, class_="answer"), tag("p", reading, class_="reading"), viewer(events)],
        )
    return tag("section", tag("h2", question), inside, id="trace")


def _footer(run: _Source, other: _Source | None) -> Markup:
    made = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    lines: list[Markup] = [tag("p", note) for note in run.notes]
    if other is not None:
        lines.append(tag("p", "Reference: ", tag("code", other.path.resolve().name)))
        lines += [tag("p", f"Reference: {note}") for note in other.notes]
    lines.append(
        tag(
            "p",
            f"Made {made} from ",
            tag("code", f"{run.path.resolve().name}/metrics.jsonl"),
            ". The numbers behind every figure are in this page as JSON (element ",
            tag("code", "belayer-data"),
            "); times are seconds since the run's start. Medians and p90 interpolate linearly.",
        )
    )
    return tag("footer", lines)


def _embedded(run: _Source, other: _Source | None) -> Markup:
    """The data behind the figures."""
    data: dict[str, Any] = {
        "summary": run.summary,
        "steps": run.history.steps,
        "faults": run.history.faults,
        "recoveries": run.history.recoveries,
        "shadow": run.history.shadows,
        "worker": run.history.workers,
        "checkpoints": [[one.start, one.end, one.exposed_s] for one in run.history.checkpoints],
        "reference": {"summary": other.summary, "steps": other.history.steps} if other else None,
    }
    return tag("script", json_for_html(data), type="application/json", id="belayer-data")
