"""Tokens on their way to the driver, gathered for a moment.

A small model makes hundreds of steps a second, and waking the driver for each of them takes the processor from the next
one. So tokens wait for those of the following steps, for `GATHER_S` at most; steps that are slower than that send each
of their tokens at once. Nothing is at stake: tokens that a worker's death catches here are made again, the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from belayer.engine._wire import Chunk

GATHER_S = 0.03


class Outbox:
    """Chunks of steps under one policy version.

    A request's first and last token wait for nothing, nor does any token of a request that the driver may have to end.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Chunk] = {}
        self._begun: set[str] = set()  # requests whose first token from this worker has been sent
        self._watched: set[str] = set()
        self._urgent = False
        self._sent_at = float("-inf")

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def expect(self, key: str, *, watched: bool) -> None:
        """A request begins. `watched`: the driver looks for something in its tokens."""
        if watched:
            self._watched.add(key)

    def add(self, chunks: Iterable[Chunk]) -> None:
        """The outcome of a step, after those before it."""
        for chunk in chunks:
            if chunk.id not in self._begun or chunk.finish_reason is not None or chunk.id in self._watched:
                self._urgent = True
            if chunk.finish_reason is None:
                self._begun.add(chunk.id)
            else:
                self._begun.discard(chunk.id)
                self._watched.discard(chunk.id)
            before = self._waiting.get(chunk.id)
            if before is None:
                self._waiting[chunk.id] = chunk
            else:
                before.token_ids += chunk.token_ids
                before.logprobs += chunk.logprobs
                before.finish_reason = chunk.finish_reason

    def due(self, now: float, step_s: float) -> bool:
        """Whether what waits must be sent before another step, which may take `step_s` like the one before."""
        return bool(self._waiting) and (self._urgent or now + step_s - self._sent_at > GATHER_S)

    def take(self, now: float) -> list[Chunk]:
        """What waits; it counts as sent."""
        chunks = list(self._waiting.values())
        self._waiting = {}
        self._urgent = False
        self._sent_at = now
        return chunks

    def forget(self, ids: Iterable[str]) -> None:
        """These requests were aborted: nobody waits for their tokens."""
        for key in ids:
            self._waiting.pop(key, None)
            self._begun.discard(key)
            self._watched.discard(key)
