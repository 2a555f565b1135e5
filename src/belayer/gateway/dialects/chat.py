"""OpenAI's `/v1/chat/completions`, with what vLLM adds to it. No tools, no images: the answer is text as it comes."""

from __future__ import annotations

import time
from typing import Any

from belayer.gateway.dialects._fields import Fields
from belayer.gateway.dialects._openai import OpenAIWriter, Wanted, wanted, without_effect
from belayer.gateway.dialects._wish import check_logprobs, model_of, openai_wish
from belayer.gateway.dialects.base import Delta, Order, Served
from belayer.gateway.problems import bad, unsupported
from belayer.gateway.text import Text


async def chat_order(body: Any, served: Served) -> Order:
    """Raises `Problem` for a body that cannot be served as it is, or a model folder without a chat template."""
    fields = Fields(body)
    model = model_of(fields, served)
    prompt = await chat_prompt(fields, served)
    wish = openai_wish(fields, served, max_tokens=None, also_max="max_completion_tokens")
    logprobs = fields.flag("logprobs")
    top = fields.whole("top_logprobs", 0)
    if top and not logprobs:
        raise bad("top_logprobs needs logprobs", "top_logprobs")
    check_logprobs(top, wish, served, "top_logprobs")
    fields.only("tools", [], why="tool calls are not parsed; describe tools in the messages and parse the text")
    fields.only("functions", [], why="tool calls are not parsed; describe tools in the messages and parse the text")
    fields.only("tool_choice", "none", "auto", why="tool calls are not parsed")
    fields.only("function_call", "none", "auto", why="tool calls are not parsed")
    fields.only("modalities", ["text"], why="only text is made")
    fields.only("echo", False, why="the prompt is not repeated; return_token_ids gives its ids")
    for name in ("audio", "prediction", "web_search_options", "reasoning_effort", "verbosity", "return_prompt_text"):
        fields.only(name, False, why="the model's chat template decides; see chat_template_kwargs")
    for name in ("media_io_kwargs", "mm_processor_kwargs", "mm_payload", "return_token_offsets", "return_mm_kwargs"):
        fields.only(name, False, why="it is for inputs that are not tokens")
    fields.without_effect("parallel_tool_calls", "include_reasoning")
    want = wanted(fields, wish, [prompt], served, logprobs=logprobs)
    writer = ChatWriter(model, want, top=top > 0, as_ids=fields.flag("return_tokens_as_token_ids"))
    without_effect(fields)
    fields.end()
    return wish.order(writer, stream=want.stream, prompt_name="messages")


async def chat_prompt(fields: Fields, served: Served) -> list[int]:
    """The token ids of `messages`, by the model folder's chat template."""
    messages = _messages(fields.take("messages"))
    kwargs = fields.take("chat_template_kwargs", {})
    if not isinstance(kwargs, dict):
        raise bad("chat_template_kwargs must be an object", "chat_template_kwargs")
    fields.only("chat_template", why="the model folder's template is used; a request's own would run its code here")
    documents = fields.take("documents")
    if documents is not None:
        if not isinstance(documents, list):
            raise bad("documents must be a list", "documents")
        kwargs = {**kwargs, "documents": documents}
    extend = fields.flag("continue_final_message")
    opening = fields.flag("add_generation_prompt", not extend)
    if extend and opening:
        raise bad("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")
    special = fields.flag("add_special_tokens")
    rendered = await served.text.chat(messages, kwargs, add_generation_prompt=opening, continue_final_message=extend)
    (ids,) = await served.text.encode([rendered], served.max_model_len, special=special, param="messages")
    return ids


def _messages(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise bad("messages must be a list, and not empty", "messages")
    messages = []
    for number, message in enumerate(given):
        where = f"messages[{number}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise bad(f"{where} must be an object with a role", where)
        messages.append({**message, "content": _content(message.get("content"), f"{where}.content")})
    return messages


def _content(given: Any, where: str) -> str:
    """Text, or parts of text as OpenAI writes them, one below the other."""
    if given is None or isinstance(given, str):
        return given or ""
    if not isinstance(given, list):
        raise bad(f"{where} must be text or a list of parts", where)
    parts = []
    for part in given:
        if isinstance(part, dict) and part.get("type") not in ("text", "input_text", None):
            raise unsupported(where, f"a part of type {part['type']!r} is not text")
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise bad(f"{where} has a part without text", where)
        parts.append(text)
    return "\n".join(parts)


class ChatWriter(OpenAIWriter):
    """See `Writer`."""

    def __init__(self, model: str, wanted: Wanted, *, top: bool, as_ids: bool) -> None:
        id = f"chatcmpl-{wanted.name}"
        about = {"id": id, "object": "chat.completion.chunk", "created": int(time.time()), "model": model}
        super().__init__(wanted, about, id)
        self._top = top
        self._as_ids = as_ids

    def whole(self, deltas: list[Delta]) -> Any:
        answer: dict[str, Any] = {**self._head, "object": "chat.completion", "choices": []}
        for index, delta in enumerate(deltas):
            message = {"role": "assistant", "content": delta.text}
            answer["choices"].append(self._choice(index, delta, "message", message))
        if self._wanted.token_ids:
            answer["prompt_token_ids"] = self.asks[0].prompt_ids
        answer["usage"] = self._usage()
        return answer

    def first(self) -> list[Any]:
        chunks = []
        for index in range(len(self.asks)):
            choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            chunk = self._event(index, {**choice, "finish_reason": None})
            if self._wanted.token_ids and index == 0:
                chunk["prompt_token_ids"] = self.asks[0].prompt_ids
            chunks.append(chunk)
        return chunks

    def chunk(self, index: int, delta: Delta) -> Any:
        return self._event(index, self._choice(index, delta, "delta", {"content": delta.text}))

    def _choice(self, index: int, delta: Delta, field: str, message: dict[str, Any]) -> dict[str, Any]:
        self._made[index] += len(delta.ids)
        choice: dict[str, Any] = {
            "index": index,
            field: message,
            "logprobs": self._logprobs_of(delta) if self._wanted.logprobs else None,
            "finish_reason": delta.finish or None,
            "stop_reason": delta.stop_reason,
        }
        if self._wanted.token_ids:
            choice["token_ids"] = delta.ids
        return choice

    def _logprobs_of(self, delta: Delta) -> dict[str, Any]:
        return {"content": token_logprobs(delta, self._text, as_ids=self._as_ids, top=self._top)}


def token_logprobs(delta: Delta, text: Text, *, as_ids: bool, top: bool) -> list[dict[str, Any]]:
    """One entry per token, in the form of OpenAI's chat; with `top` the token itself is its only candidate."""
    entries = []
    for token, value in zip(delta.ids, delta.logprobs, strict=True):
        spelt = text.spell(token)
        entry: dict[str, Any] = {
            "token": f"token_id:{token}" if as_ids else spelt,
            "logprob": value,
            "bytes": list(spelt.encode("utf-8", errors="replace")),
        }
        entries.append({**entry, "top_logprobs": [entry] if top else []})
    return entries
