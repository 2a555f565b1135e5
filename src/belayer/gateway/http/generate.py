"""The routes that generate: four dialects, each with and without a session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from belayer.gateway.dialects import Order, Served, View, chat_order, completions_order, sglang_order, vllm_order
from belayer.gateway.gateway import Gateway
from belayer.gateway.http.answers import streamed, whole
from belayer.gateway.http.guards import read_json
from belayer.gateway.problems import Problem, bad
from belayer.gateway.sessions import Turn

Dialect = Callable[[Any, Served], Awaitable[Order]]
_DIALECTS: dict[str, Dialect] = {
    "/v1/completions": completions_order,
    "/v1/chat/completions": chat_order,
    "/inference/v1/generate": vllm_order,
    "/generate": sglang_order,
}


def generate_routes() -> list[tuple[str, str, Any]]:
    table = []
    for path, dialect in _DIALECTS.items():
        handler = _handler(dialect)
        methods = ("POST", "PUT") if path == "/generate" else ("POST",)  # SGLang takes both
        table += [(method, prefix + path, handler) for method in methods for prefix in ("", "/sessions/{id}")]
    return table


def _handler(dialect: Dialect) -> Callable[[Gateway, Request], Awaitable[Response]]:
    async def handle(gateway: Gateway, request: Request) -> Response:
        body = await read_json(request, gateway.settings.max_body_bytes)
        order = await dialect(body, gateway.served)
        session = session_of(request)
        if not session:
            return await _free(gateway, request, order)
        return await _bound(gateway, request, order, session)

    return handle


def session_of(request: Request) -> str:
    """The id of the session that a request belongs to, by its path or its header; "" for none."""
    path, header = request.path_params.get("id", ""), request.headers.get("x-session-id", "")
    if path and header and path != header:
        raise bad(f"the path names session {path!r} and X-Session-ID {header!r}", "X-Session-ID")
    return path or header


async def _free(gateway: Gateway, request: Request, order: Order) -> Response:
    """Nobody but this client will ever ask for it: it ends with the connection."""
    views = gateway.free(order)
    if order.stream:
        return _stream(gateway, order, views, lambda complete: _drop(gateway, views))
    try:
        return await whole(request, order, views)
    finally:
        _drop(gateway, views)


async def _bound(gateway: Gateway, request: Request, order: Order, session: str) -> Response:
    """Its tokens are in the journal: it goes on without its client, for the retry."""
    key = request.headers.get("idempotency-key", "")
    named = key or request.headers.get("x-request-id", "")
    if len(named) > 256:
        raise bad("an idempotency key has up to 256 characters", "Idempotency-Key")
    # the openai client says so when it asks again
    retry = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
    views, turn = gateway.bound(order, session, key=named, strict=bool(key), retry=retry)
    if order.stream:
        return _stream(gateway, order, views, lambda complete: _answered(gateway, views, turn, complete))
    response = await whole(request, order, views)
    _answered(gateway, views, turn, True)
    return response


def _stream(gateway: Gateway, order: Order, views: list[View], ended: Callable[[bool], None]) -> Response:
    told_problem = False

    def told(problem: Problem) -> None:
        nonlocal told_problem
        told_problem = True
        gateway.metrics.stream_errors.inc()

    def end(complete: bool) -> None:
        if not complete and not told_problem:
            gateway.metrics.disconnects.inc()
        ended(complete)

    return streamed(order, views, gateway.settings.heartbeat_s, ended=end, told=told)


def _drop(gateway: Gateway, views: list[View]) -> None:
    for view in views:
        gateway.metrics.tokens.inc(len(view.generation.ids))
        gateway.runner.drop(view.generation)


def _answered(gateway: Gateway, views: list[View], turn: Turn, complete: bool) -> None:
    if complete:
        gateway.metrics.tokens.inc(len(views[0].generation.ids))
        turn.handed_over()
