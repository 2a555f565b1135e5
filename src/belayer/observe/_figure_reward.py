"""The reward curve, with and without faults."""

from __future__ import annotations

from collections import Counter

from belayer.observe._figure import Figure, drawn, not_drawn
from belayer.observe._history import History
from belayer.observe._markup import Markup, tag
from belayer.observe._plot import WIDTH, Scale, cross, label, line, polyline, ticks

_LEFT, _RIGHT = 64.0, 14.0


def reward_figure(run: History, reference: History | None, why_no_reference: str) -> Figure:
    """Reward against step, with and without faults; the rug below shows where faults fell."""
    curve = [(step.step, step.reward) for step in run.steps if step.reward is not None]
    other = [(step.step, step.reward) for step in reference.steps if step.reward is not None] if reference else []
    question = "Does training learn the same with faults as without?"
    if not curve:
        return not_drawn("reward", question, "no step of this run reported a mean reward.")
    both = dict(other)
    shared = [(step, reward, both[step]) for step, reward in curve if step in both]
    same = sum(1 for _, mine, theirs in shared if mine == theirs)
    if not reference:
        answer = "Not known: there is no run without faults to compare with."
    elif not shared:
        answer = "Not known: the two runs have no step in common."
    elif same == len(shared):
        answer = f"Yes: mean reward is exactly equal in all {same} steps that both runs did."
    else:
        worst = max(abs(mine - theirs) for _, mine, theirs in shared)
        answer = (
            f"Not exactly: mean reward is equal in {same} of the {len(shared)} steps that both runs did, and at most "
            f"{worst:.3f} apart in the others."
        )
    reading = (
        "Mean reward of each optimiser step. The thin line is this run; the wide pale band under it is the same seed "
        "without faults, so a line inside the band means that they agree."
        if reference
        else f"Mean reward of each optimiser step. There is no curve without faults: {why_no_reference}"
    )
    values = [reward for _, reward in curve + other]
    low, high = min(0.0, *values), max(values)
    high = 1.0 if 0.5 < high <= 1.0 else high
    if high == low:
        high = low + 1
    top, bottom = 14.0, 262.0
    first, last = min(step for step, _ in curve + other), max(step for step, _ in curve + other)
    x = Scale(first, last, _LEFT, WIDTH - _RIGHT)
    y = Scale(low, high, bottom, top)
    parts: list[Markup] = []
    for tick in ticks(low, high, 5):
        parts += [line(_LEFT, y(tick), WIDTH - _RIGHT, y(tick), "grid")]
        parts += [label(_LEFT - 8, y(tick) + 4, f"{tick:g}", anchor="end")]
    for tick in ticks(first, last, 10):
        if tick == int(tick):
            parts += [label(x(tick), bottom + 46, f"{tick:g}", anchor="middle")]
    parts.append(label(_LEFT - 14, bottom + 46, "step", anchor="end"))
    parts.append(label(_LEFT - 14, bottom + 24, "faults", anchor="end"))
    if other:
        parts.append(polyline([(x(step), y(reward)) for step, reward in other], "reference"))
    parts.append(polyline([(x(step), y(reward)) for step, reward in curve], "run"))
    for step, reward in curve:
        note = f"step {step}: {reward:.3f}" + (f" (without faults {both[step]:.3f})" if step in both else "")
        parts.append(tag("circle", tag("title", note), cx=x(step), cy=y(reward), r=2.6, class_="run-dot"))
    hit = _faults_by_step(run)
    rows: list[tuple[object, ...]] = [
        (step, reward, both.get(step, ""), hit[step].total() if step in hit else 0) for step, reward in curve
    ]
    for step, kinds in sorted(hit.items()):
        note = f"step {step}: " + ", ".join(f"{n} × {kind}" for kind, n in sorted(kinds.items()))
        size = min(6.0, 2.2 + kinds.total())
        parts.append(cross(x(step), bottom + 20, size, "fault", note))
    entries = [("run", "this run"), ("reference", "same seed, no faults"), ("fault", "step with faults (larger: more)")]
    if not other:
        del entries[1]
    title = f"Mean reward from {curve[0][1]:.2f} at step {curve[0][0]} to {curve[-1][1]:.2f} at step {curve[-1][0]}"
    return drawn(
        "reward",
        question,
        answer=answer,
        reading=reading,
        parts=parts,
        height=318,
        title=title,
        entries=entries,
        columns=("step", "reward_mean", "reward_mean_without_faults", "faults"),
        rows=rows,
    )


def _faults_by_step(run: History) -> dict[int, Counter[str]]:
    found: dict[int, Counter[str]] = {}
    ends = [(step.end, step.step) for step in run.steps]
    for fault in run.faults:
        step = next((number for end, number in ends if fault.x <= end), None)
        if step is not None:
            found.setdefault(step, Counter())[fault.fault] += 1
    return found
