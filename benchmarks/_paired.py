"""Statistics of the live benches: pairs, intervals and tests that a noisy machine does not fool.

A machine that is slow for a while meets both sides of a pair, so only the ratio within a pair is looked at, and of the
ratios the median: one pair that something else disturbed moves it by one rank. Nothing here assumes a distribution.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
DRAWS = 4000
EXACT = 12  # so many pairs or fewer: every assignment of signs is tried, else `DRAWS` random ones


def compare(subject: Sequence[float], baseline: Sequence[float], target: float) -> dict[str, Any]:
    """Median relative overhead over pairs (0.01: 1% more), with two intervals for the true median.

    `low` and `high` hold it with `confidence` (>= 0.95 from six pairs on; order statistics of the sign test);
    `bootstrap` is the 95% percentile interval of resampled medians. `within_target` judges the median alone,
    `surely_within` the interval's upper end.
    """
    relative = sorted(s / b - 1 for s, b in zip(subject, baseline, strict=True))
    rank, confidence = sign_test_rank(len(relative))
    median = statistics.median(relative)
    low, high = relative[rank - 1], relative[-rank]
    return {
        "median": median,
        "low": low,
        "high": high,
        "confidence": confidence,
        "bootstrap": bootstrap(relative, statistics.median),
        "pairs": len(relative),
        "target": target,
        "within_target": median <= target,
        "surely_within": high <= target,
    }


def sign_test_rank(count: int) -> tuple[int, float]:
    """(k, confidence): ranks k and count+1-k enclose the median with at least 95%, where so few samples can say that.

    They do unless fewer than k of `count` fair coins show one side.
    """
    rank, confidence = 1, 1 - 2 * 0.5**count
    for k in range(2, count // 2 + 1):
        inside = 1 - 2 * sum(math.comb(count, i) for i in range(k)) / 2**count
        if inside < 0.95:
            break
        rank, confidence = k, inside
    return rank, confidence


def bootstrap(samples: Sequence[T], statistic: Callable[[Sequence[T]], float], *, seed: int = 0) -> tuple[float, float]:
    """The 95% percentile interval of a statistic (Efron 1979), from `DRAWS` resamples; the same for equal samples."""
    rng = random.Random(f"bootstrap {seed}")
    found = sorted(statistic(rng.choices(samples, k=len(samples))) for _ in range(DRAWS))
    return found[round(0.025 * (DRAWS - 1))], found[round(0.975 * (DRAWS - 1))]


def paired_p(differences: Sequence[float], *, seed: int = 0) -> float:
    """Two-sided p of the sign-flip permutation test: is the mean of paired differences zero? 1.0 if all are zero."""
    observed = abs(sum(differences))
    if not any(differences):
        return 1.0
    size = len(differences)
    if size <= EXACT:
        flips = [
            abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
            for signs in itertools.product((1, -1), repeat=size)
        ]
        return sum(each >= observed * (1 - 1e-12) for each in flips) / len(flips)
    rng = random.Random(f"signs {seed}")
    extreme = sum(
        abs(sum(d if rng.random() < 0.5 else -d for d in differences)) >= observed * (1 - 1e-12) for _ in range(DRAWS)
    )
    return (extreme + 1) / (DRAWS + 1)


def unpaired_p(one: Sequence[float], other: Sequence[float], *, seed: int = 0) -> float:
    """Two-sided p of the permutation test: do two groups have the same mean?"""
    observed = abs(statistics.fmean(one) - statistics.fmean(other))
    together = [*one, *other]
    if min(together) == max(together):
        return 1.0
    rng = random.Random(f"groups {seed}")
    extreme = 0
    for _ in range(DRAWS):
        rng.shuffle(together)
        apart = abs(statistics.fmean(together[: len(one)]) - statistics.fmean(together[len(one) :]))
        extreme += apart >= observed * (1 - 1e-12)
    return (extreme + 1) / (DRAWS + 1)


def series(values: Sequence[float]) -> dict[str, Any]:
    """Median and samples, in the form of every bench."""
    return {"median_s": statistics.median(values), "samples_s": list(values)}
