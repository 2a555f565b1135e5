"""Figures of faults: what broke when, and where the time of a recovery goes."""

from __future__ import annotations

from belayer.observe._figure import Figure, drawn, not_drawn
from belayer.observe._history import Done, Fault, History, ready_periods
from belayer.observe._markup import Markup, join, tag
from belayer.observe._plot import (
    WIDTH,
    Scale,
    box,
    cross,
    label,
    line,
    log_scale,
    time_label,
    time_ticks,
)
from belayer.observe._values import count, duration, phase_label, quantile
from belayer.observe.summary import Recovery

_LEFT, _RIGHT = 98.0, 14.0
_STANDING_BY = frozenset({"ready"})
_FAULT_COLUMNS = (
    "fault_s",
    "fault",
    "subject",
    "injected",
    "detected_s",
    "recovery",
    "recovered_s",
    "recovery_total_s",
)


def timeline_figure(run: History) -> Figure:
    """Faults and recoveries against run time: one lane for the worker, one for the sandboxes."""
    question = "What broke when, and how long did each recovery take?"
    if not run.faults and not run.recoveries:
        return not_drawn("timeline", question, "this run saw no fault.")
    totals = [done.recovery.total_s for done in run.recoveries if done.recovery.total_s > 0]
    low = min([1e-2, *(10.0 ** decade_of(total) for total in totals)])
    high = max([1.0, *(1.4 * total for total in totals)])
    length = max(run.length, 1e-6)
    x = Scale(0, length, _LEFT, WIDTH - _RIGHT)
    parts: list[Markup] = []
    lane_height, gap, top = 124.0, 50.0, 22.0
    lanes = ("worker", "sandbox")
    bottom = top + len(lanes) * (lane_height + gap) - 8
    begin = 0.0
    for index, step in enumerate(sorted(run.steps, key=lambda one: one.end)):
        if index % 2:
            parts.append(box(x(begin), top, x(step.end) - x(begin), bottom - top, "band", f"step {step.step}"))
        begin = step.end
    for number, lane in enumerate(lanes):
        parts.append(_lane(run, lane, x, top + number * (lane_height + gap), lane_height, low, high))
    for tick in time_ticks(length):
        parts += [line(x(tick), bottom, x(tick), bottom + 5, "axis")]
        parts += [label(x(tick), bottom + 20, time_label(tick, length), anchor="middle")]
    parts.append(line(x(0), bottom, x(length), bottom, "axis"))
    for moment in run.resumes:
        parts += [line(x(moment), top - 6, x(moment), bottom, "resume"), label(x(moment) + 4, top - 8, "resumed")]
    hows = sorted({done.recovery.how for done in run.recoveries})
    reading = (
        "Each × on a lane's base is a fault, each dot above it a recovery: the higher, the longer (logarithmic). "
        "The strip under the worker's lane shows when a shadow stood by. Shaded columns are optimiser steps."
    )
    title = f"{len(run.faults)} faults and {len(run.recoveries)} recoveries over {duration(length)}"
    entries = [
        ("fault", "fault"),
        *((f"how-{how_class(how)}", how) for how in hows),
        ("standing-by", "shadow standing by"),
    ]
    if not run.shadows:
        entries.pop()
    return drawn(
        "timeline",
        question,
        answer=_what_broke(run),
        reading=reading,
        parts=parts,
        height=bottom + 30,
        title=title,
        entries=entries,
        columns=_FAULT_COLUMNS,
        rows=_fault_rows(run),
    )


def _what_broke(run: History) -> str:
    injected = sum(fault.injected for fault in run.faults)
    others = len(run.faults) - injected
    parts = [f"{injected} fault{'' if injected == 1 else 's'} injected"]
    if others:
        parts.append(f"{others} that nobody injected")
    lead = " and ".join(parts)
    if not run.recoveries:
        return f"{lead}; no recovery was completed."
    longest = max(run.recoveries, key=lambda done: done.recovery.total_s).recovery
    middle = quantile([done.recovery.total_s for done in run.recoveries], 0.5)
    return (
        f"{lead}; {len(run.recoveries)} recoveries, half of them within {duration(middle)}; the longest took "
        f"{duration(longest.total_s)} ({longest.what}, {longest.how})."
    )


