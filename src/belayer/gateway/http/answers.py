"""Sending what is generated: at once when it is complete, or as server-sent events while it grows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from belayer.gateway.dialects import Delta, Order, View
from belayer.gateway.http.guards import json_response
from belayer.gateway.problems import Problem, problem_of

HEARTBEAT = b": generating\n\n"
DONE = b"data: [DONE]\n\n"


class Gone(Exception):
    """The client has closed its connection."""


async def whole(request: Request, order: Order, views: list[View]) -> Response:
    """The complete answer. Raises what the completions raise, and `Gone`."""
    bell = asyncio.Event()
    gone = asyncio.ensure_future(_disconnected(request))
    _listen(views, bell)
    try:
        while not all(view.generation.done for view in views):
            ring = asyncio.ensure_future(bell.wait())
            try:
                await asyncio.wait([ring, gone], return_when=asyncio.FIRST_COMPLETED)
            finally:
                ring.cancel()
            if gone.done():
                raise Gone
            bell.clear()
        for view in views:
            if view.generation.error is not None:
                raise view.generation.error
        deltas = [view.take() for view in views]
        return json_response(order.writer.whole([delta for delta in deltas if delta is not None]))
    finally:
        gone.cancel()
        _unlisten(views, bell)


def streamed(
    order: Order,
    views: list[View],
    heartbeat_s: float,
    *,
    ended: Callable[[bool], None],
    told: Callable[[Problem], None],
) -> Response:
    """A stream of events. `ended` is called once, with whether everything was handed over."""
    return StreamingResponse(
        _events(order, views, heartbeat_s, ended, told),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


async def _events(
    order: Order,
    views: list[View],
    heartbeat_s: float,
    ended: Callable[[bool], None],
    told: Callable[[Problem], None],
) -> AsyncIterator[bytes]:
    bell = asyncio.Event()
    _listen(views, bell)
    complete = False
    try:
        for item in order.writer.first():
            yield event(item)
        while not all(view.over for view in views):
            bell.clear()
            # an error ends the stream, but not before everything that is good was sent
            errors = [view.generation.error for view in views if view.generation.error is not None]
            for index, delta in _news(views):
                yield event(order.writer.chunk(index, delta))
            if errors:
                problem = problem_of(errors[0])
                told(problem)
                yield event(problem.body())
                return
            if all(view.over for view in views):
                break
            try:
                await asyncio.wait_for(bell.wait(), heartbeat_s)
            except TimeoutError:
                # tells proxies and clients that this stream is alive, whatever the worker goes through
                yield HEARTBEAT
        for item in order.writer.last():
            yield event(item)
        yield DONE
        complete = True
    finally:
        _unlisten(views, bell)
        ended(complete)


def event(item: Any) -> bytes:
    return b"data: " + msgspec.json.encode(item) + b"\n\n"


def _news(views: list[View]) -> list[tuple[int, Delta]]:
    taken = [(index, view.take()) for index, view in enumerate(views)]
    return [(index, delta) for index, delta in taken if delta is not None]


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _listen(views: list[View], bell: asyncio.Event) -> None:
    for view in views:
        view.generation.bells.add(bell)


def _unlisten(views: list[View], bell: asyncio.Event) -> None:
    for view in views:
        view.generation.bells.discard(bell)
