"""How vLLM and SGLang are asked for the rest of a completion, and how their streams are read."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec

from belayer.engine import GenerationRequest
from belayer.seeds import derive_seed

Kind = Literal["vllm", "sglang"]


class Interrupted(Exception):
    """A server did not do its part; another one is to go on."""


class Piece(msgspec.Struct, frozen=True):
    """New tokens from a server. `finish` is empty until the last one."""

    ids: list[int]
    logprobs: list[float]
    version: int
    finish: str


def question(kind: Kind, model: str, request: GenerationRequest, made: list[int]) -> tuple[str, dict[str, Any]]:
    """Path and body that ask for what follows `made`.

    Stop strings are looked for on this side, since one may begin in what another server made. A continued completion
    gets a seed of its own: with the old one a server would repeat its random numbers from the first position on.
    """
    sampling = request.sampling
    seed = (sampling.seed if not made else derive_seed(sampling.seed, f"resumed at {len(made)}")) % (1 << 63)
    prompt = request.prompt_ids + made
    rest = sampling.max_tokens - len(made)
    least = max(0, sampling.min_tokens - len(made))
    common = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    if kind == "vllm":
        body = {"model": model, "prompt": prompt, "max_tokens": rest, "seed": seed, **common}
        return "/v1/completions", body | {"min_tokens": least, "stream": True, "return_token_ids": True, "logprobs": 0}
    params = {**common, "max_new_tokens": rest, "min_new_tokens": least, "sampling_seed": seed, "no_stop_trim": True}
    return "/generate", {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "stream": True}


async def read(kind: Kind, lines: AsyncIterator[str]) -> AsyncIterator[Piece]:
    """The pieces of a stream of server-sent events. Raises `Interrupted` for anything that is not a good one."""
    count = 0
    async for line in lines:
        if not line.startswith("data:"):
            continue  # comments keep the connection alive
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = msgspec.json.decode(data)
            if "error" in event:
                raise Interrupted(f"it reports an error: {event['error']}")
            piece = _vllm(event) if kind == "vllm" else _sglang(event, count)
        except (msgspec.DecodeError, KeyError, TypeError, IndexError, ValueError) as error:
            raise Interrupted(f"its stream cannot be understood: {type(error).__name__}: {error}") from None
        if piece is None:
            continue
        if len(piece.ids) != len(piece.logprobs):
            raise Interrupted(f"it sent {len(piece.ids)} tokens and {len(piece.logprobs)} logprobs")
        if any(value is None or math.isnan(value) for value in piece.logprobs):
            raise Interrupted("its logprobs are not numbers")
        if piece.finish in ("abort", "error"):
            if piece.ids:
                yield Piece(piece.ids, piece.logprobs, piece.version, "")
            raise Interrupted(f"it ended the completion: {piece.finish}")
        count += len(piece.ids)
        yield piece


def _vllm(event: dict[str, Any]) -> Piece | None:
    if not event["choices"]:
        return None
    choice = event["choices"][0]
    ids = choice["token_ids"]
    values = choice["logprobs"]["token_logprobs"] if choice.get("logprobs") else []
    return Piece(list(ids or []), list(values), 0, choice.get("finish_reason") or "")


def _sglang(event: dict[str, Any], count: int) -> Piece:
    meta = event["meta_info"]
    entries = meta["output_token_logprobs"]
    if len(entries) == meta["completion_tokens"]:
        entries = entries[count:]  # events hold the whole completion; servers can be told to send only what is new
    finish = meta.get("finish_reason") or {}
    version = str(meta.get("weight_version"))
    return Piece(
        [entry[1] for entry in entries],
        [entry[0] for entry in entries],
        int(version) if version.isdecimal() else 0,
        finish.get("type", "") if isinstance(finish, dict) else str(finish),
    )
