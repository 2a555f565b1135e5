"""OpenAI's `/v1/completions`, with what vLLM adds to it."""

from __future__ import annotations

import time
import uuid
from typing import Any

from belayer.gateway.dialects._fields import Fields, is_ids
from belayer.gateway.dialects._wish import check_count, check_logprobs, model_of, openai_wish
from belayer.gateway.dialects.base import Ask, Delta, Order, Served
from belayer.gateway.problems import bad
from belayer.gateway.text import Text


async def completions_order(body: Any, served: Served) -> Order:
    """Raises `Problem` for a body that cannot be served as it is."""
    fields = Fields(body)
    model = model_of(fields, served)
    special = fields.flag("add_special_tokens", True)
    prompts = await _prompts(fields.take("prompt"), served, special)
    wish = openai_wish(fields, served, max_tokens=16)
    logprobs = fields.take("logprobs")
    if logprobs is not None:
        if type(logprobs) is not int:
            raise bad("logprobs must be a whole number", "logprobs")
        check_logprobs(logprobs, wish, served, "logprobs")
    fields.only("echo", False, why="the prompt is not repeated; return_token_ids gives its ids")
    fields.only("suffix", why="nothing is inserted")
    for name in ("prompt_embeds", "mm_payload", "return_token_offsets"):
        fields.only(name, False, why="it is for inputs that are not tokens")
    stream, usage = stream_options(fields)
    writer = CompletionsWriter(
        model,
        wish.asks(prompts, served),
        served.text,
        logprobs=logprobs is not None,
        token_ids=fields.flag("return_token_ids"),
        as_ids=fields.flag("return_tokens_as_token_ids"),
        usage=usage,
    )
    without_effect(fields)
    fields.end()
    return wish.order(writer, stream=stream, prompt_name="prompt")


def stream_options(fields: Fields) -> tuple[bool, str]:
    """Whether the answer streams, and when it tells its usage: "", "end" or "always"."""
    stream = fields.flag("stream")
    options = Fields(fields.take("stream_options", {}), "stream_options")
    end, always = options.flag("include_usage"), options.flag("continuous_usage_stats")
    options.without_effect("include_obfuscation")
    options.end()
    return stream, ("always" if always else "end") if end else ""


def without_effect(fields: Fields) -> None:
    """Fields that route, label or account, and change no token."""
    fields.without_effect("user", "metadata", "store", "priority", "cache_salt", "request_id", "session_id")
    fields.without_effect("service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
    fields.only("routed_experts_prompt_start", 0, why="experts are not reported")


async def _prompts(given: Any, served: Served, special: bool) -> list[list[int]]:
    if isinstance(given, str):
        return await served.text.encode([given], served.max_model_len, special=special)
    if is_ids(given) and given:
        return [list(given)]
    if isinstance(given, list) and given and all(isinstance(item, str) for item in given):
        check_count(given, "prompt")
        return await served.text.encode(given, served.max_model_len, special=special)
    if isinstance(given, list) and given and all(is_ids(item) and item for item in given):
        return [list(item) for item in given]
    raise bad("prompt must be text, token ids, or a list of either, and not empty", "prompt")


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def prompt_tokens_of(asks: list[Ask]) -> int:
    """Every prompt once, however many choices it has."""
    return sum(
        len(ask.prompt_ids) for n, ask in enumerate(asks) if n == 0 or ask.prompt_ids is not asks[n - 1].prompt_ids
    )


class CompletionsWriter:
    """See `Writer`."""

    def __init__(
        self,
        model: str,
        asks: list[Ask],
        text: Text,
        *,
        logprobs: bool,
        token_ids: bool,
        as_ids: bool,
        usage: str,
    ) -> None:
        self.asks = asks
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._text = text
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._as_ids = as_ids
        self._usage = usage
        self._made = [0] * len(asks)
        self._offsets = [0] * len(asks)

    def whole(self, deltas: list[Delta]) -> Any:
        choices = [self._choice(index, delta, first=True) for index, delta in enumerate(deltas)]
        usage = usage_of(prompt_tokens_of(self.asks), sum(self._made))
        return {**self._head, "choices": choices, "usage": usage}

    def first(self) -> list[Any]:
        return []

    def chunk(self, index: int, delta: Delta) -> Any:
        chunk = {**self._head, "choices": [self._choice(index, delta, first=self._made[index] == 0)]}
        if self._usage == "always":
            chunk["usage"] = usage_of(len(self.asks[index].prompt_ids), self._made[index])
        return chunk

    def last(self) -> list[Any]:
        if not self._usage:
            return []
        return [{**self._head, "choices": [], "usage": usage_of(prompt_tokens_of(self.asks), sum(self._made))}]

    def _choice(self, index: int, delta: Delta, *, first: bool) -> dict[str, Any]:
        self._made[index] += len(delta.ids)
        choice: dict[str, Any] = {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs_of(index, delta) if self._logprobs else None,
            "finish_reason": delta.finish or None,
            "stop_reason": delta.stop_reason,
        }
        if self._token_ids:
            choice["token_ids"] = delta.ids
            if first:
                choice["prompt_token_ids"] = self.asks[index].prompt_ids
        return choice

    def _logprobs_of(self, index: int, delta: Delta) -> dict[str, Any]:
        tokens = [f"token_id:{token}" if self._as_ids else self._text.spell(token) for token in delta.ids]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        return {
            "text_offset": offsets,
            "token_logprobs": delta.logprobs,
            "tokens": tokens,
            "top_logprobs": [{token: value} for token, value in zip(tokens, delta.logprobs, strict=True)],
        }
