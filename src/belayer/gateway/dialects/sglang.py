"""SGLang's `/generate`. A stream's events each hold the whole completion so far, as SGLang's do."""

from __future__ import annotations

import time
import uuid
from typing import Any

from belayer.gateway.dialects._fields import Fields, is_ids
from belayer.gateway.dialects._wish import check_count, check_logprobs, sglang_wish
from belayer.gateway.dialects.base import Ask, Delta, Order, Served
from belayer.gateway.problems import bad, unsupported
from belayer.gateway.text import Text

_NOT_TEXT = "only text and token ids go in"


async def sglang_order(body: Any, served: Served) -> Order:
    """Raises `Problem` for a body that cannot be served as it is."""
    fields = Fields(body)
    prompts, batch = await _prompts(fields, served)
    stream = fields.flag("stream")
    given = fields.take("sampling_params", {})
    if isinstance(given, list):
        raise unsupported("sampling_params", "send one request per set of parameters", "a list of sampling_params")
    params = Fields(given, "sampling_params")
    wish = sglang_wish(params, served)
    params.end()
    if stream and (batch or wish.n > 1):
        raise unsupported("stream", "send one request per completion", "a stream of several completions")
    logprob = fields.take("return_logprob", False)
    if not isinstance(logprob, bool):
        raise bad("return_logprob must be true or false", "return_logprob")
    start = fields.whole("logprob_start_len", -1)
    if logprob and start != -1 and any(start < len(prompt) for prompt in prompts):
        raise unsupported("logprob_start_len", "prompts are not scored; leave it at -1")
    check_logprobs(fields.whole("top_logprobs_num", 0), wish, served, "top_logprobs_num")
    fields.only("token_ids_logprob", why="the journal holds the logprobs of sampled tokens only")
    for name in ("image_data", "video_data", "audio_data", "input_embeds", "modalities", "positional_embed_overrides"):
        fields.only(name, [], why=_NOT_TEXT)
    for name in ("return_hidden_states", "return_routed_experts", "return_entropy", "return_sampling_mask"):
        fields.only(name, False, why="only tokens and their logprobs come out")
    for name in ("lora_path", "lora_id", "custom_logit_processor", "session_params", "bootstrap_host"):
        fields.only(name, why="one model is served, and prompts are sent whole")
    fields.only("require_reasoning", False, why="nothing is parsed")
    rid = fields.take("rid")
    if not (rid is None or isinstance(rid, str) or (isinstance(rid, list) and all(isinstance(x, str) for x in rid))):
        raise bad("rid must be a string, or a list of them", "rid")
    fields.without_effect("session_id", "log_metrics", "no_logs", "priority", "extra_key", "routing_key", "cache_salt")
    fields.without_effect("conversation_id", "custom_labels", "routed_dp_rank", "data_parallel_rank", "background")
    writer = SglangWriter(
        rid if isinstance(rid, list) else [rid or uuid.uuid4().hex],
        wish.asks(prompts, served),
        served.text,
        logprob=logprob,
        texts=fields.flag("return_text_in_logprobs"),
        listed=batch or wish.n > 1,
    )
    fields.only("model", *served.names, why="another model is served")
    fields.end()
    # SGLang names every token that ended a completion
    return wish.order(writer, stream=stream, prompt_name="input_ids", ends=frozenset())


async def _prompts(fields: Fields, served: Served) -> tuple[list[list[int]], bool]:
    """The prompts, and whether they came as a batch."""
    words, ids = fields.take("text"), fields.take("input_ids")
    if (words is None) == (ids is None):
        raise bad("give either text or input_ids", "input_ids")
    if isinstance(words, str):
        return await served.text.encode([words], served.max_model_len, special=True, param="text"), False
    if words is not None:
        if not isinstance(words, list) or not words or not all(isinstance(item, str) for item in words):
            raise bad("text must be a string or a list of strings, and not empty", "text")
        check_count(words, "text")
        return await served.text.encode(words, served.max_model_len, special=True, param="text"), True
    if is_ids(ids) and ids:
        return [list(ids)], False
    if isinstance(ids, list) and ids and all(is_ids(item) and item for item in ids):
        return [list(item) for item in ids], True
    raise bad("input_ids must be token ids or a list of such lists, and not empty", "input_ids")


class SglangWriter:
    """See `Writer`."""

    def __init__(
        self,
        rids: list[str],
        asks: list[Ask],
        text: Text,
        *,
        logprob: bool,
        texts: bool,
        listed: bool,
    ) -> None:
        self.asks = asks
        # a request of several completions is aborted by its own name too
        self.names = [frozenset((self._rid(rids, n), *(rids if len(rids) == 1 else ()))) for n in range(len(asks))]
        self._rids = rids
        self._text = text
        self._logprob = logprob
        self._texts = texts and text.there
        self._listed = listed
        self._began = time.monotonic()
        self._so_far: list[Delta | None] = [None] * len(asks)

    def whole(self, deltas: list[Delta]) -> Any:
        answers = [self.chunk(index, delta) for index, delta in enumerate(deltas)]
        return answers if self._listed else answers[0]

    def first(self) -> list[Any]:
        return []

    def chunk(self, index: int, delta: Delta) -> Any:
        before = self._so_far[index]
        if before is not None:
            delta = Delta(
                ids=before.ids + delta.ids,
                logprobs=before.logprobs + delta.logprobs,
                versions=before.versions + delta.versions,
                text=before.text + delta.text,
                finish=delta.finish,
                stop_reason=delta.stop_reason,
            )
        self._so_far[index] = delta
        meta: dict[str, Any] = {
            "id": self._rid(self._rids, index),
            "finish_reason": _finish(delta),
            "prompt_tokens": len(self.asks[index].prompt_ids),
            "completion_tokens": len(delta.ids),
            "cached_tokens": 0,
            "weight_version": str(delta.versions[-1]) if delta.versions else None,
            "e2e_latency": time.monotonic() - self._began,
        }
        if self._logprob:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [
                [value, token, self._text.spell(token) if self._texts else None]
                for token, value in zip(delta.ids, delta.logprobs, strict=True)
            ]
        return {"text": delta.text, "output_ids": delta.ids, "meta_info": meta}

    def last(self) -> list[Any]:
        return []

    @staticmethod
    def _rid(rids: list[str], index: int) -> str:
        return rids[index] if index < len(rids) else f"{rids[0]}_{index}"


def _finish(delta: Delta) -> dict[str, Any] | None:
    match delta.finish:
        case "":
            return None
        case "length":
            return {"type": "length", "length": len(delta.ids)}
        case "abort":
            return {"type": "abort", "message": "generation was paused or aborted"}
        case reason:
            return {"type": reason, "matched": delta.stop_reason}
