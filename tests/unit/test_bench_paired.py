"""Statistics of the live benches: intervals that hold what they say, tests that see what is there and nothing else."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from benchmarks._paired import bootstrap, compare, paired_p, sign_test_rank, unpaired_p

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("count", [6, 10, 20, 37])
def test_the_ranks_hold_the_median_often_enough(count: int) -> None:
    rank, confidence = sign_test_rank(count)
    missed = 2 * sum(math.comb(count, i) for i in range(rank)) / 2**count
    assert confidence == pytest.approx(1 - missed) and confidence >= 0.95
    narrower = 2 * sum(math.comb(count, i) for i in range(rank + 1)) / 2**count
    assert 1 - narrower < 0.95, "a narrower interval would do"


def test_few_pairs_say_that_they_are_few() -> None:
    assert sign_test_rank(3) == (1, 0.75)
    assert compare([1.0], [2.0], 0.01)["confidence"] == 0.0


def test_compare_is_robust_against_a_pair_that_something_disturbed() -> None:
    subject = [1.005] * 9 + [40.0]
    found = compare(subject, [1.0] * 10, 0.01)
    assert found["median"] == pytest.approx(0.005) and found["within_target"] and found["surely_within"]
    assert found["bootstrap"][1] < 0.01


def test_the_median_may_meet_a_target_that_the_interval_does_not_prove() -> None:
    found = compare([0.9, 0.95, 1.0, 1.0, 1.0, 1.0, 1.05, 1.1, 1.1, 1.2], [1.0] * 10, 0.01)
    assert found["within_target"] and not found["surely_within"]


def test_bootstrap_covers_the_mean_and_is_the_same_again() -> None:
    rng = random.Random(4)
    samples = [rng.gauss(3.0, 1.0) for _ in range(60)]
    low, high = bootstrap(samples, statistics.fmean)
    assert low < statistics.fmean(samples) < high
    # about 2 x 1.96 / sqrt(60)
    assert high - low == pytest.approx(2 * 1.96 * statistics.pstdev(samples) / math.sqrt(60), rel=0.15)
    assert bootstrap(samples, statistics.fmean) == (low, high)


def test_sign_flips_are_exact_for_few_pairs() -> None:
    differences = [1.0, 2.0, 3.0, 4.0, 5.0]
    # only all plus and all minus are as far out
    assert paired_p(differences) == 2 / 32
    assert paired_p([0.0] * 30) == 1.0
    assert paired_p([1.0, -1.0] * 4) == 1.0
    brute = [
        abs(sum(s * d for s, d in zip(signs, [1, -2, 4], strict=True)))
        for signs in itertools.product((1, -1), repeat=3)
    ]
    assert paired_p([1.0, -2.0, 4.0]) == sum(each >= 3 for each in brute) / 8


def test_permutation_tests_see_a_difference_and_no_other() -> None:
    rng = random.Random(1)
    one = [rng.gauss(0.0, 1.0) for _ in range(80)]
    other = [rng.gauss(1.0, 1.0) for _ in range(80)]
    assert unpaired_p(one, other) < 0.01 and paired_p([b - a for a, b in zip(one, other, strict=True)]) < 0.01
    assert unpaired_p(one[:40], one[40:]) > 0.05
    assert unpaired_p([2.0] * 5, [2.0] * 3) == 1.0
