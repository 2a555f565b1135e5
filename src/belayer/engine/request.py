"""What goes into the engine and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of one completion are chosen.

    `max_tokens` counts the whole completion, tokens of `GenerationRequest.resume_ids` included. `temperature` 0 is
    greedy.

    `repetition_penalty` divides positive and multiplies negative logits of every token of prompt and completion; 1 is
    off. `frequency_penalty` times a token's count in the completion, and `presence_penalty` if it is there at all, are
    subtracted; 0 is off. (Definitions of vLLM and of the OpenAI API.) `top_k` 0, `top_p` 1 and `min_p` 0 switch those
    filters off. The order is: penalties, stop tokens held back, temperature, min-p, top-k, top-p.

    The first `min_tokens` tokens of the completion, those of `GenerationRequest.resume_ids` included, cannot end it: no
    token of `stop_token_ids` is drawn among them, and a stop string counts only if a later token completes it. (vLLM's
    definition, but for an end-of-sequence token that is not in `stop_token_ids`: it ends nothing, so it is let in.)

    A token of `stop_token_ids` ends the completion and is part of it; there is no implicit end-of-sequence token. So
    does the token that completes one of the strings `stop` in the completion's text, special tokens written out; the
    model folder must hold a tokenizer.

    Noise is drawn from (seed, position in the completion) and from nothing else. Two requests with equal prompts and
    equal seeds therefore give equal completions: the members of a group need seeds of their own.

    `n`, `structured` and `top_logprobs` exist to be refused with a reason: several completions of one request, output
    held to a grammar or schema, and logprobs of tokens that were not chosen would not survive a resumption as they are.
    """

    max_tokens: int
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    n: int = 1
    structured: Any = None
    top_logprobs: int = 0

    def held_back(self, position: int) -> tuple[int, ...]:
        """Tokens that must not be drawn at `position` of the completion, for they would end it too early."""
        return self.stop_token_ids if position < self.min_tokens else ()

    def problem(self) -> str | None:
        """Why no engine of ours can honour this, in one sentence, or None."""
        for name, (range_, fits) in _CHECKS.items():
            if not fits(getattr(self, name)):
                return f"{name} is {getattr(self, name)!r}, but must be {range_}"
        if self.min_tokens > self.max_tokens:
            return f"min_tokens is {self.min_tokens}, but must be at most max_tokens, {self.max_tokens}"
        if self.n != 1:
            return "n must be 1: send as many requests, each with a seed of its own; their prompt is computed once"
        if self.structured is not None:
            return "structured output is not offered: the state of a grammar would be lost when a worker is replaced"
        if self.top_logprobs:
            return "top_logprobs is not offered: the journal holds the chosen tokens' logprobs"
        return None


def _number(fits: Callable[[float], bool]) -> Callable[[Any], bool]:
    # bool is an int to Python, but True as a temperature is a mistake; no comparison holds for NaN
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and fits(value)


def _whole(fits: Callable[[int], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and fits(value)


def _all_of(value: Any, kind: type, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, tuple | list) and all(type(item) is kind and fits(item) for item in value)


def _sendable(text: str) -> bool:
    """Whether it says something and can be written as UTF-8: half a surrogate pair cannot."""
    return bool(text) and not any("\ud800" <= character <= "\udfff" for character in text)


_MOST = 1_000_000_000  # of any count or factor: what travels to a worker must fit its messages
_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "max_tokens": ("in [1, 1e9]", _whole(lambda v: 1 <= v <= _MOST)),
    "min_tokens": ("in [0, 1e9], 0 is off", _whole(lambda v: 0 <= v <= _MOST)),
    "seed": ("in [0, 2**64)", _whole(lambda v: 0 <= v < 1 << 64)),
    "temperature": ("in [0, 1e9]", _number(lambda v: 0 <= v <= _MOST)),
    "top_k": ("in [0, 1e9], 0 is off", _whole(lambda v: 0 <= v <= _MOST)),
    "top_p": ("in (0, 1]", _number(lambda v: 0 < v <= 1)),
    "min_p": ("in [0, 1]", _number(lambda v: 0 <= v <= 1)),
    "repetition_penalty": ("in (0, 1e9]", _number(lambda v: 0 < v <= _MOST)),
    "presence_penalty": ("in [-2, 2]", _number(lambda v: -2 <= v <= 2)),
    "frequency_penalty": ("in [-2, 2]", _number(lambda v: -2 <= v <= 2)),
    "stop_token_ids": ("token ids", lambda v: _all_of(v, int, lambda item: 0 <= item <= _MOST)),
    "stop": ("strings that are not empty, of whole characters", lambda v: _all_of(v, str, _sendable)),
    "n": ("in [1, 1e9]", _whole(lambda v: 1 <= v <= _MOST)),
    "top_logprobs": ("in [0, 1e9]", _whole(lambda v: 0 <= v <= _MOST)),
}


class GenerationRequest(msgspec.Struct, kw_only=True):
    """One completion to make. `resume_ids` are tokens of it that the journal holds already.

    `resume_version` is the policy version that made them; where turns must not span versions the request is not
    resumed with another one (`TurnRestarted`).

    `trajectory` names the conversation that this is a turn of; it matters where a trajectory must not span policy
    versions. Without it the request is a trajectory of its own.
    """

    id: str
    prompt_ids: list[int]
    sampling: Sampling
    resume_ids: list[int] = []
    resume_version: int | None = None
    trajectory: str = ""


class TokenChunk(msgspec.Struct, kw_only=True):
    """New tokens of one completion, in order and without gaps.

    `start` is the index in the completion of the first token here. `logprobs` are natural logarithms of the model's
    own distribution (temperature 1, before any filter), one per token. `weights_version` is the policy version whose
    weights made these tokens. `finish_reason` is "stop" or "length" on the last chunk. The last chunk carries no token
    when `resume_ids` already held the whole completion.
    """

    request_id: str
    start: int
    token_ids: list[int]
    logprobs: list[float]
    weights_version: int
    finish_reason: str | None = None


TokenSink = Callable[[TokenChunk], None]


class WeightsEpoch(msgspec.Struct, frozen=True, kw_only=True):
    """A committed set of weights: `epoch` counts commits of this engine, `policy_version` is the trainer's number."""

    epoch: int
    policy_version: int
    digest: str
    wall_s: float
