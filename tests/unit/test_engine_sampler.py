"""The counter-based sampler: what it draws depends on (logits, seed, position) only, and is the right distribution."""

from __future__ import annotations

import importlib.util

import msgspec
import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from belayer.engine import Sampling, _sampler_on_device
from belayer.engine._noise import bits, gumbel
from belayer.engine._penalties import Penalties
from belayer.engine.sampler import candidates, choose, choose_plainly, likeliest, logprobs_of

pytestmark = pytest.mark.unit


def logits_of(rows: int, vocabulary: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn((rows, vocabulary), generator=torch.Generator().manual_seed(seed)) * scale


KINDS = (
    Sampling(max_tokens=1, seed=5),
    Sampling(max_tokens=1, seed=6, temperature=0.6, top_p=0.8),
    Sampling(max_tokens=1, seed=5, top_k=3, min_p=0.05),
    Sampling(max_tokens=1, seed=7, repetition_penalty=1.3),
    Sampling(max_tokens=1, temperature=0.0, presence_penalty=1.5),
    Sampling(max_tokens=1, seed=5, temperature=1.7, frequency_penalty=-0.4, min_p=0.01),
)


def held_back(kind: Sampling, number: int, until: int, vocabulary: int) -> Sampling:
    """`kind` with stop tokens that must not be drawn before position `until`; the last of the vocabulary is none."""
    ends = tuple(token for token in (number % 2, 1 + 7 * number, 1 << 30) if token != vocabulary - 1)
    return msgspec.structs.replace(kind, min_tokens=until, stop_token_ids=ends)


def penalties_of(rows: list[int], vocabulary: int) -> dict[int, Penalties]:
    found = {}
    for row in rows:
        if row % 6 >= 3:
            found[row] = Penalties(KINDS[row % 6], [row % vocabulary, 1])
            found[row].extend(token % vocabulary for token in (0, 3, 0, row, 17))
    return found


@settings(max_examples=50, deadline=None)
@given(order=st.permutations(range(6)), alone=st.integers(0, 5), vocabulary=st.integers(2, 257))
def test_company_and_order_do_not_matter(order: list[int], alone: int, vocabulary: int) -> None:
    logits = logits_of(6, vocabulary)
    rows = [(row, KINDS[row], 10 + row) for row in range(6)]
    penalties = penalties_of(list(range(6)), vocabulary)
    together = choose(logits, rows, penalties)
    assert choose(logits, [rows[row] for row in order], penalties) == [together[row] for row in order]
    mine = {0: penalties[alone]} if alone in penalties else {}
    assert choose(logits[alone : alone + 1], [(0, *rows[alone][1:])], mine) == [together[alone]]


@settings(max_examples=100, deadline=None)
@given(
    vocabulary=st.sampled_from([2, 63, 1000, 4097, 20_000]),
    scale=st.sampled_from([0.0, 0.3, 3.0, 30.0]),
    temperature=st.sampled_from([0.01, 0.7, 1.0, 5.0]),
    seed=st.integers(0, (1 << 64) - 1),
    position=st.integers(0, 100_000),
    hidden=st.booleans(),
    early=st.booleans(),
)
def test_the_quick_way_finds_the_same_winner(
    vocabulary: int, scale: float, temperature: float, seed: int, position: int, hidden: bool, early: bool
) -> None:
    """`choose` skips nearly every token; `choose_plainly` skips none."""
    logits = logits_of(6, vocabulary, seed % 1000, scale)
    if hidden:  # some of the vocabulary is masked
        logits[:, :: 1 + vocabulary // 7] = -torch.inf
        logits[:, -1] = 0.0
    rows = []
    for row, kind in enumerate(KINDS):
        changed = {"seed": seed, "temperature": temperature if kind.temperature else 0.0}
        values = {name: getattr(kind, name) for name in kind.__struct_fields__}
        own = Sampling(**values | changed)
        rows.append((row, held_back(own, row, position + 3, vocabulary) if early else own, position + row))
    penalties = penalties_of(list(range(6)), vocabulary)
    assert choose(logits, rows, penalties) == [choose_plainly(logits, row, penalties.get(row[0])) for row in rows]


@settings(max_examples=40, deadline=None)
@given(
    vocabulary=st.sampled_from([2, 9, 1000, 4097]),
    keys=st.lists(st.tuples(st.integers(0, (1 << 64) - 1), st.integers(0, 1 << 40)), min_size=1, max_size=4),
    scale=st.sampled_from([0.3, 3.0, 30.0]),
)
def test_an_accelerator_decides_the_same(vocabulary: int, keys: list[tuple[int, int]], scale: float) -> None:
    """Its way of working, on this processor."""
    ours = bits(keys, vocabulary)
    assert (_sampler_on_device.bits(keys, vocabulary, torch.device("cpu")).numpy() == ours).all()
    logits = logits_of(6, vocabulary, keys[0][0] % 1000, scale)
    penalties = penalties_of(list(range(6)), vocabulary)
    for _seed, position in keys:
        rows = [(row, KINDS[row], position + row) for row in range(6)]
        rows += [(row, held_back(kind, row, position + 3, vocabulary), at) for row, kind, at in rows]
        assert _sampler_on_device.choose(logits, rows, penalties) == choose(logits, rows, penalties)


@pytest.mark.parametrize("kind", KINDS)
def test_what_would_end_a_completion_too_early_is_not_drawn(kind: Sampling) -> None:
    logits, free = logits_of(1, 50), msgspec.structs.replace(kind, stop_token_ids=())
    penalties = {0: Penalties(kind, [1])}
    for position in range(40):
        (wanted,) = choose(logits, [(0, free, position)], penalties)
        stopping = msgspec.structs.replace(kind, min_tokens=20, stop_token_ids=(wanted, 50, 10**6))
        (found,) = choose(logits, [(0, stopping, position)], penalties)
        if position >= 20:
            assert found == wanted
            continue
        without = logits.clone()
        without[0, wanted] = -torch.inf
        assert found != wanted and [found] == choose(without, [(0, free, position)], penalties)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_an_accelerator() -> None:
    logits = logits_of(6, 4097)
    penalties = penalties_of(list(range(6)), 4097)
    for position in range(200):
        rows = [(row, KINDS[row], position) for row in range(6)]
        assert choose(logits.cuda(), rows, penalties) == choose(logits, rows, penalties)


def test_logits_that_are_not_numbers_stop_nobody_else() -> None:
    logits = logits_of(3, 500)
    undisturbed = choose(logits, [(0, KINDS[0], 1), (2, KINDS[2], 1)])
    logits[1, 77] = torch.nan
    for number, kind in enumerate(KINDS):
        penalties = {1: Penalties(kind, [5])} if number >= 3 else {}
        assert choose(logits, [(1, kind, 1)], penalties) == [77]
        assert _sampler_on_device.choose(logits, [(1, kind, 1)], penalties) == [77]
        assert 0 <= choose(torch.full((2, 500), torch.nan), [(1, kind, 1)], penalties)[0] < 500
    found = choose(logits, [(0, KINDS[0], 1), (1, KINDS[0], 1), (2, KINDS[2], 1)])
    assert [found[0], found[2]] == undisturbed
    assert found[1] == likeliest(logits)[1] == 77
    logprobs = logprobs_of(logits, np.array(found))
    assert np.isnan(logprobs).tolist() == [False, True, False]  # by this the driver knows


@pytest.mark.parametrize("vocabulary", [2, 1000, 50_001])
def test_logprobs(vocabulary: int) -> None:
    for scale in (0.1, 4.0, 100.0):
        logits = logits_of(9, vocabulary, scale=scale)
        logits[2, 0] = -torch.inf
        tokens = np.array([row * 7 % (vocabulary - 1) + 1 for row in range(9)])
        found = logprobs_of(logits, tokens)
        expected = torch.log_softmax(logits.double(), dim=1)[torch.arange(9), torch.from_numpy(tokens)]
        assert found == pytest.approx(expected.numpy(), rel=1e-5, abs=1e-5)
        # to the bit, whatever is beside it
        assert [
            float(logprobs_of(logits[row : row + 1], tokens[row : row + 1])[0]) for row in range(9)
        ] == found.tolist()


def test_noise_differs_between_positions_and_seeds_and_nowhere_else() -> None:
    one = bits([(1, 0)], 1000)
    assert (one == bits([(9, 9), (1, 0)], 1000)[1:]).all()
    assert (one[:, :999] == bits([(1, 0)], 999)).all()
    others = bits([(1, 1), (2, 0), (0, 1), ((1 << 64) - 1, 0)], 1000)
    assert all((one != other).mean() > 0.99 for other in others)


def test_noise_is_that_of_journalled_runs() -> None:
    """Fixed values: another noise function would let journalled completions go on with other tokens."""
    assert bits([(0, 0), (123456789, 40), ((1 << 64) - 1, 1)], 3).tolist() == FIXED_BITS
    ends = gumbel(np.array([0, 1 << 31, (1 << 32) - 1], dtype=np.uint32))
    assert ends == pytest.approx([22.8739, 0.3665, -3.1300], abs=1e-3)


FIXED_BITS = [
    [149215387, 49592932, 2628306354],
    [1358054873, 913388035, 381478898],
    [3157807207, 2988722424, 1511687326],
]


def test_it_samples_the_softmax() -> None:
    """Chi-square over 5,000 positions: the same stream of noise that completions use."""
    logits = logits_of(1, 12)
    for temperature in (0.5, 1.0, 2.0):
        sampling = Sampling(max_tokens=1, seed=3, temperature=temperature)
        draws = choose(logits.expand(5_000, -1), [(i, sampling, i) for i in range(5_000)])
        assert chi2(draws, torch.softmax(logits[0].double() / temperature, 0).numpy()) < 33  # 11 degrees of freedom


def test_it_samples_the_softmax_of_a_large_vocabulary() -> None:
    """Where nearly every token is skipped: 40,000 tokens, counted in 24 classes of equal probability."""
    logits = logits_of(1, 40_000, scale=2.0)
    probabilities = torch.softmax(logits[0].double(), 0).numpy()
    shuffled = np.random.default_rng(0).permutation(40_000)
    classes = np.empty(40_000, dtype=np.int64)
    classes[shuffled] = np.minimum(np.cumsum(probabilities[shuffled]) * 24, 23).astype(np.int64)
    for sampling in (Sampling(max_tokens=1, seed=1), Sampling(max_tokens=1, seed=2, top_p=0.9, min_p=1e-5)):
        kept = np.zeros(40_000)
        kept[candidates(logits[0].numpy(), sampling)] = 1
        draws = np.array(choose(logits.expand(2_400, -1), [(i, sampling, i) for i in range(2_400)]))
        expected = np.bincount(classes, kept * probabilities, 24) / (kept * probabilities).sum()
        assert chi2(classes[draws], expected) < 52  # 23 degrees of freedom


def chi2(draws: object, probabilities: np.ndarray) -> float:
    """By chance, the limits that the tests set are exceeded once in 2,000."""
    counts = np.bincount(np.asarray(draws), minlength=len(probabilities))
    expected = probabilities * counts.sum()
    common = expected > 5
    return float((((counts[common] - expected[common]) ** 2) / expected[common]).sum())


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


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(st.integers(-400, 400), min_size=2, max_size=300, unique=True),
    top_k=st.integers(0, 31),
    top_p=st.sampled_from([0.05, 0.31, 0.77, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.003, 0.13, 0.51, 1.0]),
)
def test_filters(logits: list[int], top_k: int, top_p: float, min_p: float) -> None:
    values = [0.0123 * value for value in logits]
    sampling = Sampling(max_tokens=1, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = candidates(np.array(values), sampling).tolist()
    assert set(kept) == naive(values, sampling)
    assert kept == sorted(kept) and kept


def test_filters_work_on_scaled_logits() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    assert candidates(logits, Sampling(max_tokens=1, top_p=0.75)).tolist() == [0, 1]
    assert candidates(logits, Sampling(max_tokens=1, top_p=0.75, temperature=3.0)).tolist() == [0, 1, 2]
    assert candidates(logits, Sampling(max_tokens=1, min_p=0.5, temperature=1.0)).tolist() == [0, 1]
    assert candidates(logits, Sampling(max_tokens=1, min_p=0.5, temperature=3.0)).tolist() == [0, 1, 2]


def test_ties_of_top_p_go_to_the_smaller_token() -> None:
    assert candidates(np.zeros(4), Sampling(max_tokens=1, top_p=0.5)).tolist() == [0, 1]


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 39), max_size=30),
    output=st.lists(st.integers(0, 39), max_size=120),
    cut=st.integers(0, 120),
    repetition=st.sampled_from([1.0, 0.8, 1.5]),
    presence=st.sampled_from([0.0, -0.3, 1.1]),
    frequency=st.sampled_from([0.0, 0.25, -0.1]),
)
def test_penalties(
    prompt: list[int], output: list[int], cut: int, repetition: float, presence: float, frequency: float
) -> None:
    """Against the definition, written out; however the tokens arrive."""
    sampling = Sampling(
        max_tokens=1, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency
    )
    logits = logits_of(1, 40)[0].double().numpy()
    expected = logits.copy()
    for token in range(40):
        if token in prompt or token in output:
            expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
        expected[token] -= frequency * output.count(token)
        expected[token] -= presence * (token in output)
    penalties = Penalties(sampling, prompt)
    penalties.extend(output[:cut])
    penalties.extend(output[cut:])
    penalties.apply(logits)
    assert logits == pytest.approx(expected, abs=1e-12)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM to compare with")
