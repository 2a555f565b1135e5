"""The live view of a run in a terminal, and the plain log that takes its place where there is none.

Drawing happens on a thread of its own, from a copy, at most four times a second: an event costs a few dictionary
operations and never waits for the terminal.
"""

from __future__ import annotations

import logging
import sys
import time
from itertools import pairwise
from types import TracebackType
from typing import IO, Protocol

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from belayer import events as ev
from belayer.events import Event
from belayer.observe._live_state import LiveFeed, LiveState, Recent
from belayer.observe._values import clock, duration, number, phase_label, quantile, text, whole
from belayer.observe.summary import recovery_of

_log = logging.getLogger(__name__)
_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-=+*%#"
_WIDE = 118


class View(Protocol):
    """What shows a run: an event sink that is also a context manager."""

    def __call__(self, event: Event) -> None: ...
    def __enter__(self) -> View: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def open_view(run_name: str, *, plain: bool = False, console: Console | None = None) -> View:
    """The live view, or the plain log when `plain` is asked for or the output is no terminal."""
    console = console or Console()
    if plain or not console.is_terminal or console.is_dumb_terminal:
        return PlainView(run_name, stream=console.file)
    return LiveView(run_name, console=console)


class LiveView:
    """The view of a terminal; redraws `refresh_per_s` times a second and leaves its last picture on the screen."""

    def __init__(self, run_name: str, *, console: Console | None = None, refresh_per_s: float = 2.0) -> None:
        if not 0 < refresh_per_s <= 4:
            raise ValueError(f"refresh_per_s must be above 0 and at most 4, not {refresh_per_s}")
        self._console = console or Console()
        self._feed = LiveFeed()
        self._run_name = run_name
        self._live = Live(
            get_renderable=self._render,
            console=self._console,
            refresh_per_second=refresh_per_s,
            vertical_overflow="crop",
            transient=False,
        )

    def __call__(self, event: Event) -> None:
        self._feed(event)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        size = self._console.size
        unicode = self._console.encoding.lower().startswith("utf")
        return picture(self._feed.snapshot(), self._run_name, size.width, size.height, time.time(), unicode=unicode)


def picture(
    state: LiveState, run_name: str, width: int, height: int, now: float, *, unicode: bool = True
) -> RenderableType:
    """One frame of the live view for a terminal of `width` x `height` characters, at wall-clock time `now`."""
    inner = width - 4
    wide = width >= _WIDE
    left = Table.grid(padding=(0, 1))
    left.add_column(style="dim", no_wrap=True, min_width=11)
    left.add_column(no_wrap=True, overflow="ellipsis")
    half = 70 if wide else inner
    room = half - 12
    for name, value in _rows(state, now, room, unicode):
        value.truncate(room, overflow="ellipsis")
        left.add_row(name, value)
    taken = left.row_count + 3 + (0 if wide else 1)
    lines = max(1, min(left.row_count - 1 if wide else 6, height - taken - 1))
    recent = _recent(state, lines, inner - half - 2 if wide else inner, unicode)
    body: RenderableType
    if wide:
        body = Table.grid(padding=(0, 2), expand=True)
        body.add_column(width=half)
        body.add_column()
        body.add_row(left, Group(Text("newest faults and recoveries, phases in ms", style="dim"), recent))
    else:
        body = Group(left, Text("newest faults and recoveries, phases in ms", style="dim"), recent)
    done = 0 if state.step is None else state.step + 1
    bar = _bar(done, state.steps_planned, inner, unicode)
    title = Text.assemble(("belayer ", "bold"), (_short(run_name, max(8, width - 40)), "bold cyan"))
    if state.seed is not None:
        title.append(f" · seed {state.seed}", style="default not bold")
    return Panel(
        Group(_headline(state, done, now), bar, body), title=title, title_align="left", border_style="dim", width=width
    )


def _headline(state: LiveState, done: int, now: float) -> Text:
    end = state.ended if state.ended is not None else now
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"step {done}/{state.steps_planned}" if state.steps_planned else f"step {done}", style="bold")
    line.append(f"   {clock(end - state.begun) if state.begun is not None else '0:00'} elapsed")
    eta = state.eta_s()
    if state.ended is not None:
        good = state.ok is not False
        line.append("   finished" if good else "   ended with an error", style="bold green" if good else "bold red")
    elif eta is not None:
        line.append(f"   about {clock(eta)} to go")
    if state.step_walls:
        line.append(f"   {duration(state.step_walls[-1])} a step", style="dim")
    return line


