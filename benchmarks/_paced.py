"""An engine that only keeps time, as one on a GPU elsewhere does: no processor here is busy while the model thinks.

It stands behind the same `generate` hook as the real one and delivers tokens one by one at a fixed rate, so that
journal, events and event loop have the work that a real engine gives them. Tokens are a function of (seed, position).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, cast

from belayer.engine import Engine, GenerationRequest, TokenChunk, TokenSink
from belayer.run import Run

VOCABULARY = 4096
PACE = 50.0  # tokens a second of one request


class PacedEngine:
    """`tokens_per_s` for each request, whatever else is in flight."""

    worker_pid: int | None = None
    shadow_pid: int | None = None
    policy_version = 0

    def __init__(self, tokens_per_s: float = PACE) -> None:
        self._rate = tokens_per_s
        self.generated = 0

    async def generate(self, request: GenerationRequest, on_tokens: TokenSink) -> str:
        """Token n of the turn arrives n / rate seconds after the request; the last one says "length"."""
        loop = asyncio.get_running_loop()
        first = done = len(request.resume_ids)
        total, seed = request.sampling.max_tokens, request.sampling.seed
        begun = loop.time()
        while done < total:
            await asyncio.sleep((done + 1 - first) / self._rate - (loop.time() - begun))
            due = min(total, max(done + 1, first + int((loop.time() - begun) * self._rate)))
            ids = [token(seed, position) for position in range(done, due)]
            finish = "length" if due == total else None
            on_tokens(
                TokenChunk(
                    request_id=request.id,
                    start=done,
                    token_ids=ids,
                    logprobs=[-1.0] * len(ids),
                    weights_version=0,
                    finish_reason=finish,
                )
            )
            self.generated += due - done
            done = due
        return "length"

    async def end_trajectory(self, name: str) -> None:
        pass

    async def close(self) -> None:
        pass


def token(seed: int, position: int) -> int:
    """Something that looks like a token, and is the same whenever it is asked for."""
    return ((seed ^ (position * 0x9E3779B1)) * 0x85EBCA77 >> 13) % VOCABULARY


class PacedRun(Run):
    """A run, whole and real, whose engine is the above."""

    async def _start_engine(self, weights: Iterable[tuple[str, Any]] | None, policy_version: int) -> Engine:
        return cast(Engine, PacedEngine())
