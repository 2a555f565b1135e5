"""The faults of the joint campaign: at which moment of a rollout's life, by which hand.

A moment is a failpoint, a kind is `TARGET.WHAT`. Every pair that can happen comes once before any comes again.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import msgspec

from belayer.faults import failpoints

# how often each kind comes again once every pair was there; those that stop the driver or a whole engine cost seconds
KINDS = {
    "sandbox.kill": 40,
    "sandbox.freeze": 6,
    "sandbox.damage": 24,
    "checkpoint.damage": 16,
    "worker.sigkill": 6,
    "worker.sigstop": 1,
    "shadow.sigkill": 3,
    "shadow.sigstop": 1,
    "owner.sigkill": 2,
    "owner.sigstop": 0,
    "disk.full": 0,
    "driver.sigkill": 1,
}
SANDBOX_KINDS = ("sandbox.kill", "sandbox.freeze", "sandbox.damage", "checkpoint.damage")
ENDS_DRIVER = ("disk.full", "driver.sigkill")
# cost seconds each: a deadline has to pass, or a process to start anew
DEAR = ("sandbox.freeze", "worker.sigstop", "shadow.sigstop", "owner.sigkill", "owner.sigstop", *ENDS_DRIVER)
FEW = 4

# failpoints that no rollout comes to, only commands; each has crash tests of its own
ELSEWHERE = ("checkpoint.export.", "checkpoint.import.")
# passed by many at once: which passage it is, is drawn from so many
PASSAGES = {
    "journal.append.before": 40,
    "journal.append.after": 40,
    "turn.tokens": 20,
    "turn.journalled": 20,
    "engine.update.after_shard": 12,
}
USUAL_PASSAGES = 3
# rarely passed: the first passage is taken
RARE = (
    "restore.fresh",
    "truncate.before",
    "truncate.after",
    "checkpoint.move.copied",
    "checkpoint.move.renamed",
    "checkpoint.remove.manifest",
    "checkpoint.remove.images",
    "journal.archive.written",
    "journal.archive.renamed",
    "journal.compact.written",
    "journal.compact.renamed",
)
# what a full disk meets: where something is about to be written there
WRITES = (
    "turn.tokens",
    "action.chosen",
    "action.performed",
    "checkpoint.publish.captured",
    "checkpoint.journal.before",
    "checkpoint.write.begin",
    "checkpoint.move.copied",
    "replay.end",
    "truncate.before",
    "rollout.returned",
    "acknowledge.before",
    "journal.append.before",
    "journal.segment.created",
    "journal.archive.written",
    "journal.compact.written",
)


class JointFault(msgspec.Struct, frozen=True):
    """`kind` strikes at `point` after it was passed `skip` times, and `delay_s` later where the kind can wait."""

    index: int
    point: str
    kind: str
    skip: int
    delay_s: float
    draw: int  # a number for whatever else is to be chosen


def points() -> list[str]:
    """The failpoints that rollouts come to."""
    return [name for name in failpoints.NAMES if not name.startswith(ELSEWHERE)]


def pairs() -> list[tuple[str, str]]:
    """Every (failpoint, kind) that a campaign has to have seen."""
    return [(point, kind) for point in points() for kind in KINDS if kind != "disk.full" or point in WRITES]


def stream(seed: int) -> Iterator[JointFault]:
    """The faults of a campaign, without end; the same for the same seed."""
    rng = random.Random(f"joint faults {seed}")
    first = pairs()
    rng.shuffle(first)
    every = points()
    index = 0
    while True:
        if index < len(first):
            point, kind = first[index]
        else:
            point, kind = rng.choice(every), rng.choices(list(KINDS), list(KINDS.values()))[0]
        yield JointFault(
            index=index,
            point=point,
            kind=kind,
            skip=0 if point in RARE else rng.randrange(PASSAGES.get(point, USUAL_PASSAGES)),
            delay_s=rng.choice((0.0, 0.0, rng.uniform(0.0, 0.03))),
            draw=rng.getrandbits(32),
        )
        index += 1


def few(seed: int, comes_to: Callable[[str], bool]) -> list[JointFault]:
    """For a short campaign: `FEW` of every kind, one of each dear kind, at failpoints that it surely `comes_to`."""
    left = {kind: 1 if kind in DEAR else FEW for kind in KINDS}
    found: list[JointFault] = []
    for fault in itertools.islice(stream(seed), len(pairs())):
        if left[fault.kind] and comes_to(fault.point) and fault.point not in RARE:
            left[fault.kind] -= 1
            found.append(fault)
    return found
