"""Groups under examination: none is delivered short without a word, and whoever replaces another has a right to.

A rollout of a group is called `<name>-<group>-<index>`, the one that replaces it `<rollout>~<number>`; groups and
their members are begun in order. Other names (a harness's, a client's) promise nothing and are left alone. A member
that failed for good is no silent loss: its failure is journalled, and `Run.rollouts` raises `GroupFailed` for it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from belayer.verify.witness import Attempt

_MEMBER = re.compile(r"(?P<group>(?P<name>.*)-(?P<number>\d+))-(?P<index>\d+)")
_REPLACES = re.compile(r"(?P<original>.*)~(?P<number>\d+)")

Attempts = dict[str, list[Attempt]]


def replacement_problems(attempts: Attempts) -> Iterator[tuple[str, str]]:
    """(rollout, what is wrong) for rollouts that replace another one, or were replaced by one."""
    for rollout in attempts:
        replaced = _replaced_by(rollout, attempts)
        if replaced is None:
            continue
        mine, other = attempts[rollout][-1], attempts[replaced][-1]
        if other.failed is None:
            yield rollout, f"it replaces {replaced}, which has not failed"
        if other.acknowledged:
            yield replaced, f"it was delivered, and so may be {rollout}, which replaces it"
        if (mine.start.group, mine.start.task) != (other.start.group, other.start.task):
            yield rollout, f"it replaces {replaced}, which has another group or task"


def short_groups(attempts: Attempts) -> list[str]:
    """Groups of which something was delivered and a member failed for good, as the journal says."""
    lost: set[str] = set()
    delivered: set[str] = set()
    replaced = {_replaced_by(rollout, attempts) for rollout in attempts}
    for rollout, mine in attempts.items():
        if not mine or rollout in replaced:
            continue
        last = mine[-1]
        if last.acknowledged:
            delivered.add(last.start.group)
        elif last.failed is not None:
            lost.add(last.start.group)
    return sorted(lost & delivered)


def failed_groups(attempts: Attempts) -> list[str]:
    """Groups that were given up, as the journal says: neither the member nor a replacement has begun again since."""
    replaced = {_replaced_by(rollout, attempts) for rollout in attempts}
    return sorted(
        {
            mine[-1].start.group
            for rollout, mine in attempts.items()
            if mine and rollout not in replaced and mine[-1].group_failed is not None
        }
    )


def missing_members(attempts: Attempts) -> Iterator[tuple[str, str]]:
    """(a member of the group, what is wrong) for groups that were delivered without a member nobody has heard of."""
    members: dict[str, dict[int, str]] = defaultdict(dict)  # group → index → the rollout that stands for it
    order: dict[str, list[tuple[int, str]]] = defaultdict(list)  # name → (number, group)
    for rollout, mine in attempts.items():
        found = _MEMBER.fullmatch(rollout.partition("~")[0])
        if not mine or found is None or mine[-1].start.group != found["group"]:
            continue
        group, index = found["group"], int(found["index"])
        if group not in members:
            order[found["name"]].append((int(found["number"]), group))
        newest = members[group].get(index)
        if newest is None or _number(rollout) > _number(newest):
            members[group][index] = rollout
    for groups in order.values():
        size = 0  # of the groups begun later: an earlier one has as many
        for _, group in sorted(groups, reverse=True):
            there = members[group]
            size = max(size, max(there) + 1)
            missing = [index for index in range(size) if index not in there]
            last = [attempts[rollout][-1] for rollout in there.values()]
            delivered = any(each.acknowledged for each in last)
            # while somebody is at work on it, it is not over
            if missing and delivered and all(each.acknowledged or each.failed for each in last):
                named = ", ".join(f"{group}-{index}" for index in missing)
                yield (
                    there[min(there)],
                    f"group {group} was delivered with {len(there)} of {size} members: of {named} nothing is said",
                )


def _number(rollout: str) -> int:
    """0 for a rollout that replaces none."""
    found = _REPLACES.fullmatch(rollout)
    return int(found["number"]) if found else 0


def _replaced_by(rollout: str, attempts: Attempts) -> str | None:
    """The rollout whose place this one took, if any. With the same seed it is a branch of a session, and no draw."""
    found = _REPLACES.fullmatch(rollout)
    if found is None or not attempts[rollout]:
        return None
    number, original = int(found["number"]), found["original"]
    before = original if number == 1 else f"{original}~{number - 1}"
    if not attempts.get(before) or attempts[before][-1].start.seed == attempts[rollout][-1].start.seed:
        return None
    return before
