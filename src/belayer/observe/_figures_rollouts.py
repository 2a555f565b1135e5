"""Figures of what rollouts do: the price of checkpoints, and every rollout of one step on its own lane."""

from __future__ import annotations

import math

from belayer.observe._figure import Figure, drawn, not_drawn
from belayer.observe._figures_faults import how_class
from belayer.observe._history import History, Life, Span
from belayer.observe._markup import Markup, join, tag
from belayer.observe._plot import WIDTH, Scale, box, cross, label, line, ticks, time_label, time_ticks
from belayer.observe._values import count, duration

_LEFT, _RIGHT = 98.0, 14.0
_BINS = 96
_LANES = 48


def checkpoints_figure(run: History) -> Figure:
    """Seconds spent on checkpoints over run time, hidden and exposed apart."""
    question = "What do checkpoints cost the rollouts?"
    spans = run.checkpoints
    wall = math.fsum(span.end - span.start for span in spans)
    if not spans or wall <= 0:
        return not_drawn("checkpoints", question, "this run took no checkpoint.")
    exposed = math.fsum(min(span.exposed_s, span.end - span.start) for span in spans)
    length = max(run.length, 1e-6)
    bins = _BINS
    hidden_in, exposed_in, number_in = [0.0] * bins, [0.0] * bins, [0] * bins
    for span in spans:
        place = min(bins - 1, max(0, int(span.end / length * bins)))
        waited = min(span.exposed_s, span.end - span.start)
        hidden_in[place] += span.end - span.start - waited
        exposed_in[place] += waited
        number_in[place] += 1
    top, bottom = 12.0, 176.0
    tallest = max(h + e for h, e in zip(hidden_in, exposed_in, strict=True))
    x = Scale(0, length, _LEFT, WIDTH - _RIGHT)
    y = Scale(0, tallest, bottom, top)
    parts: list[Markup] = []
    for tick in ticks(0, tallest, 4):
        parts += [line(_LEFT, y(tick), WIDTH - _RIGHT, y(tick), "grid")]
        parts += [label(_LEFT - 8, y(tick) + 4, f"{tick:g} s", anchor="end")]
    width = (x.end - x.start) / bins
    for place in range(bins):
        if not number_in[place]:
            continue
        left = x.start + place * width + width * 0.08
        times = f"{duration(hidden_in[place])} hidden, {duration(exposed_in[place])} exposed"
        note = f"{number_in[place]} checkpoints: {times}"
        peak, middle = y(hidden_in[place] + exposed_in[place]), y(exposed_in[place])
        parts.append(box(left, peak, width * 0.84, middle - peak, "hidden", note))
        parts.append(box(left, middle, width * 0.84, bottom - middle, "exposed", note))
    for tick in time_ticks(length):
        parts.append(label(x(tick), bottom + 18, time_label(tick, length), anchor="middle"))
    parts.append(line(_LEFT, bottom, WIDTH - _RIGHT, bottom, "axis"))
    reading = (
        f"Checkpoint seconds of all rollouts per {duration(length / bins)} of run time. Pale: hidden under the model's "
        "own generation. Strong: a rollout waited."
    )
    lived = math.fsum((length if life.end is None else life.end) - life.start for life in run.lives)
    answer = (
        f"{duration(exposed)} of waiting: of {duration(wall)} in {count(len(spans))} checkpoints "
        f"{1 - exposed / wall:.1%} were hidden"
    ) + (f", so that rollouts spent {exposed / lived:.1%} of their time waiting for one." if lived > 0 else ".")
    rows: list[tuple[object, ...]] = [
        (span.rollout, span.label, f"{span.start:.6f}", f"{span.end - span.start:.6f}", f"{span.exposed_s:.6f}")
        for span in spans
    ]
    title = f"{len(spans)} checkpoints, {1 - exposed / wall:.1%} of their time hidden"
    entries = (("hidden", "hidden under generation"), ("exposed", "exposed: a rollout waited"))
    return drawn(
        "checkpoints",
        question,
        answer=answer,
        reading=reading,
        parts=parts,
        height=206,
        title=title,
        entries=entries,
        columns=("rollout", "what", "start_s", "wall_s", "exposed_s"),
        rows=rows,
    )