def _rows(state: LiveState, now: float, room: int, unicode: bool) -> list[tuple[str, Text]]:
    rollouts = Text.assemble(
        (str(state.in_flight), "bold"), " in flight · ", (str(state.finished), "bold"), " finished · "
    )
    rollouts.append(f"{state.failed} failed", style="bold red" if state.failed else "")
    if state.truncated:
        rollouts.append(f" · {state.truncated} truncated")
    faults = Text(str(state.faults.total()), style="bold")
    groups: dict[str, list[str]] = {}
    for kind, number_of in sorted(state.faults.items()):
        what, _, rest = kind.partition(".")
        groups.setdefault(what, []).append(f"{rest} {number_of}".strip())
    for what, kinds in groups.items():
        faults.append(f" · {what} {', '.join(kinds)}", style="not bold")
    recovered = Text(str(state.recovered.total()), style="bold green" if state.recovered else "bold")
    for what in sorted(state.totals, reverse=True):
        totals = state.totals[what]
        recovered.append(
            f" · {what} {state.recovered[what]}, median {duration(quantile(totals, 0.5))}", style="not bold default"
        )
    hidden = state.hidden_share
    checkpoints = Text(str(state.checkpoints), style="bold")
    if hidden is not None:
        checkpoints.append(f" · {hidden:.1%} of their time hidden", style="not bold")
    return [
        ("reward", _reward(state, room, unicode)),
        ("rollouts", rollouts),
        ("tokens", Text.assemble((f"{_token_rate(state, now):,.0f}/s", "bold"), f" · {state.tokens:,} in all")),
        ("engine", _engine(state)),
        ("checkpoints", checkpoints),
        ("injected", faults),
        ("recovered", recovered),
    ]


def _token_rate(state: LiveState, now: float) -> float:
    """Tokens per second: of late while the run goes on, of the whole run when it has ended."""
    if state.ended is None or state.begun is None:
        return state.tokens_per_s(now)
    return state.tokens / max(1.0, state.ended - state.begun)


def _engine(state: LiveState) -> Text:
    line = Text("worker ")
    if not state.worker:
        line.append("not started yet", style="dim")
    else:
        line.append(state.worker, style="green" if state.worker == "serving" else "yellow")
        if state.generation is not None:
            line.append(f", generation {state.generation}")
    line.append(" · shadow ")
    line.append(state.shadow or "none", style="green" if state.shadow == "ready" else "yellow")
    if state.shadow_reason and state.shadow != "ready":
        line.append(f" ({state.shadow_reason})", style="dim")
    if state.owner and state.owner not in ("ready", "serving", "started", "ended"):
        line.append(f" · owner {state.owner}", style="yellow")
    return line


def _reward(state: LiveState, room: int, unicode: bool) -> Text:
    if not state.rewards:
        return Text("no step yet", style="dim")
    numbers = (
        f" {state.rewards[-1]:.2f}" if len(state.rewards) == 1 else f" {state.rewards[0]:.2f} → {state.rewards[-1]:.2f}"
    )
    if not unicode:
        numbers = numbers.replace("→", "->")
    line = Text(sparkline(list(state.rewards), max(4, room - len(numbers)), unicode=unicode), style="cyan")
    line.append(numbers, style="bold default")
    return line


