"""What is served and how it is: models, health, and the questions that vLLM's and SGLang's clients ask."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from belayer.engine import Sampling
from belayer.gateway.dialects._fields import Fields, is_ids
from belayer.gateway.dialects.chat import chat_prompt
from belayer.gateway.gateway import Gateway
from belayer.gateway.generation import Generation
from belayer.gateway.http.guards import json_response, read_json
from belayer.gateway.problems import Problem, bad
from belayer.versions import versions

PROBE_S = 20.0
_STARTED = int(time.time())


def info_routes() -> list[tuple[str, str, Any]]:
    table = [
        ("GET", "/v1/models", _models),
        ("GET", "/v1/models/{name:path}", _model),
        ("GET", "/health", _health),
        ("GET", "/ping", _health),
        ("GET", "/health_generate", _health_generate),
        ("GET", "/version", _version),
        ("GET", "/get_model_info", _model_info),
        ("GET", "/model_info", _model_info),
        ("GET", "/server_info", _server_info),
        ("GET", "/get_server_info", _server_info),
        ("GET", "/get_world_size", _world_size),
        ("GET", "/load", _load),
        ("GET", "/v1/loads", _loads),
        ("POST", "/tokenize", _tokenize),
        ("POST", "/detokenize", _detokenize),
    ]
    return [*table, ("GET", "/sessions/{id}/v1/models", _models)]


def _card(gateway: Gateway, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "belayer",
        "root": gateway.upstream.model,
        "parent": None,
        "max_model_len": gateway.upstream.max_model_len,
        "permission": [],
    }


async def _models(gateway: Gateway, request: Request) -> Response:
    return json_response({"object": "list", "data": [_card(gateway, name) for name in gateway.served.shown]})


async def _model(gateway: Gateway, request: Request) -> Response:
    name = request.path_params["name"]
    if name not in gateway.served.names:
        raise Problem(404, f"the model {name!r} is not served here", param="model", code="model_not_found")
    return json_response(_card(gateway, name))


async def _health(gateway: Gateway, request: Request) -> Response:
    """200 only while requests can be served: a worker that is being replaced is no reason to say otherwise."""
    if gateway.draining:
        raise Problem(503, "the gateway is shutting down", code="shutting_down", retry_after_s=2)
    return json_response(await gateway.health())


async def _health_generate(gateway: Gateway, request: Request) -> Response:
    """Generate one token. The probe ends with its deadline: none is left behind."""
    if gateway.runner.paused:
        raise Problem(503, "generation is paused", code="paused", retry_after_s=2)
    probe = Generation([0], Sampling(max_tokens=1, temperature=0.0))
    gateway.upstream.check(probe.request(0))
    gateway.runner.start(probe)
    try:
        await asyncio.wait_for(probe.wait(), PROBE_S)
    except TimeoutError:
        raise Problem(503, f"no token within {PROBE_S:g} s", code="unhealthy", retry_after_s=2) from None
    finally:
        gateway.runner.drop(probe)
    return await _health(gateway, request)


async def _version(gateway: Gateway, request: Request) -> Response:
    return json_response({"version": versions().get("belayer", ""), "belayer": versions()})


async def _model_info(gateway: Gateway, request: Request) -> Response:
    return json_response(
        {
            "model_path": gateway.upstream.model,
            "tokenizer_path": str(gateway.text.folder or ""),
            "is_generation": True,
            "weight_version": str(gateway.upstream.policy_version),
            "max_model_len": gateway.upstream.max_model_len,
        }
    )


async def _server_info(gateway: Gateway, request: Request) -> Response:
    """The parts of vLLM's and SGLang's answers that trainers read. No weights travel over collectives."""
    return json_response(
        {
            "model_path": gateway.upstream.model,
            "tp_size": 1,
            "dp_size": 1,
            "pp_size": 1,
            "version": versions().get("belayer", ""),
            "vllm_config": {
                "model_config": {
                    "model": gateway.upstream.model,
                    "max_model_len": gateway.upstream.max_model_len,
                    "dtype": gateway.upstream.dtype,
                },
                "weight_transfer_config": None,
            },
        }
    )


async def _world_size(gateway: Gateway, request: Request) -> Response:
    return json_response({"world_size": 1})


async def _load(gateway: Gateway, request: Request) -> Response:
    return json_response({"server_load": gateway.runner.running})


async def _loads(gateway: Gateway, request: Request) -> Response:
    """SGLang's, as far as slime reads it."""
    return json_response({"loads": [{"dp_rank": 0, "num_running_reqs": gateway.runner.running, "num_waiting_reqs": 0}]})


async def _tokenize(gateway: Gateway, request: Request) -> Response:
    """vLLM's: the token ids of a prompt or of messages."""
    fields = Fields(await read_json(request, gateway.settings.max_body_bytes))
    text = gateway.text
    pieces = fields.flag("return_token_strs")
    fields.without_effect("model", "return_token_offsets")
    fields.only("tools", [], why="tool calls are not parsed")
    fields.only("mm_processor_kwargs", {}, why="it is for inputs that are not tokens")
    fields.only("required_prefix_token_ids", [], why="send token ids to /v1/completions instead")
    if "messages" in fields:
        ids = await chat_prompt(fields, gateway.served)
    else:
        prompt, special = fields.text("prompt"), fields.flag("add_special_tokens", True)
        (ids,) = await text.encode([prompt], gateway.upstream.max_model_len, special=special)
    fields.end()
    strings = [text.spell(token) for token in ids] if pieces else None
    return json_response(
        {"count": len(ids), "max_model_len": gateway.upstream.max_model_len, "tokens": ids, "token_strs": strings}
    )


async def _detokenize(gateway: Gateway, request: Request) -> Response:
    fields = Fields(await read_json(request, gateway.settings.max_body_bytes))
    ids = fields.take("tokens")
    if not is_ids(ids) or any(token >= 1 << 32 for token in ids):
        raise bad("tokens must be a list of token ids", "tokens")
    fields.without_effect("model")
    fields.end()
    return json_response({"prompt": gateway.text.decode(ids, skip_special=False)})