def test_penalties_are_those_of_vllm() -> None:
    from vllm.model_executor.layers.utils import apply_penalties

    logits = logits_of(1, 40)
    prompt, output = [3, 4, 4, 5], [5, 6, 6, 6, 7]
    sampling = Sampling(max_tokens=1, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.2)
    penalties = Penalties(sampling, prompt)
    penalties.extend(output)
    ours = logits[0].double().numpy()
    penalties.apply(ours)
    as_tensors = [torch.tensor([value]) for value in (0.7, 0.2, 1.3)]
    theirs = apply_penalties(logits.clone(), torch.tensor([prompt]), torch.tensor([output]), *as_tensors)
    assert ours == pytest.approx(theirs[0].numpy(), abs=1e-5)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [0, -1, 1.5, True]),
        ("min_tokens", [-1, 5, 1.0, True, "1"]),
        ("seed", [-1, 1 << 64, 0.5]),
        ("temperature", [-0.1, float("nan"), float("inf"), "1", None, 1 << 64, 10**400]),
        ("top_k", [-1, 2.0]),
        ("top_p", [0.0, 1.1, float("nan")]),
        ("min_p", [-0.1, 1.1]),
        ("repetition_penalty", [0.0, -1.0, float("inf"), float("nan"), 10**400]),
        ("presence_penalty", [-2.1, 2.1, float("nan")]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("stop_token_ids", [(-1,), ("a",), 5]),
        ("stop", [("",), (5,), "text"]),
        ("n", [0, 2]),
        ("structured", [{"json": {}}, "regex"]),
        ("top_logprobs", [-1, 5]),
    ],
)
def test_what_cannot_be_honoured_is_named(field: str, values: list[object]) -> None:
    for value in values:
        arguments: dict[str, object] = {"max_tokens": 4, field: value}
        problem = Sampling(**arguments).problem()  # pyright: ignore[reportArgumentType]
        assert problem is not None and field.split("_")[-1].removesuffix("d") in problem


def test_what_can_be_honoured_has_no_problem() -> None:
    everything = Sampling(
        max_tokens=1,
        seed=(1 << 64) - 1,
        temperature=0,
        top_k=5,
        top_p=1,
        min_p=1,
        repetition_penalty=2,
        presence_penalty=-2,
        frequency_penalty=2.0,
        stop_token_ids=(0,),
        stop=("a", "b"),
    )
    assert everything.problem() is None and Sampling(max_tokens=1).problem() is None
