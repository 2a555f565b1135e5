"""One suite for every inference engine behind `belayer.engine.backends.Backend`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from tests.contract.backend_kit import BackendHost, outcomes, requests, spec_of
from tests.contract.reference_model import logits
from tests.engine_kit import VOCABULARY, make_model, random_weights

from belayer.config import EngineConfig
from belayer.engine import memory
from belayer.engine._penalties import Penalties, penalised
from belayer.engine._wire import Work
from belayer.engine.request import Sampling
from belayer.engine.sampler import choose
from belayer.ownership import RunLabel

pytestmark = pytest.mark.contract

LENGTH = 20
SEQUENCES = 4
MAX_MODEL_LEN = 448

Run = dict[str, tuple[list[int], list[float], str | None]]


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same architecture with two sets of weights."""
    return [make_model(tmp_path_factory.mktemp("model") / f"weights-{seed}", seed=seed) for seed in range(2)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("vllm", "cpu"), marks=needs("vllm"), id="vllm"),
        pytest.param(("transformers", "cpu"), marks=needs("transformers"), id="transformers"),
        pytest.param(("transformers", "cuda"), marks=[needs("transformers"), pytest.mark.gpu], id="transformers-cuda"),
    ],
)
def host(request: pytest.FixtureRequest, folders: list[Path]) -> Iterator[BackendHost]:
    backend, device = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("this torch sees no CUDA device")
    if (reason := memory.unavailable(device)) is not None:
        pytest.skip(f"no memory of {device} here: {reason}")
    config = EngineConfig(
        backend=backend,
        device=device,
        model=folders[0],
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=SEQUENCES,
        kv_bytes=2 << 20,  # 2048 tokens: SEQUENCES long requests do not fit all at once
    )
    with RunLabel.new("test backends") as label:
        host = BackendHost(spec_of(config), label)
        try:
            yield host
        finally:
            host.close()


def test_no_file_of_the_ranks_outlives_the_start(host: BackendHost) -> None:
    """vLLM leaves one in the folder for temporary files. Half-way it is where the reaper of the run finds it."""
    half_way, now = host.ask("files")
    assert now == []
    if host.spec.backend == "vllm":
        (name,) = half_way
        assert name.startswith("rendezvous-")


@pytest.fixture(scope="module")
def work() -> list[Work]:
    return requests(5, LENGTH, VOCABULARY)


@pytest.fixture(scope="module")
def whole(host: BackendHost, work: list[Work]) -> Run:
    """The completions as they are when nothing happens, before any warm-up."""
    return plain(host, work)


def plain(host: BackendHost, work: list[Work], forget_after: int = 0) -> Run:
    result = outcomes(work, host.ask("complete", work, forget_after))
    return {key: (one.tokens, one.logprobs, one.reason) for key, one in result.items()}


def reference(folder: Path, work: Work, tokens: list[int]) -> torch.Tensor:
    """Logits of the positions of the completion `tokens`."""
    return logits(folder, work.prompt_ids + tokens)[len(work.prompt_ids) - 1 : -1]


def check_against_reference(folder: Path, work: Work, tokens: list[int], logprobs: list[float]) -> None:
    """Logprobs are the model's, and every token is the one that the counter-based sampler draws from its logits."""
    expected = reference(folder, work, tokens)
    said = torch.log_softmax(expected, dim=-1)
    for position, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        assert logprob == pytest.approx(float(said[position, token]), abs=2e-4)
        penalties = {}
        if penalised(work.sampling):
            penalties[position] = Penalties(work.sampling, work.prompt_ids)
            penalties[position].extend(tokens[:position])
        assert choose(expected, [(position, work.sampling, position)], penalties) == [token], (work.id, position)


def resumed(work: Work, done: list[int]) -> Work:
    return Work(work.id, work.prompt_ids, done, work.sampling)


def test_importing_starts_no_thread(host: BackendHost) -> None:
    """Workers are forked after it, and a lock that a thread held would stay locked in them."""
    assert host.threads_after_preload == 1


