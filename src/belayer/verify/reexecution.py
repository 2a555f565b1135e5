"""Does the environment say again what the journal holds? A sample of rollouts, action by action, in new sandboxes.

A command whose output differs by nature (dates, process ids, temporary names) is reported too: nobody can tell from
outside whether such a difference matters.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec

from belayer.journal.history import History
from belayer.journal.journal import read_histories
from belayer.recovery.actions import action_of, describe, from_journal, observed, perform
from belayer.sandbox import Sandboxes


class Difference(msgspec.Struct, frozen=True):
    """The first action of a rollout that observed something else. Later ones are not looked at."""

    rollout: str
    k: int
    action: str
    journalled: str
    now: str


class Reexecution(msgspec.Struct):
    """What a sample of finished rollouts said when it was executed again."""

    rollouts: int = 0
    actions: int = 0
    differences: list[Difference] = msgspec.field(default_factory=list)


async def reexecute(
    run: Path, sandboxes: Sandboxes, count: int, *, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> Reexecution:
    """Execute `count` finished rollouts of `run` again, drawn with `seed`. Raises `SandboxError`, `JournalError`."""
    finished = [history for history in read_histories(run / "journal").values() if history.finished]
    chosen = random.Random(seed).sample(finished, min(count, len(finished)))
    result = Reexecution()
    for number, history in enumerate(chosen):
        await _again(history, sandboxes, result)
        if progress is not None:
            progress(number + 1, len(chosen))
    return result


async def _again(history: History, sandboxes: Sandboxes, result: Reexecution) -> None:
    name = f"verify-{history.rollout}".replace("/", "-")
    result.rollouts += 1
    if not history.actions():
        return
    sandbox = await sandboxes.create(name, image=history.image)
    try:
        for call in history.actions():
            action = action_of(call.asked)
            now = await perform(sandbox, action, (0, sandbox.generation))
            result.actions += 1
            if observed(now) != call.observed:
                before = from_journal(call.result)
                result.differences.append(
                    Difference(history.rollout, call.k, describe(action), _text(before), _text(now))
                )
                return
    finally:
        await sandboxes.discard(name)


def _text(result: object) -> str:
    text = getattr(result, "text", None)
    code = getattr(result, "exit_code", None)
    shown = repr(result if text is None else text)
    return (shown if len(shown) <= 200 else shown[:199] + "…") + ("" if code in (None, 0) else f" (exit {code})")
