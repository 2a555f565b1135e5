"""What OpenAI's two dialects and vLLM's own share: how an answer is wanted, and how its usage is told."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from belayer.gateway.dialects._fields import Fields
from belayer.gateway.dialects._wish import Wish
from belayer.gateway.dialects.base import Ask, Served
from belayer.gateway.text import Text


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """How one request is to be answered. `name` is what its client calls it, or one that nobody else has.

    `usage` says when a stream tells its usage: "", "end" or "always".
    """

    name: str
    asks: list[Ask]
    text: Text
    logprobs: bool
    token_ids: bool
    stream: bool
    usage: str


def wanted(fields: Fields, wish: Wish, prompts: list[list[int]], served: Served, *, logprobs: bool) -> Wanted:
    """Take the fields that say so. Raises `Problem`."""
    stream = fields.flag("stream")
    options = Fields(fields.take("stream_options", {}), "stream_options")
    end, always = options.flag("include_usage"), options.flag("continuous_usage_stats")
    options.without_effect("include_obfuscation")
    options.end()
    fields.without_effect("priority", "cache_salt", "session_id")
    return Wanted(
        name=fields.text("request_id") or uuid.uuid4().hex,
        asks=wish.asks(prompts, served),
        text=served.text,
        logprobs=logprobs,
        token_ids=fields.flag("return_token_ids"),
        stream=stream,
        usage=("always" if always else "end") if end else "",
    )


def without_effect(fields: Fields) -> None:
    """Fields of OpenAI's that label or account, and change no token."""
    fields.without_effect("user", "metadata", "store")
    fields.without_effect("service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
    fields.only("routed_experts_prompt_start", 0, why="experts are not reported")


class OpenAIWriter:
    """What the three writers have in common, see `Writer`. `head` begins whatever a stream sends."""

    def __init__(self, wanted: Wanted, head: dict[str, Any], *names: str) -> None:
        self.asks = wanted.asks
        self.names = [frozenset((wanted.name, *names))] * len(wanted.asks)
        self._wanted = wanted
        self._head = head
        self._text = wanted.text
        self._made = [0] * len(wanted.asks)

    def first(self) -> list[Any]:
        return []

    def last(self) -> list[Any]:
        return [{**self._head, "choices": [], "usage": self._usage()}] if self._wanted.usage else []

    def _usage(self) -> dict[str, int]:
        """Every prompt once, however many choices it has."""
        asks = self.asks
        prompts = [a.prompt_ids for n, a in enumerate(asks) if n == 0 or a.prompt_ids is not asks[n - 1].prompt_ids]
        return _usage_of(sum(map(len, prompts)), sum(self._made))

    def _event(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        """One event of a stream."""
        event: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._wanted.usage == "always":
            event["usage"] = _usage_of(len(self.asks[index].prompt_ids), self._made[index])
        return event


def _usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