def test_a_completion_has_its_tokens_and_its_logprobs(host: BackendHost, work: list[Work], whole: Run) -> None:
    for item in work:
        tokens, logprobs, reason = whole[item.id]
        assert len(tokens) == len(logprobs) == LENGTH and reason == "length"
        assert all(0 <= token < VOCABULARY for token in tokens) and all(value <= 0 for value in logprobs)
    assert host.ask("state") == (False, False)


def test_logprobs_are_the_model_s_and_tokens_the_counter_based_sampler_s(
    folders: list[Path], work: list[Work], whole: Run
) -> None:
    """Against another implementation of the model: temperature, filters and penalties move tokens, never logprobs."""
    for item in work:
        check_against_reference(folders[0], item, *whole[item.id][:2])


def test_warming_up_leaves_no_trace(host: BackendHost, work: list[Work], whole: Run) -> None:
    host.ask("warm_up")
    assert host.ask("state") == (False, False)
    assert plain(host, work) == whole


def test_resumed_anywhere_it_is_the_same_completion(host: BackendHost, work: list[Work], whole: Run) -> None:
    """Every position, to the last bit of the logprobs; what was decoded is now prefilled, and beside other requests."""
    for position in range(1, LENGTH):
        if position % 2:
            host.ask("forget_prefixes")
        some = [item for index, item in enumerate(work) if (index + position) % 3 or index == position % 5]
        for key, (tokens, logprobs, reason) in plain(
            host, [resumed(item, whole[item.id][0][:position]) for item in some]
        ).items():
            assert (tokens, logprobs, reason) == (whole[key][0], whole[key][1][position:], "length"), (key, position)


def test_company_does_not_matter(host: BackendHost, work: list[Work], whole: Run) -> None:
    for item in work:
        host.ask("forget_prefixes")
        assert plain(host, [item]) == {item.id: whole[item.id]}


def test_more_work_than_fits_is_done_all_the_same(host: BackendHost, work: list[Work], whole: Run) -> None:
    """More requests than are decoded together, and more tokens than the arena holds: some wait, some start again."""
    many = [
        Work(f"{item.id}-{copy}", item.prompt_ids, [], item.sampling) for copy in range(4) for item in reversed(work)
    ]
    result = plain(host, many)
    assert {key: value for key, value in result.items() if value != whole[key.split("-")[0]]} == {}


def test_prefixes_can_be_forgotten_at_any_time(host: BackendHost, work: list[Work], whole: Run) -> None:
    for steps in (1, 2, 9):
        assert plain(host, work, steps) == whole


def test_the_cache_lies_in_the_arena_and_nothing_left_there_is_read(
    host: BackendHost, work: list[Work], whole: Run
) -> None:
    # 255s are NaN throughout: no number at all may come from there. vLLM's kernel multiplies what is left in a block
    # that is not full by zero, so it needs an arena of numbers; it gets zeros
    for fill in (0, 255 if host.spec.backend == "transformers" else 63):
        host.ask("use_new_arena", fill)
        assert host.ask("arena_bytes_other_than", fill) == 0
        assert plain(host, work) == whole
        tokens = sum(len(item.prompt_ids) + LENGTH for item in work)
        assert host.ask("arena_bytes_other_than", fill) > tokens * 2 * 2 * 64  # layers, keys and values, bytes changed


def test_other_weights_are_used_from_the_next_token_on(
    host: BackendHost, folders: list[Path], work: list[Work], whole: Run
) -> None:
    host.ask("submit", work)
    before = host.ask("step", 12)
    host.ask("use_weights", folders[1])
    after = host.ask("complete", [])
    mixed = outcomes(work, before + after)
    for item in work:
        tokens = mixed[item.id].tokens
        old = sum(len(chunk.token_ids) for chunk in before if chunk.id == item.id)
        assert tokens[:old] == whole[item.id][0][:old]
        said = torch.log_softmax(reference(folders[1], item, tokens), dim=-1)
        for position in range(old, LENGTH):
            assert mixed[item.id].logprobs[position] == pytest.approx(float(said[position, tokens[position]]), abs=2e-4)
    host.ask("use_weights", folders[0])
    assert plain(host, work) == whole


