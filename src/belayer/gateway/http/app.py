"""The ASGI application: every route of the gateway."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from belayer.errors import BelayerError
from belayer.gateway.gateway import Gateway
from belayer.gateway.http.answers import Gone
from belayer.gateway.http.control import control_routes
from belayer.gateway.http.generate import generate_routes
from belayer.gateway.http.guards import BearerToken, json_response, problem_response
from belayer.gateway.http.info import info_routes
from belayer.gateway.http.session_routes import session_routes
from belayer.gateway.problems import Problem, problem_of

Handler = Callable[[Gateway, Request], Awaitable[Response]]
Table = list[tuple[str, str, Handler]]

_log = logging.getLogger("belayer.gateway")


def make_app(gateway: Gateway) -> Starlette:
    """All routes of `gateway`, behind its token if it has one."""
    table: Table = [
        *info_routes(),
        *generate_routes(),
        *session_routes(),
        *control_routes(),
        ("GET", "/metrics", _metrics),
    ]
    routes = [Route(path, _endpoint(gateway, path, handler), methods=[method]) for method, path, handler in table]
    token = gateway.settings.token
    return Starlette(
        routes=routes,
        middleware=[Middleware(BearerToken, token=token)] if token else [],
        exception_handlers={HTTPException: _http_exception},
    )


def _endpoint(gateway: Gateway, path: str, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        began = time.monotonic()
        try:
            response = await handler(gateway, request)
        except Gone:
            gateway.metrics.disconnects.inc()
            response = Response(status_code=499)  # nobody reads it; 499 is what proxies call this
        except (Problem, BelayerError, TimeoutError) as error:
            response = problem_response(problem_of(error))
        except Exception as error:
            _log.exception("%s %s", request.method, path)
            response = problem_response(problem_of(error))
        gateway.metrics.requests.labels(path, str(response.status_code)).inc()
        gateway.metrics.duration.labels(path).observe(time.monotonic() - began)
        return response

    return endpoint


async def _metrics(gateway: Gateway, request: Request) -> Response:
    return Response(gateway.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


async def _http_exception(request: Request, error: Any) -> Response:
    """Starlette's own 404 and 405, in the form of all others."""
    message = f"{request.method} {request.url.path}: {error.detail}"
    return json_response(Problem(error.status_code, message).body(), error.status_code, error.headers)
