"""The live view: what it shows at every size, what it costs, and the plain log."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from belayer import events as ev
from belayer.events import Event
from belayer.observe import LiveView, PlainView, open_view
from belayer.observe._live_state import LiveFeed
from belayer.observe.live import picture, sparkline

pytestmark = pytest.mark.unit


def event(kind: str, at: float, subject: str = "", **data: Any) -> Event:
    return Event(kind=kind, subject=subject, at=at, data=data)


def busy_run() -> list[Event]:
    now = 1000.0
    out = [event(ev.RUN_STARTED, now, seed=7, steps=40)]
    out += [event(ev.SHADOW_STATE, now, "shadow", generation=2, state="ready")]
    out += [event(ev.WORKER_STATE, now, "worker", generation=1, state="serving")]
    for step in range(12):
        for number in range(4):
            name = f"step{step}-0-{number}"
            out.append(event(ev.ROLLOUT_STARTED, now, name))
            out.append(event(ev.GENERATE, now, name, tokens=25, wall_s=0.2))
            out.append(event(ev.CHECKPOINT, now, name, wall_s=0.1, exposed_s=0.002))
            out.append(event(ev.FAULT_INJECTED, now, name, fault="sandbox.kill"))
            out.append(event(ev.FAULT_DETECTED, now, name, fault="sandbox", how="died"))
            phases = {"detect_to_start_s": 0.001, "restore_s": 0.08, "replay_s": 0.01}
            out.append(event(ev.RECOVERED, now, name, what="sandbox", how="full restore", phases=phases, total_s=0.091))
            out.append(event(ev.ROLLOUT_FINISHED, now, name))
        now += 5
        out.append(event(ev.TRAIN_STEP, now, step=step, reward_mean=step / 12, wall_s=5.0))
    out.append(event(ev.ROLLOUT_STARTED, now, "last"))
    out.append(event(ev.FAULT_INJECTED, now, "worker", fault="worker.sigkill"))
    return out


def feed(events: list[Event]) -> LiveFeed:
    found = LiveFeed()
    for one in events:
        found(one)
    return found


def shown(source: LiveFeed, width: int, height: int = 24, *, unicode: bool = True) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(picture(source.snapshot(), "runs/shell", width, height, 1061.0, unicode=unicode))
    return capture.get().rstrip("\n").split("\n")


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_picture_says_everything(width: int) -> None:
    lines = shown(feed(busy_run()), width)
    text = "\n".join(lines)
    for part in (
        "runs/shell · seed 7", "step 12/40", "1:01 elapsed", "about 2:20 to go", "0.00 → 0.92",
        "1 in flight · 48 finished", "0 failed", "worker serving, generation 1", "shadow ready",
        "48 · 98.0% of their time hidden",
        "sandbox kill 48 · worker sigkill 1", "sandbox 48, median 91 ms", "✗ worker.sigkill", "→ full restore 91 ms",
        "restore 80 replay 10",
    ):  # fmt: skip
        assert part in text, part
    assert len(lines) <= 23
    assert {cell_len(line) for line in lines} == {width}


def test_a_promotion_uses_up_the_shadow() -> None:
    source = feed(busy_run())
    source(event(ev.WORKER_STATE, 1062, "worker", generation=2, state="serving"))
    assert (source.snapshot().generation, source.snapshot().shadow) == (2, "promoted")
    source(event(ev.RECOVERED, 1062, "worker", what="worker", how="promotion", fault="worker.exit", total_s=0.05))
    assert "✓ worker.sigkill → promotion 50 ms" in "\n".join(shown(source, 80))


def test_faults_that_nobody_injected_are_shown_too() -> None:
    source = LiveFeed()
    source(event(ev.FAULT_DETECTED, 1, "shadow", fault="shadow.exit", how="pidfd"))
    source(event(ev.FAULT_DETECTED, 1, "r1", fault="checkpoint", how="refused"))
    source(event(ev.FAULT_DETECTED, 1, "worker", fault="worker.hang", how="steps"))
    state = source.snapshot()
    assert [one.fault for one in state.recent] == ["shadow.exit", "worker.hang"]
    assert (state.faults.total(), state.shadow, state.worker) == (0, "dead", "failed")


def test_a_detection_that_is_reported_before_its_injection_is_one_line() -> None:
    source = LiveFeed()
    source(event(ev.FAULT_DETECTED, 1, "r1", fault="sandbox", how="died"))
    source(event(ev.FAULT_INJECTED, 1, "r1", fault="sandbox.damage"))
    assert [one.fault for one in source.snapshot().recent] == ["sandbox.damage"]


@settings(max_examples=60, deadline=None)
@given(st.integers(20, 200), st.integers(4, 60), st.text(max_size=40), st.booleans())
def test_no_size_and_no_text_breaks_the_frame(width: int, height: int, name: str, unicode: bool) -> None:
    source = feed(busy_run())
    source(event(ev.FAULT_INJECTED, 1062, name, fault=name))
    source(event(ev.SHADOW_STATE, 1062, "shadow", state=name, reason=name))
    shown(source, width, height, unicode=unicode)


_scalar = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
_any_event = st.builds(
    Event,
    kind=st.sampled_from([value for name, value in vars(ev).items() if name.isupper() and isinstance(value, str)]),
    subject=st.sampled_from(["worker", "shadow", "r1", "r2", ""]),
    at=st.floats(0, 2e9) | st.floats(-1e12, 1e12),
    data=st.dictionaries(
        st.sampled_from(
            ["step", "steps", "seed", "reward_mean", "wall_s", "tokens", "exposed_s", "state", "generation", "reason",
             "fault", "target", "how", "what", "phases", "total_s", "ok", "resumed", "inject", "level", "count"]
        ),
        _scalar | st.lists(_scalar, max_size=2) | st.dictionaries(st.text(max_size=4), _scalar, max_size=3),
        max_size=6,
    ),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(_any_event, max_size=25), st.sampled_from([20, 80, 140]), st.booleans())
def test_no_order_of_events_and_no_odd_value_breaks_a_view(events: list[Event], width: int, unicode: bool) -> None:
    source, log = LiveFeed(), PlainView("run", stream=io.StringIO())
    for one in events:
        source(one)
        log(one)
    lines = shown(source, width, unicode=unicode)
    assert lines[-1].startswith("╰"), "the frame is not closed"
    assert all(cell_len(line) <= width for line in lines)
    state = source.snapshot()
    assert state.in_flight >= 0 and state.recovered.total() == sum(one.kind == ev.RECOVERED for one in events)


def test_markup_in_names_is_not_interpreted() -> None:
    source = LiveFeed()
    source(event(ev.FAULT_INJECTED, 1, "r", fault="[red]x[/nonsense]"))
    assert "[red]x[/nonsense]" in "\n".join(shown(source, 80))


def test_without_unicode_only_ascii_bars_are_used() -> None:
    assert sparkline([0.0, 0.5, 1.0], 10, unicode=False).isascii()
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert len(sparkline([0.1] * 500, 30)) == 30
    assert sparkline([-1.0, 1.0], 5) == "▁█"


def test_an_event_costs_the_same_after_many() -> None:
    source = LiveFeed()
    events = busy_run()[1:]

    def cost() -> float:
        begun = time.process_time()
        for _ in range(20):
            for one in events:
                source(one)
        return (time.process_time() - begun) / (20 * len(events))

    first = min(cost() for _ in range(3))
    for _ in range(100):
        for one in events:
            source(one)
    later = min(cost() for _ in range(3))
    assert later < 5 * first + 5e-6
    assert later < 60e-6


def test_the_view_draws_on_its_own_thread_and_stops() -> None:
    target = io.StringIO()
    console = Console(file=target, force_terminal=True, width=80, height=24)
    with LiveView("runs/x", console=console, refresh_per_s=4) as view:
        for one in busy_run():
            view(one)
        time.sleep(0.6)
    assert "step 12/40" in target.getvalue()
    with pytest.raises(ValueError, match="at most 4"):
        LiveView("runs/x", console=console, refresh_per_s=30)


def test_without_a_terminal_there_is_one_line_per_step() -> None:
    target = io.StringIO()
    view = open_view("runs/x", console=Console(file=target))
    assert isinstance(view, PlainView)
    with view:
        for one in [*busy_run(), event(ev.RUN_FINISHED, 1070, ok=True)]:
            view(one)
    lines = target.getvalue().splitlines()
    steps = [line for line in lines if " step " in line]
    assert len(steps) == 12
    assert steps[-1].startswith("[1:00] step 12/40  reward 0.917  5.0 s")
    assert "\x1b" not in target.getvalue()
    assert lines[0] == "[0:00] run runs/x seed 7, 40 steps"
    assert lines[-1] == "[1:10] run finished"
    assert "by full restore in 91 ms (ms: detect to start 1 restore 80 replay 10)" in target.getvalue()


def test_plain_wins_over_a_terminal() -> None:
    assert isinstance(open_view("x", plain=True, console=Console(force_terminal=True, file=io.StringIO())), PlainView)
    assert isinstance(open_view("x", console=Console(force_terminal=True, file=io.StringIO())), LiveView)


def test_a_reader_that_went_away_stops_nothing() -> None:
    target = io.StringIO()
    view = PlainView("x", stream=target)
    target.close()
    for one in busy_run():
        view(one)