def test_stop_tokens_end_a_completion_and_are_part_of_it(host: BackendHost, work: list[Work], whole: Run) -> None:
    stopping = []
    for item in work:
        tokens = whole[item.id][0]
        stop = next(t for index, t in enumerate(tokens) if index >= 5 and t not in tokens[:index])
        stopping.append(
            Work(item.id, item.prompt_ids, [], msgspec.structs.replace(item.sampling, stop_token_ids=(stop, 10**6)))
        )
    ended = plain(host, stopping)
    for item in stopping:
        tokens = whole[item.id][0]
        end = tokens.index(item.sampling.stop_token_ids[0]) + 1
        assert ended[item.id] == (tokens[:end], whole[item.id][1][:end], "stop")
    again = plain(host, [resumed(item, ended[item.id][0][:-1]) for item in stopping])
    assert {key: value[0] for key, value in again.items()} == {key: value[0] for key, value in ended.items()}
    assert {value[2] for value in again.values()} == {"stop"}


def test_nothing_ends_a_completion_too_early(
    host: BackendHost, folders: list[Path], work: list[Work], whole: Run
) -> None:
    """At every position of a resumption: tokens that are known already count among the first `min_tokens`."""
    least, ends = 9, tuple(range(0, VOCABULARY, 3))
    bounded = [
        Work(
            item.id, item.prompt_ids, [], msgspec.structs.replace(item.sampling, min_tokens=least, stop_token_ids=ends)
        )
        for item in work
    ]
    ended = plain(host, bounded)
    assert {reason for _, _, reason in ended.values()} >= {"stop"}
    for item in bounded:
        tokens, logprobs, _ = ended[item.id]
        assert set(whole[item.id][0][:least]) & set(ends), "it would have ended there"
        assert not set(tokens[:-1]) & set(ends) and len(tokens) > least
        check_against_reference(folders[0], item, tokens, logprobs)
    for position in range(1, LENGTH):
        if position % 2:
            host.ask("forget_prefixes")
        some = [item for item in bounded if position < len(ended[item.id][0])]
        for key, (tokens, logprobs, reason) in plain(
            host, [resumed(item, ended[item.id][0][:position]) for item in some]
        ).items():
            before, values, end = ended[key]
            assert (tokens, logprobs, reason) == (before, values[position:], end), (key, position)


def test_the_budget_counts_what_was_there_already(host: BackendHost, work: list[Work], whole: Run) -> None:
    last = plain(host, [resumed(item, whole[item.id][0][:-1]) for item in work])
    assert {key: (len(logprobs), reason) for key, (_, logprobs, reason) in last.items()} == dict.fromkeys(
        whole, (1, "length")
    )


def test_a_completion_ends_where_the_model_does(host: BackendHost) -> None:
    sampling = Sampling(max_tokens=1000, temperature=0.0)
    prompt = [(3 * i + 1) % VOCABULARY for i in range(MAX_MODEL_LEN - 7)]
    (tokens, _logprobs, reason) = plain(host, [Work("long", prompt, [], sampling)])["long"]
    assert (len(tokens), reason) == (7, "length")
    assert plain(host, [Work("long", prompt, tokens[:4], sampling)])["long"][0] == tokens


def test_aborted_requests_say_nothing_more_and_the_others_go_on(
    host: BackendHost, work: list[Work], whole: Run
) -> None:
    host.ask("abort", ["nobody"])
    for steps in (0, 1, 6):  # waiting, prefilled, decoding
        host.ask("submit", work)
        chunks = host.ask("step", steps)
        host.ask("abort", ["r1", "r3", "nobody"])
        later = host.ask("complete", [])
        assert not {chunk.id for chunk in later} & {"r1", "r3"}
        kept = [item for item in work if item.id not in ("r1", "r3")]
        mine = [chunk for chunk in chunks + later if chunk.id not in ("r1", "r3")]
        assert {k: (o.tokens, o.logprobs, o.reason) for k, o in outcomes(kept, mine).items()} == {
            item.id: whole[item.id] for item in kept
        }
    assert host.ask("state") == (False, False)
    assert plain(host, work) == whole, "an aborted request's id can be used again"


