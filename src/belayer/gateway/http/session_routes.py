"""`/sessions`: what a trainer asks about a rollout, and tells about it."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from belayer.gateway.dialects._fields import Fields
from belayer.gateway.gateway import Gateway
from belayer.gateway.http.guards import json_response, read_json
from belayer.gateway.problems import bad
from belayer.gateway.sessions.book import describe

STATES = ("open", "finished", "failed", "deleted")


def session_routes() -> list[tuple[str, str, Any]]:
    return [
        ("GET", "/sessions", _list),
        ("POST", "/sessions", _create),
        ("GET", "/sessions/{id}", _get),
        ("POST", "/sessions/{id}/finish", _finish),
        ("DELETE", "/sessions/{id}", _delete),
    ]


async def _list(gateway: Gateway, request: Request) -> Response:
    wanted = request.query_params.get("state")
    if wanted is not None and wanted not in STATES:
        raise bad(f"state must be one of {', '.join(STATES)}", "state")
    about = [describe(session, tokens=False) for session in gateway.sessions.all()]
    return json_response({"sessions": [item for item in about if wanted in (None, item["state"])]})


async def _create(gateway: Gateway, request: Request) -> Response:
    """A session before its first request, to say its group, its task and its seed."""
    fields = Fields(await read_json(request, gateway.settings.max_body_bytes, empty=True))
    id, group, task = fields.text("id", uuid.uuid4().hex), fields.text("group"), fields.take("task")
    seed = fields.take("seed")
    if seed is not None and (type(seed) is not int or not 0 <= seed < 1 << 63):
        raise bad("seed must be a whole number in [0, 2**63)", "seed")
    fields.end()
    session, new = gateway.sessions.create(id, group, task, seed)
    about = describe(session, tokens=False) | {"base_url": f"/sessions/{session.id}/v1"}
    return json_response(about, 201 if new else 200)


async def _get(gateway: Gateway, request: Request) -> Response:
    return json_response(describe(gateway.sessions.get(request.path_params["id"])))


async def _finish(gateway: Gateway, request: Request) -> Response:
    """The rollout's end: `{"reward": 1.0}`, or `{"failed": "why"}` where there is none. Answers with trajectories."""
    fields = Fields(await read_json(request, gateway.settings.max_body_bytes))
    reward, failed = fields.take("reward"), fields.take("failed")
    fields.end()
    session = gateway.sessions.get(request.path_params["id"])
    if (reward is None) == (failed is None):
        raise bad("give either reward or failed", "reward")
    if failed is not None:
        await gateway.sessions.fail(session, failed)
    else:
        await gateway.sessions.finish(session, reward)
    return json_response(describe(session))


async def _delete(gateway: Gateway, request: Request) -> Response:
    session = gateway.sessions.get(request.path_params["id"])
    await gateway.sessions.delete(session)
    return json_response(describe(session, tokens=False))
