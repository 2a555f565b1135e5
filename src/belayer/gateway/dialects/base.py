"""What dialects share: what is asked for, and what has come of it."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from belayer.engine import Sampling
from belayer.gateway.generation import Generation
from belayer.gateway.text import Text

LOWEST = -9999.0  # JSON has no minus infinity; vLLM's stand-in for it


class Served(msgspec.Struct, frozen=True):
    """What a dialect must know of what is served."""

    text: Text
    names: tuple[str, ...]
    """What a request may call the model."""
    shown: tuple[str, ...]
    """Those that others may see: a folder of this host is none."""
    max_model_len: int
    sampled_logprobs_only: bool


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One completion that a request asks for. `seeded`: the client chose the seed."""

    prompt_ids: list[int]
    sampling: Sampling
    seeded: bool


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of one completion. `stop_reason` is the stop string or token that ended it, None for all else."""

    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    text: str
    finish: str
    stop_reason: str | int | None


class Writer(Protocol):
    """Writes the answers to one request. Everything returned is JSON-able."""

    asks: list[Ask]
    """What is answered."""
    names: list[frozenset[str]]
    """What clients may call each of them, to abort it."""

    def whole(self, deltas: list[Delta]) -> Any:
        """The answer to a request that does not stream: one delta per ask."""
        ...

    def first(self) -> list[Any]:
        """What a stream begins with."""
        ...

    def chunk(self, index: int, delta: Delta) -> Any: ...

    def last(self) -> list[Any]:
        """What a stream ends with, before `[DONE]`."""
        ...


class Order(msgspec.Struct, kw_only=True):
    """One request, understood."""

    asks: list[Ask]
    stream: bool
    writer: Writer
    ends: frozenset[int]
    """Tokens that end a completion without being a reason worth telling: the model's own."""
    keep_stop: bool
    skip_special: bool
    prompt_name: str = "prompt"
    """The field that the prompt came in."""


class View:
    """A client's look at one completion: what it has not seen yet, as tokens and as text."""

    def __init__(self, generation: Generation, order: Order, text: Text) -> None:
        sampling = generation.sampling
        hidden = frozenset() if order.keep_stop else frozenset(sampling.stop_token_ids)
        if order.skip_special:
            hidden |= text.special
        self.generation = generation
        self.over = False
        self._ends = order.ends
        self._seen = 0
        self._stream = text.stream(generation.prompt_ids, sampling, hidden, order.keep_stop)

    def take(self) -> Delta | None:
        """What is new, or None. The last delta has `finish` set; then `over` is true."""
        made = self.generation
        begin, end = self._seen, made.visible
        if self.over or (begin == end and not made.finish):
            return None
        self._seen, self.over = end, bool(made.finish)
        ids = made.ids[begin:end]
        text = self._stream.feed(ids)
        if self.over:
            text += self._stream.end()
        return Delta(
            ids=ids,
            logprobs=[max(value, LOWEST) for value in made.logprobs[begin:end]],
            versions=made.versions[begin:end],
            text=text,
            finish=made.finish,
            stop_reason=self._reason() if self.over else None,
        )

    def _reason(self) -> str | int | None:
        made = self.generation
        if made.finish != "stop":
            return None
        last = made.ids[-1] if made.ids else None
        if last in made.sampling.stop_token_ids:
            return None if last in self._ends else last
        return self._stream.matched
