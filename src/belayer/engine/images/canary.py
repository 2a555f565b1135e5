"""What an engine must say again after it came out of an image: tokens and logprobs of a few fixed requests."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from belayer.engine._wire import Chunk, Work
from belayer.engine.request import Sampling
from belayer.errors import EngineError

if TYPE_CHECKING:
    from belayer.engine.backends import Backend

TOKENS = 12
TOLERANCE = 0.02  # of a logprob, where arithmetic is not batch invariant


class Words(msgspec.Struct):
    """One request's completion."""

    id: str
    token_ids: list[int]
    logprobs: list[float]


def requests(vocab_size: int, max_model_len: int) -> list[Work]:
    """A short and a long prompt greedily, and one sampled."""
    longest = max(1, min(120, max_model_len - TOKENS - 1))
    tokens = min(TOKENS, max_model_len - 1)
    kinds = (
        (5, Sampling(max_tokens=tokens, temperature=0.0)),
        (longest, Sampling(max_tokens=tokens, temperature=0.0)),
        (min(40, longest), Sampling(max_tokens=tokens, seed=5, temperature=0.8, top_p=0.9)),
    )
    return [
        Work(f"canary-{i}", [(11 * j + 7 * i + 1) % vocab_size for j in range(min(length, longest))], [], sampling)
        for i, (length, sampling) in enumerate(kinds)
    ]


class Listener:
    """Puts the chunks of the canary's requests together."""

    def __init__(self, work: Iterable[Work]) -> None:
        self._words = {item.id: Words(item.id, [], []) for item in work}
        self._open = set(self._words)

    def add(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            words = self._words[chunk.id]
            words.token_ids += chunk.token_ids
            words.logprobs += chunk.logprobs
            if chunk.finish_reason is not None:
                self._open.discard(chunk.id)

    @property
    def done(self) -> bool:
        return not self._open

    @property
    def words(self) -> list[Words]:
        return list(self._words.values())


def listen(engine: Backend, work: list[Work]) -> list[Words]:
    """Run `work` in this process."""
    listener = Listener(work)
    for item in work:
        engine.submit(item)
    while engine.busy:
        listener.add(engine.step())
    engine.forget_prefixes()
    return listener.words


def difference(before: list[Words], after: list[Words], *, exact: bool) -> str | None:
    """In what `after` differs from `before`, or None. `exact`: logprobs to the bit."""
    for expected, found in zip(before, after, strict=True):
        if expected.token_ids != found.token_ids:
            return f"{expected.id}: tokens {found.token_ids} instead of {expected.token_ids}"
        for old, new in zip(expected.logprobs, found.logprobs, strict=True):
            if old != new if exact else not math.isclose(old, new, abs_tol=TOLERANCE):
                return f"{expected.id}: logprob {new} instead of {old}"
    return None


def probe(engine: Backend) -> None:
    """A few tokens on the weights that are in place now, which also touches the memory that every step needs.

    Raises `EngineError` when they are not numbers.
    """
    kinds = (Sampling(max_tokens=3, temperature=0.0), Sampling(max_tokens=3, top_p=0.9))
    work = [Work(f"probe-{i}", [1, 2, 3, 4], [], sampling) for i, sampling in enumerate(kinds)]
    for words in listen(engine, work):
        if len(words.token_ids) != 3 or not all(map(math.isfinite, words.logprobs)):
            raise EngineError(f"the restored engine computes nonsense: {words}")