def _fault_rows(run: History) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for fault in run.faults:
        answers = [done for done in run.recoveries if done.cause is fault]
        done = answers[0] if answers else None
        rows.append(
            (
                f"{fault.x:.6f}",
                fault.fault,
                fault.subject,
                fault.injected,
                "" if fault.detected is None else f"{fault.detected:.6f}",
                "" if done is None else done.recovery.how,
                "" if done is None else f"{done.end:.6f}",
                "" if done is None else f"{done.recovery.total_s:.6f}",
            )
        )
    for done in run.recoveries:
        if done.cause is None:
            one = done.recovery
            rows.append(("", one.fault or "", one.subject, False, "", one.how, f"{done.end:.6f}", f"{one.total_s:.6f}"))
    return rows


def decade_of(value: float) -> int:
    """The exponent of the decade that `value` lies in."""
    exponent = 0
    while value < 1 and exponent > -6:
        value, exponent = value * 10, exponent - 1
    while value >= 10 and exponent < 6:
        value, exponent = value / 10, exponent + 1
    return exponent


def how_class(how: str) -> str:
    """The colour class of a way to recover."""
    known = {"promotion": "promotion", "cold": "cold", "restore": "restore"}
    return next((name for word, name in known.items() if word in how.lower()), "other")


def _lane(run: History, lane: str, x: Scale, top: float, height: float, low: float, high: float) -> Markup:
    base = top + height
    y = log_scale(low, high, base - 12, top + 6)
    parts: list[Markup] = []
    decade = low
    while decade <= high * 1.001:
        parts += [line(x.start, y(decade), x.end, y(decade), "grid")]
        parts += [label(x.start - 8, y(decade) + 4, _tick_duration(decade), anchor="end")]
        decade *= 10
    name = "worker" if lane == "worker" else "sandboxes"
    parts.append(label(10, top - 6, name, class_="lane"))
    parts.append(line(x.start, base, x.end, base, "axis"))
    mine = [done for done in run.recoveries if (done.recovery.what == "worker") == (lane == "worker")]
    for done in mine:
        spot = x(done.end - done.recovery.total_s)
        style = how_class(done.recovery.how)
        height_at = y(done.recovery.total_s)
        parts.append(line(spot, base, spot, height_at, f"stem how-{style}"))
        dot = tag("title", _recovery_title(done))
        parts.append(tag("circle", dot, cx=spot, cy=height_at, r=4.2, class_=f"dot how-{style}"))
    for fault in (one for one in run.faults if one.lane == lane):
        parts.append(cross(x(fault.x), base, 4.0, "fault", _fault_title(fault)))
    if lane == "worker" and run.shadows:
        strip = base + 10
        parts.append(box(x.start, strip, x.end - x.start, 6, "no-standby", "no shadow stood by"))
        for since, until in ready_periods(run.shadows, _STANDING_BY, run.length):
            note = f"shadow standing by for {duration(until - since)}"
            parts.append(box(x(since), strip, max(0.5, x(until) - x(since)), 6, "standing-by", note))
        parts.append(label(x.start - 8, strip + 7, "shadow", anchor="end"))
    return join(parts)


def _tick_duration(seconds: float) -> str:
    return f"{seconds * 1e3:g} ms" if seconds < 0.9995 else f"{seconds:g} s"


def _fault_title(fault: Fault) -> str:
    return (
        f"{fault.fault} on {fault.subject or 'unknown'}{'' if fault.injected else ' (not injected)'} at {fault.x:.1f} s"
    )


def _recovery_title(done: Done) -> str:
    one = done.recovery
    phases = ", ".join(f"{phase_label(name)} {duration(seconds)}" for name, seconds in one.phases.items())
    after = f" after {one.fault}" if one.fault else ""
    return f"{one.subject or one.what}: {one.how}{after}, {duration(one.total_s)}" + (f" ({phases})" if phases else "")


def groups_of(recoveries: list[Recovery]) -> dict[tuple[str, str], list[Recovery]]:
    """Recoveries by (what, how), the worker's first."""
    groups: dict[tuple[str, str], list[Recovery]] = {}
    for one in sorted(recoveries, key=lambda one: (one.what != "worker", one.what, one.how != "promotion", one.how)):
        groups.setdefault((one.what, one.how), []).append(one)
    return groups


def phase_names(recoveries: list[Recovery]) -> list[str]:
    """Phases in the order in which they were first seen."""
    return list(dict.fromkeys(name for one in recoveries for name in one.phases))


