"""Sampling parameters as clients write them, made into `Sampling`; what cannot be honoured is refused."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from belayer.engine import Sampling
from belayer.gateway.dialects._fields import Fields
from belayer.gateway.dialects.base import Ask, Order, Served, Writer
from belayer.gateway.problems import Problem, bad, unsupported
from belayer.seeds import derive_seed

_GRAMMAR = "output held to a grammar would lose the grammar's state when a worker is replaced"
_ELSEWHERE = "it is not part of what the journal can continue"
MOST_CHOICES = 1024


class Wish(msgspec.Struct, kw_only=True):
    """The parameters of one request, for all its prompts."""

    values: dict[str, Any]
    max_tokens: int | None
    seed: int | None
    n: int
    keep_stop: bool
    skip_special: bool
    ends: frozenset[int]
    where: str = ""
    """The object that the parameters were in."""

    @property
    def greedy(self) -> bool:
        """Whether the sampled token is always the likeliest."""
        penalties = ("repetition_penalty", 1), ("presence_penalty", 0), ("frequency_penalty", 0)
        return self.values["temperature"] == 0 and all(self.values[name] == off for name, off in penalties)

    def asks(self, prompts: list[list[int]], served: Served) -> list[Ask]:
        """One ask per prompt and choice, prompts first."""
        if len(prompts) * self.n > MOST_CHOICES:
            raise bad(f"{len(prompts)} prompts × n {self.n} are more than {MOST_CHOICES} completions", "n")
        return [
            Ask(prompt_ids=prompt, sampling=self._sampling(prompt, served, choice), seeded=self.seed is not None)
            for prompt in prompts
            for choice in range(self.n)
        ]

    def order(self, writer: Writer, *, stream: bool, prompt_name: str, ends: frozenset[int] | None = None) -> Order:
        """What is to be done, and how it is answered. `ends` in place of the tokens that this wish ends with."""
        return Order(
            asks=writer.asks,
            stream=stream,
            writer=writer,
            ends=self.ends if ends is None else ends,
            keep_stop=self.keep_stop,
            skip_special=self.skip_special,
            prompt_name=prompt_name,
        )

    def _sampling(self, prompt: list[int], served: Served, choice: int) -> Sampling:
        room = served.max_model_len - len(prompt)
        if room < 1 or (self.max_tokens is not None and self.max_tokens > room):
            wanted = "" if self.max_tokens is None else f" and {self.max_tokens} to generate"
            length = f"context length is {served.max_model_len} tokens"  # clients look for these words
            raise Problem(
                400,
                f"this model's {length}; {len(prompt)} of the prompt{wanted} are more",
                param="prompt" if room < 1 else "max_tokens",
                code="context_length_exceeded",
            )
        if self.seed is None:
            seed = secrets.randbits(63)
        else:
            seed = self.seed % (1 << 64) if choice == 0 else derive_seed(self.seed, f"choice {choice}")
        limit = room if self.max_tokens is None else self.max_tokens
        sampling = Sampling(**self.values, max_tokens=limit, seed=seed)
        if (problem := sampling.problem()) is not None:
            name = problem.partition(" ")[0]  # it begins with the parameter's name
            raise bad(problem, f"{self.where}.{name}" if self.where else name)
        return sampling


def model_of(fields: Fields, served: Served) -> str:
    """The model's name in answers. Raises `Problem` (404) for a model that is not served."""
    name = fields.text("model", served.names[0])
    if name not in served.names:
        known = ", ".join(served.shown)
        raise Problem(404, f"the model {name!r} is not served here; {known} is", param="model", code="model_not_found")
    return name


