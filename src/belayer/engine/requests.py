"""The requests in flight: who works on which, and which tokens count.

Pure bookkeeping, without processes or an event loop. It holds three of the engine's promises: a token is delivered
once, in order and without gaps; nothing that a fenced generation says is delivered; a request is with one worker at a
time.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from belayer.engine._wire import Chunk, Work
from belayer.engine.lifecycle import REQUEST, Lifecycle, RequestState
from belayer.engine.request import GenerationRequest, TokenSink
from belayer.engine.stopping import StopWatch


class Verdict(enum.Enum):
    """What is to be done with a chunk of tokens."""

    DELIVER = enum.auto()
    STALE = enum.auto()  # of a fenced generation, or of a request that has ended: dropped, and counted
    BROKEN = enum.auto()  # a gap or a repetition: the worker cannot be trusted


class Flight:
    """One request. What the caller's sink has been given, `done_ids`, is all that is remembered of its completion."""

    def __init__(self, key: str, request: GenerationRequest, sink: TokenSink, clock: Callable[[], float]) -> None:
        self.key = key
        self.request = request
        self.sink = sink
        self.done_ids = list(request.resume_ids)
        self.generation: int | None = None  # the worker that has it
        self.began_with: int | None = None  # policy version of its first token here
        self.life = Lifecycle(REQUEST, clock)
        self.watch: StopWatch | None = None  # looks for its stop strings
        self.outcome: Any = None  # the future that its caller waits for

    def work(self) -> Work:
        return Work(self.key, self.request.prompt_ids, self.done_ids, self.request.sampling)

    # a caller that was cancelled in this turn of the event loop has not ended the request yet, and hears nothing more
    def finish(self, reason: str) -> None:
        if not self.outcome.done():
            self.outcome.set_result(reason)

    def fail(self, error: Exception) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)

    @property
    def length(self) -> int:
        """Tokens to prefill before its next one."""
        return len(self.request.prompt_ids) + len(self.done_ids)


class Requests:
    """All requests in flight, by a key of their own that no two calls ever share.

    A worker that has not heard of a cancellation yet still sends tokens; they must not be taken for those of a new
    request with the same id.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._flights: dict[str, Flight] = {}
        self._keys = itertools.count(1)
        self._owed: set[str] = set()  # interrupted by a fault, and without a token since
        self.stale_tokens = 0

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self._flights.values()))

    def has(self, request_id: str) -> bool:
        return any(flight.request.id == request_id for flight in self._flights.values())

    def add(self, request: GenerationRequest, sink: TokenSink) -> Flight:
        flight = Flight(f"{next(self._keys)}:{request.id}", request, sink, self._clock)
        self._flights[flight.key] = flight
        return flight

    def give(self, flight: Flight, generation: int) -> Work:
        """The serving worker gets a new request."""
        flight.life.to(RequestState.PREFILLING)
        flight.generation = generation
        return flight.work()

    def give_all(self, generation: int) -> list[Work]:
        """A new worker gets everything, what needs the least prefill first."""
        flights = sorted(self._flights.values(), key=lambda flight: flight.length)
        self._owed = {flight.key for flight in flights}
        return [self.give(flight, generation) for flight in flights]

    def take_back(self, generation: int) -> None:
        """`generation` is fenced: its requests wait for another worker, with the tokens they have."""
        for flight in self._flights.values():
            if flight.generation == generation:
                flight.life.to(RequestState.QUEUED)
                flight.generation = None

    def judge(self, generation: int, policy_version: int, chunk: Chunk) -> tuple[Verdict, Flight | None]:
        """Whether the tokens of `chunk` count; if they do, they are part of the request from here on."""
        flight = self._flights.get(chunk.id)
        if flight is None or flight.generation != generation:
            self.stale_tokens += len(chunk.token_ids)
            return Verdict.STALE, None
        if chunk.start != len(flight.done_ids):
            return Verdict.BROKEN, flight
        if flight.life.state is RequestState.PREFILLING:
            flight.life.to(RequestState.DECODING)
        if flight.began_with is None:
            flight.began_with = policy_version
        flight.done_ids += chunk.token_ids
        self._owed.discard(chunk.id)
        return Verdict.DELIVER, flight

    def end(self, flight: Flight, how: RequestState) -> None:
        """It leaves. Ending one that has left already changes nothing."""
        if self._flights.pop(flight.key, None) is not None:
            flight.life.to(how)
            self._owed.discard(flight.key)

    @property
    def rebuilt(self) -> bool:
        """Whether every request that a fault interrupted has had a token since, or has ended."""
        return not self._owed
