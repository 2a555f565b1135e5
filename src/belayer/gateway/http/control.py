"""What trainers tell an engine: pause, resume, abort, new weights. By the names that vLLM and SGLang have for it.

Weights come as a folder that this host can read. What would need a collective with the trainer, or would give memory
away that the owner holds, is answered with 501 and what to do instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from belayer.errors import WeightsError
from belayer.gateway.dialects._fields import Fields
from belayer.gateway.gateway import Gateway
from belayer.gateway.generation import PauseMode
from belayer.gateway.http.guards import json_response, read_json
from belayer.gateway.problems import Problem, bad

_VLLM_MODES: dict[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "keep"}
# SGLang's "retract" frees the KV of what it freezes and "in_place" keeps it; here it can always be rebuilt
_SGLANG_MODES: dict[str, PauseMode] = {"abort": "abort", "retract": "keep", "in_place": "keep"}

_BY_FOLDER = (
    "save the weights as a model folder that this host can read and POST /update_weights_from_disk "
    '{"model_path": "…", "weight_version": "7"}'
)
_NOT_OFFERED = {
    "/update_weights_from_tensor": _BY_FOLDER,
    "/areal_init_weights_update_group": _BY_FOLDER,
    "/areal_set_update_weight_meta": _BY_FOLDER,
    "/areal_update_weights_xccl": _BY_FOLDER,
    "/pull_weights": _BY_FOLDER,
    "/fetch_weights": _BY_FOLDER,
    "/update_weights_from_distributed": _BY_FOLDER,
    "/init_weights_update_group": _BY_FOLDER,
    "/destroy_weights_update_group": _BY_FOLDER,
    "/init_weight_transfer_engine": _BY_FOLDER,
    "/shutdown_weight_transfer_engine": _BY_FOLDER,
    "/start_weight_update": _BY_FOLDER,
    "/update_weights": _BY_FOLDER,
    "/finish_weight_update": _BY_FOLDER,
    "/collective_rpc": _BY_FOLDER,
    "/sleep": "the owner process holds weights and KV for the shadow's sake; stop `belayer serve` to free them",
    "/wake_up": "there is no /sleep here, so nothing sleeps",
    "/release_memory_occupation": "the owner process holds weights and KV; stop `belayer serve` to free them",
    "/resume_memory_occupation": "there is no /release_memory_occupation here, so nothing was released",
    "/v1/load_lora_adapter": "merge the adapter into the weights; " + _BY_FOLDER,
    "/v1/unload_lora_adapter": "adapters are not served",
}


def control_routes() -> list[tuple[str, str, Any]]:
    table = [
        ("POST", "/pause", _pause),
        ("POST", "/resume", _resume),
        ("GET", "/is_paused", _is_paused),
        ("POST", "/pause_generation", _pause_generation),
        ("POST", "/continue_generation", _continue_generation),
        ("POST", "/abort_requests", _abort_requests),
        ("POST", "/abort_request", _abort_requests),
        ("POST", "/update_weights_from_disk", _update_weights),
        ("POST", "/areal_update_weights", _update_weights),
        ("POST", "/areal_pause_generation", _pause_generation),
        ("POST", "/areal_continue_generation", _continue_generation),
        ("POST", "/finish_session", _finish_session),
        ("GET", "/weight_info", _weight_info),
        ("GET", "/get_weight_version", _weight_info),
        ("GET", "/is_sleeping", _is_sleeping),
    ]
    for method in ("GET", "POST"):
        table += [(method, path, _flush) for path in ("/flush_cache", "/reset_prefix_cache")]
    return table + [("POST", path, _refuse) for path in _NOT_OFFERED]


async def _pause(gateway: Gateway, request: Request) -> Response:
    mode = request.query_params.get("mode", "abort")
    if mode not in _VLLM_MODES:
        raise bad("mode must be abort, wait or keep", "mode")
    await gateway.runner.pause(_VLLM_MODES[mode])
    return json_response({"status": "paused"})


async def _resume(gateway: Gateway, request: Request) -> Response:
    gateway.runner.resume()
    return json_response({"status": "resumed"})


async def _is_paused(gateway: Gateway, request: Request) -> Response:
    return json_response({"is_paused": gateway.runner.paused})


async def _pause_generation(gateway: Gateway, request: Request) -> Response:
    fields = Fields(await read_json(request, gateway.settings.max_body_bytes, empty=True))
    mode = fields.text("mode", "abort")
    fields.end()
    if mode not in _SGLANG_MODES:
        raise bad("mode must be abort, retract or in_place", "mode")
    count = await gateway.runner.pause(_SGLANG_MODES[mode])
    return json_response({"success": True, "message": "paused", "num_paused_requests": count})


async def _continue_generation(gateway: Gateway, request: Request) -> Response:
    gateway.runner.resume()
    return json_response({"success": True, "message": "generation goes on"})


async def _abort_requests(gateway: Gateway, request: Request) -> Response:
    """End what is under way where it is: all of it, or the requests of these ids. Unknown ids are ignored.

    An id is SGLang's `rid`, vLLM's `request_id`, or the `id` of an answer whose stream has begun.
    """
    fields = Fields(await read_json(request, gateway.settings.max_body_bytes, empty=True))
    some, rid, everything = fields.strings("request_ids"), fields.text("rid"), fields.flag("abort_all")
    fields.without_effect("abort_message")
    fields.end()
    named = frozenset((*some, rid)) - {""}
    count = gateway.runner.abort_all(None if everything or not named else named)
    return json_response({"status": "aborted", "aborted": count})


async def _finish_session(gateway: Gateway, request: Request) -> Response:
    """What SkyRL tells its router: the session makes no more requests. Updates of the weights need not wait for it."""
    id = request.query_params.get("session_id", "")
    if not id:
        raise bad("session_id must name a session", "session_id")
    known = await gateway.sessions.rest(id)
    return json_response({"status": "ok", "known": known})


async def _update_weights(gateway: Gateway, request: Request) -> Response:
    """SGLang's. `weight_version`, if it is a number, becomes the policy version; else versions count up by one."""
    fields = Fields(await read_json(request, gateway.settings.max_body_bytes))
    folder, label = fields.text("model_path"), fields.take("weight_version")
    abort = fields.flag("abort_all_requests")
    fields.only("load_format", "auto", "safetensors", why="weights are read from safetensors files")
    # KV never outlives the weights that made it, and the caller is answered when the new ones serve
    fields.without_effect("flush_cache", "is_async", "torch_empty_cache", "keep_pause", "recapture_cuda_graph")
    fields.without_effect("token_step", "manifest")
    fields.end()
    if not folder:
        raise bad("model_path must name a folder", "model_path")
    version = int(label) if str(label).isdecimal() and len(str(label)) < 19 else None
    if label is not None and version is None:
        raise bad("weight_version must be a whole number: policy versions are counted", "weight_version")
    if abort:
        gateway.runner.abort_all()
    try:
        serving = await gateway.upstream.update_weights(Path(folder).absolute(), version)
    except WeightsError as error:
        return json_response({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
    return json_response({"success": True, "message": f"policy version {serving} serves", "num_paused_requests": 0})


async def _weight_info(gateway: Gateway, request: Request) -> Response:
    return json_response({"weight_version": str(gateway.upstream.policy_version)})


async def _is_sleeping(gateway: Gateway, request: Request) -> Response:
    return json_response({"is_sleeping": False})


async def _flush(gateway: Gateway, request: Request) -> Response:
    return json_response({"success": True, "message": "nothing to do: no KV outlives the weights that made it"})


async def _refuse(gateway: Gateway, request: Request) -> Response:
    path = request.url.path
    raise Problem(501, f"{path} is not offered: {_NOT_OFFERED[path]}", code="not_offered")
