"""What goes into the engine and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one completion are chosen.

    `max_tokens` counts the whole completion, tokens of `GenerationRequest.resume_ids` included. `temperature` 0 is
    greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch those filters off. Filters apply in the order temperature,
    min-p, top-k, top-p. Noise is drawn from (seed, position in the completion) and from nothing else, so two requests
    that shall differ need different seeds. A token of `stop_token_ids` ends the completion and is part of it; there
    is no implicit end-of-sequence token.
    """

    max_tokens: int
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()


class GenerationRequest(msgspec.Struct, kw_only=True):
    """One completion to make. `resume_ids` are tokens of it that the journal holds already."""

    id: str
    prompt_ids: list[int]
    sampling: Sampling
    resume_ids: list[int] = []


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
