"""`belayer status`: how a run is doing, read from its folder while it runs or afterwards."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from belayer.observe import duration
from belayer.observe.live import picture
from belayer.observe.status import InFlight, RunReader, RunStatus

console = Console(highlight=False, soft_wrap=True)
_STYLES = {"running": "green", "starting": "yellow", "finished": "green", "stopped": "bold red"}
_GOING = ("starting", "running")
_ROLLOUTS = 12


def status_command(run: Path, *, as_json: bool, watch: bool, every_s: float = 1.0) -> int:
    """Print it once, or again and again until the run ends. Exit code 0 unless the run is stopped (1).

    Raises `RunError` when there is no run.
    """
    reader = RunReader(run)
    if as_json:
        while True:
            status = reader.status()
            print(msgspec.json.encode(status).decode(), flush=True)
            if not watch or status.state not in _GOING:
                return _code(status)
            time.sleep(every_s)
    status = reader.status()
    if watch and status.state in _GOING:
        return _watch(reader, status, every_s)
    console.print(_head(status))  # on its own, unwrapped: it may hold a command to copy
    if status.journal_unread:
        console.print(f"journal: {status.journal_unread}", markup=False)
    console.print(_body(reader, status))
    return _code(status)


def _watch(reader: RunReader, status: RunStatus, every_s: float) -> int:
    try:
        with Live(_drawn(reader, status), console=console, auto_refresh=False, vertical_overflow="crop") as live:
            while status.state in _GOING:
                time.sleep(every_s)
                status = reader.status()
                live.update(_drawn(reader, status), refresh=True)
    except KeyboardInterrupt:
        return 0
    console.print(_head(status))
    return _code(status)


def _code(status: RunStatus) -> int:
    return 1 if status.state == "stopped" or status.ok is False else 0


def _head(status: RunStatus) -> Text:
    return Text(status.message, style="bold red" if status.ok is False else _STYLES[status.state], overflow="fold")


def _drawn(reader: RunReader, status: RunStatus) -> RenderableType:
    return Group(_head(status), _body(reader, status))


def _body(reader: RunReader, status: RunStatus) -> RenderableType:
    live = reader.live_state()
    if status.last_event_age_s is None:
        return Group(_counts(status), _rollouts(status)) if status.in_flight else _counts(status)
    now = time.time()
    if not status.driver_alive or live.ended is not None:
        live.worker = live.shadow = live.owner = "ended"
        live.step_walls.clear()  # no time to go
    if not status.driver_alive and live.ended is None:
        now -= status.last_event_age_s  # the clock stopped with the driver
    unicode = console.encoding.lower().startswith("utf")
    parts: list[RenderableType] = [
        picture(live, reader.path.name, console.width, 26, now, unicode=unicode),
        _details(status),
    ]
    if status.in_flight:
        parts.append(_rollouts(status))
    return Group(*parts)


def _counts(status: RunStatus) -> Text:
    return Text(
        f"{status.rollouts_started} rollouts: {status.rollouts_finished} finished, {status.rollouts_delivered} "
        f"delivered, {status.rollouts_failed} failed, {len(status.in_flight)} in flight. Whoever drives it records no "
        "events, so that times and the engine are not known; `belayer show` prints rollouts."
    )


def _details(status: RunStatus) -> Text:
    parts = []
    if status.sandboxes_running is not None:
        parts.append(f"sandboxes running {status.sandboxes_running}")
    if status.rollouts_per_min is not None:
        parts.append(f"{status.rollouts_per_min:.1f} rollouts/min")
    if status.checkpoints_skipped is not None:
        parts.append(f"checkpoints skipped {status.checkpoints_skipped}, abandoned {status.checkpoints_abandoned}")
    parts.append(f"journal {status.journal_bytes / 1e6:.1f} MB")
    if status.last_event_age_s is not None:
        parts.append(f"last event {duration(status.last_event_age_s)} ago")
    return Text(" · ".join(parts), style="dim")


def _rollouts(status: RunStatus) -> Table:
    table = Table(box=None, pad_edge=False, title=_title(status), title_justify="left", title_style="bold")
    for heading in ("rollout", "try", "turns", "actions", "age", "last", "since"):
        table.add_column(heading, no_wrap=True, overflow="ellipsis")
    oldest = sorted(status.in_flight, key=lambda one: -(one.age_s or 0.0))
    for one in oldest[:_ROLLOUTS]:
        table.add_row(
            one.rollout, str(one.attempt), str(one.turns), str(one.actions), _age(one.age_s), one.last, _since(one)
        )
    return table


def _title(status: RunStatus) -> str:
    total = len(status.in_flight)
    what = "in flight" if status.driver_alive else "unfinished"
    return f"{total} {what}" + (f", the {_ROLLOUTS} oldest" if total > _ROLLOUTS else "")


def _age(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)


def _since(one: InFlight) -> str:
    return _age(one.last_age_s)