def lanes_figure(run: History) -> Figure:
    """Every rollout of the step with the most recoveries, one lane each."""
    question = "What did each rollout do while things broke?"
    window = _window(run)
    if window is None:
        return not_drawn("lanes", question, "no step of this run reported its length and its rollouts' work.")
    step, begin, end = window
    spans: dict[str, list[Span]] = {}
    for span in run.spans:
        if span.end >= begin and span.start <= end:
            spans.setdefault(span.rollout, []).append(span)
    lives = {life.rollout: life for life in run.lives if life.start <= end and (life.end is None or life.end >= begin)}
    rollouts = sorted(
        set(spans) | set(lives),
        key=lambda name: (lives[name].start if name in lives else spans[name][0].start, name),
    )
    shown = rollouts[:_LANES]
    x = Scale(begin, end, _LEFT + 40, WIDTH - _RIGHT)
    row, top = (15.0 if len(shown) > 20 else 20.0), 20.0
    bottom = top + row * len(shown) + 4
    parts: list[Markup] = []
    base = {name: top + index * row for index, name in enumerate(shown)}
    for done in run.recoveries:
        one = done.recovery
        if one.what == "worker" and begin <= done.end <= end:
            left = x(done.end - one.total_s)
            note = f"worker: {one.how}, {duration(one.total_s)}"
            width = max(2.0, x(done.end) - left)
            parts.append(box(left, top - 4, width, bottom - top, f"outage how-{how_class(one.how)}", note))
            anchor = "end" if left > WIDTH - 180 else "start"
            parts.append(label(left, top - 8, f"worker {one.how} {duration(one.total_s)}", anchor=anchor))
    for name in shown:
        parts.append(_rollout(name, base[name], row, lives.get(name), spans.get(name, []), x))
    for fault in run.faults:
        if fault.lane == "sandbox" and begin <= fault.x <= end and fault.subject in base:
            note = f"{fault.fault} on {fault.subject}"
            parts.append(cross(x(fault.x), base[fault.subject] + row / 2 - 1, 4, "fault", note))
    for done in run.recoveries:
        one = done.recovery
        if one.what != "worker" and begin <= done.end <= end and one.subject in base:
            left = x(done.end - one.total_s)
            note = f"{one.subject}: {one.how}, {duration(one.total_s)}"
            width = max(3.0, x(done.end) - left)
            parts.append(box(left, base[one.subject] - 0.5, width, row - 1, f"mend how-{how_class(one.how)}", note))
    length = end - begin
    for tick in time_ticks(length):
        spot = x(begin + tick)
        parts += [line(spot, bottom, spot, bottom + 5, "axis")]
        parts.append(label(spot, bottom + 18, f"+{time_label(tick, length)}", anchor="middle"))
    parts.append(line(x.start, bottom, x.end, bottom, "axis"))
    more = f" Shown are {len(shown)} of its {len(rollouts)} rollouts." if len(rollouts) > len(shown) else ""
    reading = (
        f"Step {step}, the one with the most recoveries; one line per rollout. Checkpoints lie under the work that "
        f"hides them; where a rollout waited for one, the wait is drawn at the checkpoint's end.{more}"
    )
    entries = (
        ("generate", "model generates"),
        ("exec", "action in the sandbox"),
        ("hidden", "checkpoint, hidden"),
        ("exposed", "checkpoint, waited for"),
        ("fault", "fault"),
        ("how-restore", "sandbox restored"),
        ("how-other", "sandbox made anew"),
        ("how-promotion", "shadow promoted"),
    )
    title = f"Step {step}: {len(rollouts)} rollouts over {duration(length)}"
    hit = {done.recovery.subject for done in run.recoveries if begin <= done.end <= end} & set(rollouts)
    stops = sum(1 for done in run.recoveries if done.recovery.what == "worker" and begin <= done.end <= end)
    answer = (
        f"In step {step}, {len(hit)} of {len(rollouts)} rollouts got their sandbox back and the engine's worker was "
        f"replaced {stops} time{'' if stops == 1 else 's'}; the step took {duration(length)}."
    )
    rows: list[tuple[object, ...]] = [
        (name, span.kind, span.label, f"{span.start:.6f}", f"{span.end - span.start:.6f}")
        for name in rollouts
        for span in spans.get(name, [])
    ]
    return drawn(
        "lanes",
        question,
        answer=answer,
        reading=reading,
        parts=parts,
        height=bottom + 28,
        title=title,
        entries=entries,
        columns=("rollout", "kind", "what", "start_s", "wall_s"),
        rows=rows,
    )


def _rollout(name: str, top: float, row: float, life: Life | None, spans: list[Span], x: Scale) -> Markup:
    short = name if len(name) <= 18 else f"{name[:8]}…{name[-8:]}"
    parts = [
        tag("text", tag("title", name), short, x=x.start - 8, y=top + row / 2 + 3, text_anchor="end", class_="tick")
    ]
    if life:
        left, right = x(life.start), x(life.end if life.end is not None else x.high)
        parts.append(box(left, top + 2, right - left, row - 5, "life", f"{name}: {life.outcome}"))
    work = row - 8
    for span in spans:
        left, right = x(span.start), x(span.end)
        note = f"{name}: {span.kind}, {span.label}, {duration(span.end - span.start)}"
        if span.kind == "checkpoint":
            wait = x(span.end) - x(max(span.start, span.end - span.exposed_s))
            parts.append(box(left, top + work + 2, max(0.8, right - left - wait), 3, "hidden", note))
            parts.append(box(right - wait, top + work + 2, wait, 3, "exposed", note))
        else:
            parts.append(box(left, top + 2, max(0.8, right - left), work, span.kind, note))
    return join(parts)


def _window(run: History) -> tuple[int, float, float] | None:
    """The step with the most recoveries (the latest such), as (step, start, end) in run time."""
    best: tuple[int, int, float, float] | None = None
    for step in run.steps:
        if step.wall_s is None or step.wall_s <= 0:
            continue
        begin = max(0.0, step.end - step.wall_s)
        if not any(span.end >= begin and span.start <= step.end for span in run.spans):
            continue
        number = sum(1 for done in run.recoveries if begin <= done.end <= step.end)
        if best is None or number >= best[0]:
            best = (number, step.step, begin, step.end)
    return best[1:] if best else None
