"""Says how a rollout function, run again, differs from its journal: the calls before, and what is other in this one."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence

import msgspec

from belayer.errors import ReplayDivergence
from belayer.journal import Call
from belayer.recovery.actions import action_of, describe

BEFORE = 3  # calls that are shown before the one that differs
LINES = 24  # of a difference
WIDTH = 160


def diverged(
    rollout: str, number: int, calls: Sequence[Call], kind: str, asked: str, ids: Sequence[int] = ()
) -> ReplayDivergence:
    """The error for call `number`, which is now `kind` and `asked`; `ids`: tokens that it would observe."""
    call = calls[number]
    lines = [f"    {place}  {one_line(calls[place].kind, calls[place].asked)}" for place in _before(number)]
    journalled, requested = one_line(call.kind, call.asked), one_line(kind, asked)
    lines += [f"  - {number}  {journalled}", f"  + {number}  {requested}"]
    if kind == "end" and (more := len(calls) - number - 1):
        lines.append(f"      and {more} more calls in the journal")
    if call.kind == kind == "observe":
        lines.append(f"      {_first_difference(call.ids, ids)}")
    elif call.kind == kind and kind != "value":
        lines += [f"      {line}" for line in _changes(_fields(call.asked), _fields(asked))]
    return ReplayDivergence(
        f"rollout {rollout}: call {number} of its function is another one than in the journal "
        f"(- journal, + now)\n" + "\n".join(_short(line) for line in lines),
        journalled=f"{call.kind}: {call.asked}",
        requested=f"{kind}: {asked}",
        kept="the journal, untouched",
    )


def one_line(kind: str, asked: str) -> str:
    """A call in a few words."""
    if kind == "action":
        try:
            return describe(action_of(asked)).replace("\n", " ↵ ")
        except msgspec.MsgspecError:  # of a version with other actions
            return f"action {asked}"
    return asked if kind == "end" or asked.startswith(kind) else f"{kind} {asked}".rstrip()


def _before(number: int) -> range:
    return range(max(0, number - BEFORE), number)


def _fields(asked: str) -> list[str]:
    """A call's parameters, one a line."""
    try:
        fields = json.loads(asked.partition(" ")[2] if not asked.startswith("{") else asked)
    except ValueError:
        return asked.splitlines()
    lines: list[str] = []
    for name, value in sorted(fields.items()):
        text = value if isinstance(value, str) else json.dumps(value)
        lines += [f"{name}: {line}" for line in text.splitlines() or [""]]
    return lines


def _changes(before: list[str], now: list[str]) -> list[str]:
    changed = [line for line in difflib.ndiff(before, now) if line[:1] in "+-?"]
    shown = [line.rstrip("\n") for line in changed[:LINES]]
    return shown + ([f"… and {len(changed) - LINES} more lines"] if len(changed) > LINES else [])


def _first_difference(before: Sequence[int], now: Sequence[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), min(len(before), len(now)))
    return (
        f"{len(before)} tokens, now {len(now)}; from token {at} on: "
        f"{_some(before, at)} in the journal, {_some(now, at)} now"
    )


def _some(ids: Sequence[int], at: int) -> str:
    part = list(ids[at : at + 6])
    return f"{part}" + ("…" if len(ids) > at + 6 else "") if part else "nothing"


def _short(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"
