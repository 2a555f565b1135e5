"""The figures of the failure-free overhead: what is computed from the samples, and that the loads name known models."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

from benchmarks._engine_overhead import LOADS, TARGET
from benchmarks._paired import compare
from benchmarks.worker import workloads

pytestmark = pytest.mark.unit


def test_the_interval_is_that_of_the_sign_test() -> None:
    baseline = [1.0] * 10
    subject = [1.0 + 0.01 * number for number in (3, 1, 4, 0, 5, 9, 2, 6, 8, 7)]
    found = compare(subject, baseline, TARGET)
    assert found["median"] == pytest.approx(0.045)
    # of ten fair coins at most one shows heads with probability 11/1024: ranks 2 and 9
    assert (found["low"], found["high"]) == pytest.approx((0.01, 0.08))
    assert found["confidence"] == pytest.approx(1 - 22 / 1024)
    assert found["pairs"] == 10 and not found["within_target"]
    assert compare([1.0 + TARGET / 2] * 10, baseline, TARGET)["within_target"]


def test_pairs_are_compared_with_each_other() -> None:
    """A machine that is twice as slow for a while meets both sides."""
    slow = [1.0, 2.0, 4.0, 1.0, 2.0, 4.0]
    found = compare([1.02 * each for each in slow], slow, TARGET)
    assert found["low"] == pytest.approx(0.02) == found["high"]


def test_loads() -> None:
    models = workloads().models
    for quick, loads in LOADS.items():
        assert all(load.model in models and load.requests <= models[load.model].max_num_seqs for load in loads)
        assert all(load.pairs >= 10 for load in loads)
        if not quick:
            assert {load.model for load in loads} == {"tiny", "mid"}
