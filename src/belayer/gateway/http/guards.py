"""What a request must pass before it is looked at: the token, and the size of its body."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from belayer.gateway.problems import Problem, bad

OPEN = ("/health", "/ping")
BODY_S = 60.0


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def problem_response(problem: Problem) -> Response:
    return json_response(problem.body(), problem.status, problem.headers())


class BearerToken:
    """Middleware: every path but `/health` needs the token. Compared in constant time."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or self._right(scope):
            await self._app(scope, receive, send)
            return
        problem = Problem(401, "a valid bearer token is needed: Authorization: Bearer …", code="invalid_token")
        response = problem_response(problem)
        response.headers["WWW-Authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _right(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == b"authorization":
                kind, _, given = value.partition(b" ")
                return kind.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._token)
        return False


async def read_json(request: Request, limit: int, *, empty: bool = False) -> Any:
    """The body as JSON. Raises `Problem` for what is too large (413) or none; with `empty`, no body is an object."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        raise Problem(408, f"the body was not complete after {BODY_S:g} s", code="slow_body") from None
    except ClientDisconnect:
        raise bad("the client went away before its body was complete") from None
    if empty and not body.strip():
        return {}
    try:
        return msgspec.json.decode(bytes(body))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise bad(f"the body is not JSON: {error}", code="invalid_json") from None


def _too_large(limit: int) -> Problem:
    return Problem(413, f"the body is larger than {limit} bytes", code="body_too_large")