def test_a_step_says_beforehand_whether_it_prefills(host: BackendHost, work: list[Work], whole: Run) -> None:
    assert host.ask("state") == (False, False)
    host.ask("forget_prefixes")
    host.ask("submit", work[:2])
    assert host.ask("state") == (True, True)
    chunks = host.ask("step", 1)
    assert host.ask("state") == (True, False)
    host.ask("submit", [work[4]])
    assert host.ask("state") == (True, True)
    chunks += host.ask("complete", [])
    assert host.ask("state") == (False, False)
    for key, outcome in outcomes([*work[:2], work[4]], chunks).items():
        assert (outcome.tokens, outcome.logprobs, outcome.reason) == whole[key]


def test_a_prefix_that_requests_share_is_prefilled_once(host: BackendHost) -> None:
    """A recovery hands over a whole group at once: its common prompt is computed once, each member's own turn apart."""
    block = 32  # the largest unit in which one of the backends shares
    common = [(11 * j + 5) % VOCABULARY for j in range(8 * block)]
    own = [[(3 * j + 17 * i + 1) % VOCABULARY for j in range(10)] for i in range(SEQUENCES)]
    sampling = Sampling(max_tokens=12, temperature=0.0)
    group = [Work(f"member{i}", common, tokens, sampling) for i, tokens in enumerate(own)]
    alone = {}
    for work in group:
        host.ask("forget_prefixes")
        alone |= plain(host, [work])
    host.ask("forget_prefixes")
    before = host.ask("computed_tokens")
    together = plain(host, group)
    computed = host.ask("computed_tokens") - before
    assert together == alone
    decoded = sum(sampling.max_tokens - len(tokens) for tokens in own) - len(group)  # the first comes with the prefill
    assert computed == len(common) + sum(map(len, own)) + decoded
    # and so is one that only two of them share, on top of what all do
    turns = [common[: 2 * block] + [7] * block + tail for tail in ([1] * 9, [2] * 9, [3] * 9)]
    turns.append(common[: 2 * block] + [8] * 9)
    host.ask("forget_prefixes")
    before = host.ask("computed_tokens")
    plain(host, [Work(f"turn{i}", turn, [], Sampling(max_tokens=2)) for i, turn in enumerate(turns)])
    assert host.ask("computed_tokens") - before == 3 * block + 4 * 9 + 4


def test_what_it_cannot_serve_is_refused_with_a_reason(
    host: BackendHost, folders: list[Path], tmp_path: Path, work: list[Work], whole: Run
) -> None:
    if host.spec.backend != "transformers":
        pytest.skip("one process holds one vLLM; its refusals are tested with the engine (tests/crash)")

    def folder(name: str, weights: dict[str, torch.Tensor], **changes: Any) -> str:
        path = tmp_path / name
        path.mkdir()
        config = json.loads((folders[0] / "config.json").read_text()) | changes
        (path / "config.json").write_text(json.dumps(config))
        save_file(weights, path / "model.safetensors")
        return str(path)

    weights = dict(random_weights())
    small = msgspec.structs.replace(host.spec, kv_bytes=1 << 18)
    assert "max_model_len 448" in host.ask("refusal", small) and "engine.kv_bytes" in host.ask("refusal", small)
    sliding = folder("sliding", weights, use_sliding_window=True, sliding_window=64, max_window_layers=0)
    foreign = folder("foreign", weights | {"model.layers.0.mlp.experts.0.weight": torch.zeros(4, 4)})
    partial = folder("partial", {name: value for name, value in weights.items() if "layers.1.mlp.up" not in name})
    crooked = folder("crooked", weights | {"model.norm.weight": torch.zeros(64)})
    for model, reason in (
        (sliding, "full attention in every layer"),
        (foreign, "no parameter model.layers.0.mlp.experts.0.weight"),
        (partial, "no tensor of the model folder fills parameter model.layers.1.mlp.up_proj.weight"),
        (crooked, "model.norm.weight has shape (64,)"),
    ):
        assert reason in host.ask("refusal", msgspec.structs.replace(host.spec, model=model))
    assert host.ask("refusal", host.spec) == ""
    assert plain(host, work) == whole
