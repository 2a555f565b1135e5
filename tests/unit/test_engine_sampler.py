"""The counter-based sampler: what it draws depends on (logits, seed, position) only, and is the right distribution."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from belayer.engine import Sampling
from belayer.engine.sampler import choose, filtered, noise

pytestmark = pytest.mark.unit


def logits_of(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, vocabulary), generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=50, deadline=None)
@given(order=st.permutations(range(6)), alone=st.integers(0, 5), vocabulary=st.integers(2, 257))
def test_company_and_order_do_not_matter(order: list[int], alone: int, vocabulary: int) -> None:
    logits = logits_of(6, vocabulary)
    kinds = (
        Sampling(max_tokens=1, seed=5),
        Sampling(max_tokens=1, seed=6, temperature=0.6, top_p=0.8),
        Sampling(max_tokens=1, seed=5, top_k=3, min_p=0.05),
    )
    rows = [(row, kinds[row % 3], 10 + row) for row in range(6)]
    together = choose(logits, rows)
    assert choose(logits, [rows[row] for row in order]) == [together[row] for row in order]
    assert choose(logits[alone : alone + 1], [(0, *rows[alone][1:])]) == [together[alone]]


def test_noise_differs_between_positions_and_seeds_and_nowhere_else() -> None:
    one = noise([(1, 0)], 1000)
    assert torch.equal(one, noise([(9, 9), (1, 0)], 1000)[1:])
    assert torch.equal(one[:, :999], noise([(1, 0)], 999))
    others = noise([(1, 1), (2, 0), (0, 1), ((1 << 64) - 1, 0)], 1000)
    assert all((one != other).float().mean() > 0.99 for other in others)
    assert torch.isfinite(others).all()


def test_it_samples_the_softmax() -> None:
    """Chi-square over 5,000 positions: the same stream of noise that completions use."""
    logits = logits_of(1, 12)
    for temperature in (0.5, 1.0, 2.0):
        sampling = Sampling(max_tokens=1, seed=3, temperature=temperature)
        draws = choose(logits.expand(5_000, -1), [(i, sampling, i) for i in range(5_000)])
        expected = torch.softmax(logits[0].double() / temperature, 0).numpy() * 5_000
        common = expected > 5
        counts = np.bincount(draws, minlength=12)[common]
        chi2 = (((counts - expected[common]) ** 2) / expected[common]).sum()
        assert chi2 < 33  # 11 degrees of freedom: exceeded by chance once in 2,000


def naive(logits: list[float], sampling: Sampling) -> set[int]:
    """What is left, by the words of the documentation."""
    weights = np.exp(np.array(logits) - max(logits))
    left = {i for i, w in enumerate(weights) if w >= sampling.min_p * weights.max()}
    if sampling.top_k:
        left = set(sorted(left, key=lambda i: -logits[i])[: sampling.top_k])
    total, kept, collected = sum(weights[i] for i in left), set(), 0.0
    for i in sorted(left, key=lambda i: -logits[i]):
        if collected < sampling.top_p * total:
            kept.add(i)
        collected += weights[i]
    return kept


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.integers(-400, 400), min_size=2, max_size=30, unique=True),
    top_k=st.integers(0, 31),
    top_p=st.sampled_from([0.05, 0.31, 0.77, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.003, 0.13, 0.51, 1.0]),
)
def test_filters(logits: list[int], top_k: int, top_p: float, min_p: float) -> None:
    values = [0.0123 * value for value in logits]
    sampling = Sampling(max_tokens=1, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = torch.isfinite(filtered(torch.tensor(values, dtype=torch.float64), sampling)).nonzero().flatten().tolist()
    assert set(kept) == naive(values, sampling)
    assert kept


def test_ties_of_top_p_go_to_the_smaller_token() -> None:
    sampling = Sampling(max_tokens=1, top_p=0.5)
    kept = torch.isfinite(filtered(torch.zeros(4, dtype=torch.float64), sampling))
    assert kept.tolist() == [True, True, False, False]
