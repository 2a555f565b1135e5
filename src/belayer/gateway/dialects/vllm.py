"""vLLM's `/inference/v1/generate`: token ids in, token ids out."""

from __future__ import annotations

import itertools
import time
from typing import Any

from belayer.gateway.dialects._fields import Fields, is_ids
from belayer.gateway.dialects._openai import OpenAIWriter, Wanted, wanted
from belayer.gateway.dialects._wish import check_logprobs, model_of, openai_wish
from belayer.gateway.dialects.base import Delta, Order, Served
from belayer.gateway.dialects.chat import token_logprobs
from belayer.gateway.problems import bad


async def vllm_order(body: Any, served: Served) -> Order:
    """Raises `Problem` for a body that cannot be served as it is."""
    fields = Fields(body)
    model = model_of(fields, served)
    prompt = fields.take("token_ids")
    if not is_ids(prompt) or not prompt:
        raise bad("token_ids must be a list of token ids, and not empty", "token_ids")
    params = Fields(fields.take("sampling_params", {}), "sampling_params")
    wish = openai_wish(params, served, max_tokens=None)
    logprobs = params.take("logprobs")
    if logprobs is not None:
        if type(logprobs) is not int:
            raise bad("sampling_params.logprobs must be a whole number", "sampling_params.logprobs")
        # 1 is how SkyRL and verifiers ask for what they read, the sampled token's: the likeliest ones are left out
        if logprobs != 1:
            check_logprobs(logprobs, wish, served, "sampling_params.logprobs")
    params.without_effect("detokenize", "flat_logprobs", "skip_reading_prefix_cache")
    params.end()
    mode = fields.text("output_mode", "tokens")
    if mode not in ("tokens", "text"):
        raise bad("output_mode must be tokens or text", "output_mode")
    if mode == "text":
        served.text.need("output_mode text", "output_mode")
    for name in ("features", "content_parts", "kv_transfer_params", "ec_transfer_params", "reasoning_ended"):
        fields.only(name, why="only token ids go in and come out")
    want = wanted(fields, wish, [list(prompt)], served, logprobs=logprobs is not None)
    writer = GenerateWriter(
        model, want, top=logprobs == 0 or wish.greedy or served.sampled_logprobs_only, as_text=mode == "text"
    )
    fields.without_effect("token_offsets", "reasoning_parser_kwargs")
    fields.end()
    return wish.order(writer, stream=want.stream, prompt_name="token_ids")


class GenerateWriter(OpenAIWriter):
    """See `Writer`."""

    def __init__(self, model: str, wanted: Wanted, *, top: bool, as_text: bool) -> None:
        super().__init__(wanted, {"request_id": wanted.name, "output_mode": "text" if as_text else "tokens"})
        self._model = model
        self._top = top
        self._as_text = as_text
        self._versions: list[list[int]] = [[] for _ in self.asks]
        self._begun = False

    def whole(self, deltas: list[Delta]) -> Any:
        choices = [self._choice(index, delta) for index, delta in enumerate(deltas)]
        return {
            **self._head,
            "model": self._model,
            "created": int(time.time()),
            "choices": choices,
            "prompt_token_ids": self.asks[0].prompt_ids if self._wanted.token_ids else None,
            "prompt_logprobs": None,
            "kv_transfer_params": None,
            "usage": self._usage(),
        }

    def chunk(self, index: int, delta: Delta) -> Any:
        chunk = self._event(index, self._choice(index, delta))
        if self._wanted.token_ids and not self._begun:
            chunk["prompt_token_ids"] = self.asks[0].prompt_ids
        self._begun = True
        return chunk

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        self._made[index] += len(delta.ids)
        self._versions[index] += delta.versions
        choice: dict[str, Any] = {
            "index": index,
            "token_ids": delta.ids,
            "logprobs": {"content": self._content(delta)} if self._wanted.logprobs else None,
            "finish_reason": delta.finish or None,
            "stop_reason": delta.stop_reason,
            "weight_versions": _spans(self._versions[index]) if delta.finish else None,
        }
        if self._as_text:
            choice["text"] = delta.text
        return choice

    def _content(self, delta: Delta) -> list[dict[str, Any]]:
        if self._as_text:
            return token_logprobs(delta, self._text, as_ids=False, top=self._top)
        entries = []
        for token, value in zip(delta.ids, delta.logprobs, strict=True):
            # vLLM before 0.30 wrote `token`, later `token_id`; clients of both are about
            entry = {"token_id": token, "token": f"token_id:{token}", "logprob": value, "rank": None}
            entries.append({**entry, "top_logprobs": [entry] if self._top else []})
        return entries


def _spans(versions: list[int]) -> list[dict[str, Any]]:
    """Which tokens were made by which policy version."""
    spans: list[dict[str, Any]] = []
    start = 0
    for version, group in itertools.groupby(versions):
        end = start + len(list(group))
        spans.append({"version": str(version), "start": start, "end": end})
        start = end
    return spans