def sparkline(values: list[float], width: int, *, unicode: bool = True) -> str:
    """At most `width` bars; more values are averaged in groups. The scale is 0 to 1 unless the values leave it."""
    bars = _BARS if unicode else _ASCII_BARS
    if len(values) > width:
        edges = [round(index * len(values) / width) for index in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(0.0, *values), max(1.0, *values)
    return "".join(bars[min(len(bars) - 1, int((value - low) / (high - low) * len(bars)))] for value in values)


def _recent(state: LiveState, lines: int, room: int, unicode: bool) -> Text:
    shown = list(state.recent)[-lines:]
    out = Text("\n", no_wrap=True, overflow="ellipsis").join(_recent_line(one, state, room, unicode) for one in shown)
    return out if shown else Text("none yet", style="dim")


def _recent_line(one: Recent, state: LiveState, room: int, unicode: bool) -> Text:
    since = clock(one.at - state.begun) if state.begun is not None else ""
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{since:>5} ", style="dim")
    done = one.recovery
    if done is None:
        line.append("✗ " if unicode else "x ", style="bold red")
        line.append(one.fault, style="red")
        if one.subject and not one.fault.startswith(one.subject):
            line.append(f" {_short(one.subject, 24)}", style="dim")
    else:
        line.append("✓ " if unicode else "+ ", style="bold green")
        line.append(_short(done.fault or done.what, 24))
        line.append(" → " if unicode else " -> ", style="dim")
        line.append(f"{done.how} ")
        line.append(duration(done.total_s), style="bold green")
        phases = _phases(done.phases, room - line.cell_len - 2)
        if phases:
            line.append(f"  {phases}", style="dim")
    line.truncate(room, overflow="ellipsis")
    return line


def _phases(phases: dict[str, float], room: int = 400) -> str:
    """Phase times in milliseconds, in their order. Those below half a millisecond are left out, and the shortest that
    do not fit into `room` characters."""
    shown = {phase_label(name): seconds for name, seconds in phases.items() if seconds >= 0.0005}
    while shown:
        line = " ".join(f"{name} {seconds * 1e3:.0f}" for name, seconds in shown.items())
        if cell_len(line) <= room:
            return line
        del shown[min(shown, key=shown.__getitem__)]
    return ""


def recovered_line(event: Event) -> str:
    """A recovery in a line: what, how, how long, and its phases."""
    one = recovery_of(event)
    phases = _phases(one.phases)
    where = "" if event.subject in ("", one.what) else f" ({event.subject})"
    line = f"recovered {one.what}{where} by {one.how} in {duration(one.total_s)}"
    return f"{line} (ms: {phases})" if phases else line


def _bar(done: int, planned: int | None, width: int, unicode: bool) -> Text:
    filled = min(width, width * done // planned) if planned else 0
    mark = "━" if unicode else "="
    return Text.assemble((mark * filled, "green"), ((mark if unicode else "-") * (width - filled), "bright_black"))


def _short(name: str, room: int) -> str:
    if cell_len(name) <= room:
        return name
    keep = (room - 1) // 2
    return f"{set_cell_size(name, room - 1 - keep)}…{name[-keep:]}"


class PlainView:
    """One line per optimiser step, fault and recovery, for logs. A reader that went away only silences it."""

    def __init__(self, run_name: str, *, stream: IO[str] | None = None) -> None:
        self._feed = LiveFeed()
        self._run_name = run_name
        self._stream = stream or sys.stdout
        self._broken = False

    def __call__(self, event: Event) -> None:
        self._feed(event)
        if event.kind not in _PLAIN_KINDS or self._broken:
            return
        state = self._feed.snapshot()
        line = self._line(event, state)
        try:
            print(line, file=self._stream, flush=True)
        except (OSError, ValueError) as error:  # ValueError: the stream was closed, or cannot hold a character
            self._broken = True
            _log.warning("the plain log ends here: %s", error)

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def _line(self, event: Event, state: LiveState) -> str:
        since = clock(event.at - state.begun) if state.begun is not None else "0:00"
        data = event.data
        if event.kind == ev.RUN_STARTED:
            seed = "" if state.seed is None else f" seed {state.seed}"
            planned = f", {state.steps_planned} steps" if state.steps_planned else ""
            return f"[{since}] run {self._run_name}{seed}{planned}{', resumed' if data.get('resumed') else ''}"
        if event.kind == ev.RUN_FINISHED:
            return f"[{since}] run {'ended with an error' if state.ok is False else 'finished'}"
        if event.kind == ev.TRAIN_STEP:
            return self._step_line(event, state, since)
        if event.kind == ev.RECOVERED:
            return f"[{since}] {recovered_line(event)}"
        if event.kind == ev.FAULT_INJECTED:
            return f"[{since}] fault {text(data, 'fault', 'unnamed')} on {event.subject or text(data, 'target')}"
        return f"[{since}] rollout {event.subject} failed: {text(data, 'reason', 'no reason given')}"

    def _step_line(self, event: Event, state: LiveState, since: str) -> str:
        reward, wall = number(event.data, "reward_mean"), number(event.data, "wall_s")
        number_of = whole(event.data, "step")
        parts = [f"[{since}] step {'?' if number_of is None else number_of + 1}"]
        if state.steps_planned:
            parts[0] += f"/{state.steps_planned}"
        if reward is not None:
            parts.append(f"reward {reward:.3f}")
        if wall is not None:
            parts.append(duration(wall))
        parts.append(f"{state.tokens_per_s(time.time()):.0f} tokens/s")
        parts.append(f"rollouts {state.finished} finished {state.failed} failed")
        parts.append(f"faults {state.faults.total()} recovered {state.recovered.total()}")
        if state.hidden_share is not None:
            parts.append(f"checkpoints {state.checkpoints} hidden {state.hidden_share:.1%}")
        return "  ".join(parts)


_PLAIN_KINDS = frozenset(
    (ev.RUN_STARTED, ev.RUN_FINISHED, ev.TRAIN_STEP, ev.RECOVERED, ev.FAULT_INJECTED, ev.ROLLOUT_FAILED)
)
