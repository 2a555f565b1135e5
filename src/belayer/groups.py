"""What becomes of a group one of whose rollouts failed for good: it is completed by another draw, or it fails.

A group that is handed to a trainer with fewer members than were asked for would shift its baseline without a word. A
replacement is a rollout of its own, with a seed of its own, called `<rollout>~<number>`.
"""

from __future__ import annotations

from collections.abc import Mapping

from belayer.journal import History

MARK = "~"


def original(rollout: str) -> str:
    """The rollout that `rollout` stands for: itself, or the one that it replaces."""
    return rollout.partition(MARK)[0]


def newest(rollout: str, histories: Mapping[str, History]) -> str:
    """Who stands for `rollout` now: its newest replacement that was begun, or itself."""
    found, number = rollout, 1
    while (following := f"{rollout}{MARK}{number}") in histories and histories[following].started is not None:
        found, number = following, number + 1
    return found


def following(rollout: str) -> str:
    """The name of the rollout that is to replace `rollout`."""
    name, _, number = rollout.partition(MARK)
    return f"{name}{MARK}{int(number or 0) + 1}"


def replaced(group: str, histories: Mapping[str, History]) -> int:
    """How many replacements a group has had."""
    return sum(
        MARK in name and history.started is not None and history.started.group == group
        for name, history in histories.items()
    )


def counting(histories: Mapping[str, History]) -> list[History]:
    """Those that count for the groups: without the ones that were replaced."""
    return [
        history
        for name, history in histories.items()
        if history.started is not None and newest(original(name), histories) == name
    ]
