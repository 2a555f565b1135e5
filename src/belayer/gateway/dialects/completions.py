"""OpenAI's `/v1/completions`, with what vLLM adds to it."""

from __future__ import annotations

import time
from typing import Any

from belayer.gateway.dialects._fields import Fields, is_ids
from belayer.gateway.dialects._openai import OpenAIWriter, Wanted, wanted, without_effect
from belayer.gateway.dialects._wish import check_count, check_logprobs, model_of, openai_wish
from belayer.gateway.dialects.base import Delta, Order, Served
from belayer.gateway.problems import bad


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
    want = wanted(fields, wish, prompts, served, logprobs=logprobs is not None)
    writer = CompletionsWriter(model, want, as_ids=fields.flag("return_tokens_as_token_ids"))
    without_effect(fields)
    fields.end()
    return wish.order(writer, stream=want.stream, prompt_name="prompt")


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


class CompletionsWriter(OpenAIWriter):
    """See `Writer`."""

    def __init__(self, model: str, wanted: Wanted, *, as_ids: bool) -> None:
        id = f"cmpl-{wanted.name}"
        about = {"id": id, "object": "text_completion", "created": int(time.time()), "model": model}
        super().__init__(wanted, about, id)
        self._as_ids = as_ids
        self._offsets = [0] * len(self.asks)

    def whole(self, deltas: list[Delta]) -> Any:
        choices = [self._choice(index, delta, first=True) for index, delta in enumerate(deltas)]
        return {**self._head, "choices": choices, "usage": self._usage()}

    def chunk(self, index: int, delta: Delta) -> Any:
        return self._event(index, self._choice(index, delta, first=self._made[index] == 0))

    def _choice(self, index: int, delta: Delta, *, first: bool) -> dict[str, Any]:
        self._made[index] += len(delta.ids)
        choice: dict[str, Any] = {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs_of(index, delta) if self._wanted.logprobs else None,
            "finish_reason": delta.finish or None,
            "stop_reason": delta.stop_reason,
        }
        if self._wanted.token_ids:
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
