"""Compare two runs of the same seed, rollout by rollout and token by token."""

from __future__ import annotations

from pathlib import Path

import msgspec

from belayer.journal.history import History
from belayer.journal.journal import read_histories


class Comparison(msgspec.Struct, frozen=True):
    """`tokens_changed` counts positions that differ, including those that only one side has."""

    rollouts_compared: int
    rollouts_identical: int
    tokens_compared: int
    tokens_changed: int
    rewards_changed: int
    only_here: int
    only_there: int
    first_difference: str = ""

    @property
    def same(self) -> bool:
        return self.tokens_changed == 0 and self.rewards_changed == 0 and not (self.only_here or self.only_there)


def compare_runs(here: Path, there: Path) -> Comparison:
    """Compare the finished rollouts of two run directories. Raises `JournalError` where one cannot be read."""
    ours = _finished(read_histories(here / "journal"))
    theirs = _finished(read_histories(there / "journal"))
    both = [rollout for rollout in ours if rollout in theirs]
    identical = tokens = changed = rewards = 0
    first = ""
    for rollout in both:
        a, b = ours[rollout].context(), theirs[rollout].context()
        differing = sum(x != y for x, y in zip(a, b, strict=False)) + abs(len(a) - len(b))
        tokens += max(len(a), len(b))
        changed += differing
        rewards += ours[rollout].reward != theirs[rollout].reward
        identical += not differing and ours[rollout].reward == theirs[rollout].reward
        if (differing or ours[rollout].reward != theirs[rollout].reward) and not first:
            first = f"{rollout}: {_difference(ours[rollout], theirs[rollout])}"
    return Comparison(
        rollouts_compared=len(both),
        rollouts_identical=identical,
        tokens_compared=tokens,
        tokens_changed=changed,
        rewards_changed=rewards,
        only_here=len(ours) - len(both),
        only_there=len(theirs) - len(both),
        first_difference=first,
    )


def _finished(histories: dict[str, History]) -> dict[str, History]:
    return {rollout: history for rollout, history in histories.items() if history.finished}


def _difference(ours: History, theirs: History) -> str:
    for number, (a, b) in enumerate(zip(ours.calls, theirs.calls, strict=False)):
        if (a.kind, a.asked, a.ids, a.observed) != (b.kind, b.asked, b.ids, b.observed):
            return f"call {number}: {a.kind} {a.ids or a.observed} / {b.kind} {b.ids or b.observed}"
    return f"{len(ours.calls)} / {len(theirs.calls)} calls, reward {ours.reward} / {theirs.reward}"
