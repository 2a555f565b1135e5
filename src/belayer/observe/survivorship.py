"""Does what failed depend on how long a trajectory is? Long ones meet more failures; if those were lost or cut more
often, the trainer would learn from short ones (survivorship bias).

Length is the number of model turns, of failed rollouts as far as they came.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from belayer.journal import History

EDGES = (1, 2, 3, 5, 8, 13, 21, 34, 55)  # lower bounds of the classes


class LengthClass(msgspec.Struct):
    """Rollouts of `low` to `high` turns (`high` None: and more). One may count as retried, restored and cut at once."""

    low: int
    high: int | None
    rollouts: int = 0
    delivered: int = 0
    lost: int = 0
    """Failed for good: no trajectory reached the trainer."""
    retried: int = 0
    """Started anew at least once."""
    restored: int = 0
    truncated: int = 0


def survivorship(histories: Iterable[History]) -> list[LengthClass]:
    """The classes that have rollouts, shortest first."""
    bounds = [0, *EDGES]
    classes = [LengthClass(low, bounds[i + 1] - 1 if i + 1 < len(bounds) else None) for i, low in enumerate(bounds)]
    for history in histories:
        turns = sum(call.kind == "generate" for call in history.calls)
        found = next(each for each in reversed(classes) if turns >= each.low)
        found.rollouts += 1
        found.delivered += history.acknowledged
        found.lost += history.failed is not None
        found.retried += history.attempts > 1
        found.restored += history.restores > 0
        found.truncated += history.truncations > 0
    return [each for each in classes if each.rollouts]
