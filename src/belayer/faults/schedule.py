"""A seeded plan of faults, spread over a run by its progress.

Moments are given as progress (share of all rollouts finished) plus a delay, not as clock time: the same seed then hits
the same part of the work on a fast and on a slow machine.
"""

from __future__ import annotations

import random

import msgspec

from belayer.config import FaultsConfig

KINDS = {
    "worker.sigkill": "worker_kill",
    "worker.sigstop": "worker_stop",
    "sandbox.kill": "sandbox_kill",
    "sandbox.damage": "sandbox_damage",
}


class Fault(msgspec.Struct, frozen=True, order=True):
    """`kind` strikes `delay_s` seconds after the run has reached `progress` (0 to 1)."""

    progress: float
    delay_s: float
    kind: str


def plan(config: FaultsConfig, seed: int) -> list[Fault]:
    """All faults of a run, by progress.

    Worker faults are spread evenly with jitter, so that each meets a standby engine unless the run is very short; the
    others strike anywhere. Nothing strikes in the last tenth, so that every fault's recovery is seen.
    """
    rng = random.Random(f"faults {seed}")
    faults = []
    workers = [kind for kind in ("worker.sigkill", "worker.sigstop") for _ in range(getattr(config, KINDS[kind]))]
    rng.shuffle(workers)
    for index, kind in enumerate(workers):
        share = (index + rng.uniform(0.2, 0.8)) / len(workers)
        faults.append(Fault(0.02 + 0.88 * share, rng.uniform(0.0, 0.5), kind))
    for kind in ("sandbox.kill", "sandbox.damage"):
        for _ in range(getattr(config, KINDS[kind])):
            faults.append(Fault(rng.uniform(0.02, 0.9), rng.uniform(0.0, 0.5), kind))
    return sorted(faults)
