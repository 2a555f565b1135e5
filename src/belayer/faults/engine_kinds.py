"""The faults of the engine campaign: which kinds there are, how often each comes, and when.

A kind is `TARGET.SIGNAL`, two of them joined by `+` (a double fault), or `update.FAILPOINT.TARGET`: that process is
killed when a weights update comes to that failpoint. A stopped shadow or owner is hardly noticed until it is needed, so
some kinds kill the worker next.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

UPDATE_POINTS = ("begin", "after_shard", "before_commit", "after_commit", "between_switches", "switched")
UPDATE_TARGETS = ("worker", "shadow", "owner")

# shares of a thousand; the nursery's death costs a whole import, and is therefore rare
WEIGHTS = {
    "worker.sigkill": 110,
    "worker.sigsegv": 90,
    "worker.sigabrt": 80,
    "worker.sigbus": 80,
    "worker.sigstop": 80,
    "shadow.sigkill": 50,
    "shadow.sigsegv": 40,
    "shadow.sigabrt": 30,
    "shadow.sigbus": 30,
    "shadow.sigstop+worker.sigkill": 25,
    "owner.sigkill": 55,
    "owner.sigstop": 5,
    "owner.sigstop+worker.sigkill": 25,
    "nursery.sigkill": 20,
    "worker.sigkill+promoted.sigkill": 70,
    "worker.sigkill+owner.sigkill": 40,
    "worker.sigkill+shadow.sigkill": 44,
    **{f"update.{point}.{target}": 7 for point in UPDATE_POINTS for target in UPDATE_TARGETS},
}


class EngineFault(msgspec.Struct, frozen=True):
    """One fault of the plan.

    `protected`: it waits for a shadow first; else it strikes as soon as a worker serves. `delay_s` passes before it
    strikes, and `second_s` between the halves of a double fault. `skip`: passages of the failpoint before it fires.
    """

    index: int
    kind: str
    protected: bool
    delay_s: float
    second_s: float
    skip: int


def stream(seed: int) -> Iterator[EngineFault]:
    """The faults of a campaign, without end; the same for the same seed. Rare kinds come early once each.

    The first round holds every kind once, in random order, so that a short campaign has seen them all.
    """
    rng = random.Random(f"engine faults {seed}")
    first = list(WEIGHTS)
    rng.shuffle(first)
    index = 0
    while True:
        kind = first[index] if index < len(first) else rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        yield EngineFault(
            index=index,
            kind=kind,
            protected=needs_shadow(kind) or rng.random() < 0.75,
            delay_s=rng.uniform(0.0, 0.4),
            second_s=rng.choice((0.0, rng.uniform(0.0, 0.05))),
            skip=rng.randrange(12) if ".after_shard." in kind else 0,
        )
        index += 1


def needs_shadow(kind: str) -> bool:
    """Whether a fault of this kind has no target, or another meaning, while no shadow is ready."""
    return "shadow" in kind or "promoted" in kind