def phases_figure(recoveries: list[Recovery]) -> Figure:
    """The median of each phase of each kind of recovery, laid out one after the other."""
    question = "Where does a recovery spend its time?"
    if not recoveries:
        return not_drawn("phases", question, "nothing had to be recovered.")
    groups = {key: group for key, group in groups_of(recoveries).items() if phase_names(group)}
    if not groups:
        return not_drawn("phases", question, "no recovery reported its phases.")
    columns = min(2, len(groups))
    width = (WIDTH - 36 * (columns - 1)) / columns
    parts: list[Markup] = []
    top, tallest = 4.0, 0.0
    for index, ((what, how), group) in enumerate(groups.items()):
        column = index % columns
        if index and column == 0:
            top, tallest = top + tallest + 22, 0.0
        panel, height = _waterfall(f"{what}: {how}", how, group, column * (width + 36), top, width)
        parts.append(panel)
        tallest = max(tallest, height)
    reading = (
        "One panel per kind of recovery, each with its own scale. Phases follow each other from left to right: bar and "
        "number are the phase's median, the thin line reaches to its 90th percentile. “(2×)” marks a phase that only "
        "two of them had."
    )
    title = "; ".join(f"{what} {how}: {count(len(group))} recoveries" for (what, how), group in groups.items())
    rows: list[tuple[object, ...]] = [
        (one.subject or one.what, one.what, one.how, phase, f"{seconds:.6f}")
        for one in recoveries
        for phase, seconds in one.phases.items()
    ]
    return drawn(
        "phases",
        question,
        answer=" ".join(_dearest(what, how, group) for (what, how), group in groups.items()),
        reading=reading,
        parts=parts,
        height=top + tallest + 2,
        title=title,
        columns=("subject", "part", "way", "phase", "seconds"),
        rows=rows,
    )


def _dearest(what: str, how: str, group: list[Recovery]) -> str:
    """The phase that took most of a kind's recoveries, in one sentence."""
    sums = {name: sum(one.phases.get(name, 0.0) for one in group) for name in phase_names(group)}
    name = max(sums, key=lambda phase: sums[phase])
    whole = sum(sums.values())
    share = f"{sums[name] / whole:.0%} of it" if whole > 0 else "no time at all"
    return f"{what[:1].upper()}{what[1:]}, {how}: mostly {phase_label(name)} ({share})."


def _waterfall(
    heading: str, how: str, group: list[Recovery], left: float, top: float, width: float
) -> tuple[Markup, float]:
    """One panel and its height."""
    row, names = 20.0, phase_names(group)
    values = {name: [one.phases[name] for one in group if name in one.phases] for name in names}
    medians = {name: quantile(values[name], 0.5) for name in names}
    starts, at = {}, 0.0
    for phase in names:
        starts[phase], at = at, at + medians[phase]
    reach = max([at, *(starts[phase] + quantile(values[phase], 0.9) for phase in names)]) or 1.0
    x = Scale(0, reach, left + 116, left + width - 76)
    total = quantile([one.total_s for one in group], 0.5)
    first = top + 30
    overlap = " · phases overlap" if any(sum(one.phases.values()) > one.total_s * 1.1 for one in group) else ""
    parts = [
        label(left, top + 13, heading[:40], class_="lane"),
        label(left + width, top + 13, f"{duration(total)}", anchor="end", class_="value"),
        label(left + width - 76, top + 13, f"n = {count(len(group))}{overlap} · median whole", anchor="end"),
        line(left, top + 21, left + width, top + 21, "grid"),
    ]
    for index, phase in enumerate(names):
        y = first + index * row
        start, end = x(starts[phase]), x(starts[phase] + medians[phase])
        high = quantile(values[phase], 0.9)
        name = phase_label(phase)
        if len(values[phase]) < len(group):
            name = f"{name} ({len(values[phase])}×)"
        note = f"{name}: median {duration(medians[phase])}, p90 {duration(high)}, n = {len(values[phase])}"
        parts += [
            label(left + 106, y + 11, name if len(name) <= 18 else f"{name[:17]}…", anchor="end"),
            line(start, y + 7, x(starts[phase] + high), y + 7, f"whisker how-{how_class(how)}"),
            box(start, y + 1, max(1.5, end - start), 12, f"fall how-{how_class(how)}", note, rx=1.5),
            label(left + width, y + 11, duration(medians[phase]), anchor="end"),
        ]
    return join(parts), 30 + row * len(names)