def openai_wish(fields: Fields, served: Served, *, max_tokens: int | None, also_max: str = "") -> Wish:
    """Parameters under the names that OpenAI and vLLM share. `also_max`: a second name of max_tokens."""
    limit = fields.take("max_tokens")
    if also_max:
        newer = fields.take(also_max)
        limit = limit if newer is None else newer
    if limit is not None and (type(limit) is not int or limit < 1):
        raise bad("max_tokens must be a whole number of at least 1", "max_tokens")
    seed = fields.take("seed")
    if seed is not None and (type(seed) is not int or not -(1 << 63) <= seed < 1 << 64):
        raise bad("seed must be a whole number of 64 bits", "seed")
    wish = _common(fields, served, limit=max_tokens if limit is None else limit, least="min_tokens", seed=seed)
    wish.keep_stop = fields.flag("include_stop_str_in_output")
    fields.only("best_of", 1, wish.n, why="send n instead")
    fields.only("use_beam_search", False, why=_ELSEWHERE)
    fields.only("length_penalty", 1.0, why="it belongs to beam search")
    fields.only("early_stopping", False, why="it belongs to beam search")
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"):
        fields.only(name, why=_GRAMMAR)
    fields.only("response_format", {"type": "text"}, why=_GRAMMAR)
    fields.only("prompt_logprobs", why="prompts are not scored")
    fields.only("truncate_prompt_tokens", why="send the prompt that is to be used")
    fields.only("bad_words", [], why=_ELSEWHERE)
    for name in ("allowed_token_ids", "logprob_token_ids", "logits_processors", "repetition_detection"):
        fields.only(name, why=_ELSEWHERE)
    for name in ("thinking_token_budget", "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "extra_args"):
        fields.only(name, why=_ELSEWHERE)
    fields.only("watermarking", False, why=_ELSEWHERE)
    fields.without_effect("truncation_side", "spaces_between_special_tokens", "stream_interval", "output_kind")
    return wish


def _common(fields: Fields, served: Served, *, limit: int | None, least: str, seed: int | None) -> Wish:
    """What OpenAI, vLLM and SGLang call by the same names. `least` is the dialect's name of min_tokens."""
    n = fields.whole("n", 1)
    if not 1 <= n <= MOST_CHOICES:
        raise bad(f"n must be from 1 to {MOST_CHOICES}", fields.name("n"))
    top_k = fields.whole("top_k", -1)
    min_tokens = fields.whole(least, 0)
    if min_tokens < 0 or (limit is not None and min_tokens > limit):
        most = "" if limit is None else f" and at most the {limit} that may be generated"
        raise bad(f"{fields.name(least)} must be at least 0{most}", fields.name(least))
    stop = fields.strings("stop")
    if stop:
        served.text.need("a stop string", fields.name("stop"))
    ends = frozenset() if fields.flag("ignore_eos") else served.text.eos
    fields.only("logit_bias", {}, why=_ELSEWHERE)
    values = {
        "temperature": fields.number("temperature", 1.0),
        # -1 and SGLang's 2**30 mean the whole vocabulary, as 0 does
        "top_k": 0 if top_k == -1 or top_k >= 1 << 30 else top_k,
        "top_p": fields.number("top_p", 1.0),
        "min_p": fields.number("min_p", 0.0),
        "repetition_penalty": fields.number("repetition_penalty", 1.0),
        "presence_penalty": fields.number("presence_penalty", 0.0),
        "frequency_penalty": fields.number("frequency_penalty", 0.0),
        "min_tokens": min_tokens,
        "stop_token_ids": tuple(sorted({*fields.ids("stop_token_ids"), *ends})),
        "stop": stop,
    }
    return Wish(
        values=values,
        max_tokens=limit,
        seed=seed,
        n=n,
        keep_stop=False,
        skip_special=fields.flag("skip_special_tokens", True),
        ends=ends,
        where=fields.where,
    )


def sglang_wish(fields: Fields, served: Served) -> Wish:
    """SGLang's `sampling_params`."""
    limit = fields.whole("max_new_tokens", 128)
    if limit < 1:
        raise bad("max_new_tokens must be at least 1", fields.name("max_new_tokens"))
    seed = fields.take("sampling_seed")
    if seed is not None and (type(seed) is not int or not -(1 << 63) <= seed < 1 << 64):
        raise bad("sampling_seed must be a whole number of 64 bits", fields.name("sampling_seed"))
    wish = _common(fields, served, limit=limit, least="min_new_tokens", seed=seed)
    wish.keep_stop = fields.flag("no_stop_trim")
    for name in ("json_schema", "regex", "ebnf", "structural_tag", "stop_regex"):
        fields.only(name, why=_GRAMMAR)
    fields.only("custom_params", {}, why=_ELSEWHERE)
    fields.without_effect("spaces_between_special_tokens", "stream_interval")
    return wish


def check_count(prompts: list[Any], param: str) -> None:
    """Raises `Problem` for more prompts than a request may have."""
    if len(prompts) > MOST_CHOICES:
        raise bad(f"{len(prompts)} prompts are more than {MOST_CHOICES}", param)


def check_logprobs(count: int, wish: Wish, served: Served, param: str) -> None:
    """`count` of the likeliest tokens are wanted besides the sampled one. Raises `Problem` where that is impossible."""
    if count < 0:
        raise bad(f"{param} must not be negative", param)
    if count == 0 or served.sampled_logprobs_only or (count == 1 and wish.greedy):
        return
    raise unsupported(
        param,
        "the journal holds the logprobs of sampled tokens only; ask for 0, which gives these, or, if nothing else is "
        "read, start `belayer serve --sampled-logprobs-only`",
        f"{param} above 0",
    )
