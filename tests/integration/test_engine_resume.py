"""A completion that is resumed, at whatever position, is the undisturbed one: tokens, logprobs, end and reason."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tests.engine_kit import VOCABULARY, Journal, byte_tokenizer, engine_config, make_model, random_weights

from belayer.engine import Engine, GenerationRequest, Sampling
from belayer.errors import EngineError, RequestRefused
from belayer.ownership import RunLabel

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the vLLM backend"),
]

LENGTH = 18
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, penalties": {"temperature": 0.0, "presence_penalty": -2.0, "frequency_penalty": 0.7},
    "greedy, repetition": {"temperature": 0.0, "repetition_penalty": 1.8},
    "sampled": {"seed": 1},
    "top-k": {"seed": 2, "temperature": 0.8, "top_k": 30},
    "top-p": {"seed": 3, "temperature": 1.2, "top_p": 0.9},
    "all": {
        "seed": (1 << 64) - 1,
        "temperature": 0.9,
        "top_k": 200,
        "top_p": 0.95,
        "min_p": 0.001,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
    },
    "negative penalties": {"seed": 5, "temperature": 0.3, "frequency_penalty": -0.5, "repetition_penalty": 0.9},
}


def make(kind: str, **changes: Any) -> GenerationRequest:
    arguments: dict[str, Any] = {"max_tokens": LENGTH, **KINDS[kind], **changes}
    number = list(KINDS).index(kind)
    prompt = [(7 * j + 31 * number) % VOCABULARY for j in range(5 + 40 * number)]
    return GenerationRequest(id=kind, prompt_ids=prompt, sampling=Sampling(**arguments))


class Outcome:
    """What came of some requests."""

    def __init__(self, journal: Journal, reasons: dict[str, str]) -> None:
        self.tokens, self.logprobs, self.reasons = journal.tokens, journal.logprobs, reasons


async def run(engine: Engine, work: list[GenerationRequest], journal: Journal | None = None) -> Outcome:
    journal = journal or Journal()
    for request in work:  # what the journal holds of a resumed request
        journal.tokens[request.id] = list(request.resume_ids)
    reasons = await asyncio.wait_for(asyncio.gather(*(engine.generate(one, journal) for one in work)), 60)
    return Outcome(journal, dict(zip([one.id for one in work], reasons, strict=True)))


def resumed(work: list[GenerationRequest], whole: Outcome, at: dict[str, int]) -> list[GenerationRequest]:
    """The same requests with the first tokens of their completions in the journal already."""
    return [
        GenerationRequest(
            id=one.id,
            prompt_ids=one.prompt_ids,
            sampling=one.sampling,
            resume_ids=whole.tokens[one.id][: at[one.id]],
        )
        for one in work
    ]


async def check(engine: Engine, work: list[GenerationRequest], whole: Outcome, at: dict[str, int]) -> None:
    outcome = await run(engine, resumed(work, whole, at))
    for one in work:
        position = min(at[one.id], len(whole.tokens[one.id]))
        assert outcome.tokens[one.id] == whole.tokens[one.id], f"{one.id} resumed at {position}"
        assert outcome.logprobs[one.id] == whole.logprobs[one.id][position:], f"{one.id} resumed at {position}"
        assert outcome.reasons[one.id] == whole.reasons[one.id], f"{one.id} resumed at {position}"


def with_stop_strings(whole: Outcome, tokenizer: Any) -> list[GenerationRequest]:
    """Requests that end within a string of the text they are known to produce; it spans three tokens."""
    work = []
    for kind, end in (("greedy", 9), ("sampled", 14), ("all", 5), ("negative penalties", 16)):
        before = tokenizer.decode(whole.tokens[kind][: end - 3], skip_special_tokens=False)
        text = tokenizer.decode(whole.tokens[kind][:end], skip_special_tokens=False)
        work.append(make(kind, stop=("not in there", text[len(before) - 1 :])))
    return work


@pytest.mark.timeout(300)
def test_every_position(tmp_path: Path) -> None:
    """One engine for all of it: starting one takes longer than everything it does here."""
    model = make_model(tmp_path / "model")
    tokenizer = byte_tokenizer(VOCABULARY)

    async def scenario() -> None:
        with RunLabel.new("test engine resume") as label:
            engine = await Engine.start(engine_config(model, standby="none"), label)
            try:
                await live_through(engine)
            finally:
                await engine.close()

    async def live_through(engine: Engine) -> None:
        work = [make(kind) for kind in KINDS]
        whole = await run(engine, work)
        assert set(whole.reasons.values()) == {"length"}
        assert all(len(tokens) == LENGTH for tokens in whole.tokens.values())
        for position in range(LENGTH + 1):
            await check(engine, work, whole, dict.fromkeys(KINDS, position))
        # each at a position of its own, so that some are prefilled beside others that are decoded
        await check(engine, work, whole, {kind: (5 * number) % LENGTH for number, kind in enumerate(KINDS)})

        await penalties_have_an_effect(engine, whole)
        await stop_strings(engine, whole)
        await stop_tokens(engine, work, whole)
        await too_early(engine, whole)
        await interrupted(engine, work, whole)
        await seeds(engine)
        await budgets(engine, work, whole)
        await refused(engine)
        await not_numbers(engine, work, whole)

    async def penalties_have_an_effect(engine: Engine, whole: Outcome) -> None:
        plain = await run(engine, [make(kind, **OFF) for kind in ("greedy, penalties", "all")])
        assert plain.tokens["greedy, penalties"] != whole.tokens["greedy, penalties"]
        assert plain.tokens["all"] != whole.tokens["all"]
        # greedy says the same few things over and over; with all that can be taken off for it, never twice
        strict = make("greedy", presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=1e6)
        tokens = (await run(engine, [strict])).tokens["greedy"]
        assert len(set(tokens)) == LENGTH and not set(tokens) & set(strict.prompt_ids)

    async def stop_strings(engine: Engine, whole: Outcome) -> None:
        with pytest.raises(RequestRefused, match="tokenizer"):
            await run(engine, [make("sampled", stop=("x",))])
        tokenizer.save(str(model / "tokenizer.json"))
        work = with_stop_strings(whole, tokenizer)
        stopped = await run(engine, work)
        for one in work:
            tokens, text = stopped.tokens[one.id], one.sampling.stop[1]
            assert stopped.reasons[one.id] == "stop"
            assert tokens == whole.tokens[one.id][: len(tokens)]
            assert text in tokenizer.decode(tokens, skip_special_tokens=False)
            assert text not in tokenizer.decode(tokens[:-1], skip_special_tokens=False)
        longest = max(map(len, stopped.tokens.values()))
        for position in range(longest + 1):
            await check(engine, work, stopped, dict.fromkeys(KINDS, position))
        # tokens beyond the stop string, which a journal of ours would not have: finished at once all the same
        work[0].resume_ids = whole.tokens[work[0].id][:15]
        journal = Journal()
        assert (await run(engine, work[:1], journal)).reasons == {work[0].id: "stop"}
        assert journal.tokens[work[0].id] == work[0].resume_ids
        work[0].resume_ids = []
        # a stop string that is completed by the very last token that the budget allows
        length = len(stopped.tokens["sampled"])
        last = make("sampled", stop=work[1].sampling.stop, max_tokens=length)
        assert (await run(engine, [last])).reasons == {"sampled": "stop"}

    async def stop_tokens(engine: Engine, work: list[GenerationRequest], whole: Outcome) -> None:
        work = [make(one.id, stop_token_ids=(whole.tokens[one.id][11], 7)) for one in work]
        stopped = await run(engine, work)
        assert set(stopped.reasons.values()) == {"stop"}
        for position in (0, 1, 5, 10, 11, 12):
            await check(engine, work, stopped, dict.fromkeys(KINDS, position))

    async def too_early(engine: Engine, whole: Outcome) -> None:
        """Nothing ends the first `min_tokens` tokens, and tokens of the journal count among them."""
        least, ends = 7, tuple(range(0, VOCABULARY, 3))
        assert sum(not set(ends).isdisjoint(tokens[:least]) for tokens in whole.tokens.values()) > 4, (
            "nothing to hold back"
        )
        text = {kind: tokenizer.decode(tokens[1:3]) for kind, tokens in whole.tokens.items()}
        work = [make(kind, min_tokens=least, stop_token_ids=ends, stop=(text[kind][-1],)) for kind in KINDS]
        ended = await run(engine, work)
        for kind, tokens in ended.tokens.items():
            assert not set(tokens[:least]) & set(ends), kind
            assert (tokens[-1] in ends or text[kind][-1] in tokenizer.decode(tokens[least:])) == (
                ended.reasons[kind] == "stop"
            )
        assert list(ended.reasons.values()).count("stop") > 4
        for position in range(max(map(len, ended.tokens.values())) + 1):
            await check(engine, work, ended, dict.fromkeys(KINDS, position))
        with pytest.raises(RequestRefused, match="all of the vocabulary"):
            await run(engine, [make("greedy", min_tokens=1, stop_token_ids=tuple(range(VOCABULARY)))])

    async def interrupted(engine: Engine, work: list[GenerationRequest], whole: Outcome) -> None:
        """Inside the worker: new weights, the same values, make every request give up its KV cache and come again."""
        work = [make(one.id, max_tokens=150) for one in work]
        long = await run(engine, work)
        assert {kind: tokens[:LENGTH] for kind, tokens in long.tokens.items()} == whole.tokens
        for _attempt in range(8):  # where the machine is busy, the worker may be through before the update comes
            journal = Journal()
            updates: list[asyncio.Task[Any]] = []

            def update(updates: list[asyncio.Task[Any]] = updates) -> None:
                weights = list(random_weights())
                updates.append(asyncio.ensure_future(engine.update_weights(weights, engine.policy_version + 1)))

            journal.when_all_have(1, len(work), update)
            again = await run(engine, work, journal)
            await asyncio.gather(*updates)
            assert again.tokens == long.tokens
            if all(len(set(journal.versions[one.id])) == 2 for one in work):
                return
        raise AssertionError("no update came while requests were in flight")

    async def seeds(engine: Engine) -> None:
        """Equal prompts and equal seeds collide, as documented; a group's members need seeds of their own."""
        members = [make("sampled", seed=seed) for seed in (8, 8, 9)]
        for number, member in enumerate(members):
            member.id = f"member {number}"
        tokens = (await run(engine, members)).tokens
        assert tokens["member 0"] == tokens["member 1"] != tokens["member 2"]

    async def budgets(engine: Engine, work: list[GenerationRequest], whole: Outcome) -> None:
        """The budget is that of the whole completion; a resumed request does not get it again."""
        for budget in (1, 10, LENGTH):
            work = [make(one.id, max_tokens=budget) for one in work]
            for position in {0, budget - 1, budget}:
                outcome = await run(engine, resumed(work, whole, dict.fromkeys(KINDS, position)))
                assert set(outcome.reasons.values()) == {"length"}
                assert outcome.tokens == {kind: tokens[:budget] for kind, tokens in whole.tokens.items()}
        beyond = resumed([make("sampled", max_tokens=10)], whole, {"sampled": 11})
        with pytest.raises(RequestRefused, match="max_tokens"):
            await run(engine, beyond)

    async def refused(engine: Engine) -> None:
        """Before any token, with the reason; the engine's own checks are in the fault tests."""
        for changes, why in (
            ({"n": 2}, "seed of its own"),
            ({"structured": {"json": {}}}, "grammar"),
            ({"top_logprobs": 5}, "journal"),
            ({"repetition_penalty": 0.0}, "repetition_penalty"),
            ({"stop": ("",)}, "stop"),
        ):
            journal = Journal()
            with pytest.raises(RequestRefused, match=why):
                await engine.generate(make("sampled", **changes), journal)
            assert not journal.tokens

    async def not_numbers(engine: Engine, work: list[GenerationRequest], whole: Outcome) -> None:
        """Weights that overflow make no tokens: the request fails, and nothing of it is journalled."""
        good = dict(random_weights())
        broken = good["model.norm.weight"] * float("nan")
        await engine.update_weights([("model.norm.weight", broken)], engine.policy_version + 1)
        for kind in ("greedy", "sampled", "all"):
            journal = Journal()
            with pytest.raises(EngineError, match="not numbers"):
                await engine.generate(make(kind), journal)
            assert not journal.tokens
        await engine.update_weights(good.items(), engine.policy_version + 1)
        assert (await run(engine, work)).tokens == whole.tokens

    asyncio.run(scenario())


OFF: dict[str, Any] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
