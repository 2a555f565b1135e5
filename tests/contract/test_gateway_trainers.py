"""What trainers send a gateway today, and how it holds policy versions apart for them.

The bodies below were written down by us after reading the trainers' sources of August 2026 (AReaL: May 2026); none of
these trainers runs here. They hold every field that is sent for text, with its usual value, and each test reads of the
answer what the trainer reads.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.conftest import needs_root, needs_vllm
from tests.engine_kit import VOCABULARY
from tests.gateway_kit import Served, make_chat_model, stream, tokens_of, wait_for

from belayer.verify import verify_run

pytestmark = [pytest.mark.contract, needs_root, needs_vllm]

PROMPT = [(7 * j) % 256 for j in range(30)]
ENDS = list(range(0, VOCABULARY, 3))  # a third of all tokens ends a completion


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Its weights are not exchanged under a session that has begun."""
    engine = {"standby": "none", "version_policy": "finish_on_old", "update_timeout_s": 20.0}
    with Served(tmp_path_factory.mktemp("trainers"), engine) as running:
        yield running


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60, trust_env=False) as client:
        yield client


def post(http: httpx.Client, path: str, body: Any = None, status: int = 200, **kwargs: Any) -> Any:
    response = http.post(path, json=body, **kwargs)
    assert response.status_code == status, response.text
    return response.json()


def update(http: httpx.Client, served: Served, folder: Path, **about: Any) -> dict[str, Any]:
    """New weights, made on the spot."""
    model = make_chat_model(folder, seed=served.gateway.upstream.policy_version + 1)
    return post(http, "/update_weights_from_disk", {"model_path": str(model), **about})


def test_nothing_ends_a_completion_too_early_in_any_dialect(served: Served, http: httpx.Client) -> None:
    same = {"temperature": 0.9, "stop_token_ids": ENDS, "ignore_eos": True}
    free = {"max_tokens": 40, "seed": 6, "return_token_ids": True, **same}
    short = post(http, "/v1/completions", {"prompt": PROMPT, **free})["choices"][0]["token_ids"]
    assert len(short) < 9, "this would show nothing"
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0) as client:
        extra = {"min_tokens": 9, "return_token_ids": True, "stop_token_ids": ENDS, "ignore_eos": True}
        by_client = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=40, seed=6, temperature=0.9, extra_body=extra
        )
    made = by_client.choices[0].token_ids  # type: ignore[attr-defined]
    assert len(made) > 9 and not set(made[:9]) & set(ENDS) and made[-1] in ENDS
    params = {"max_tokens": 40, "min_tokens": 9, "seed": 6, **same}
    by_vllm = post(http, "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": params})
    assert by_vllm["choices"][0]["token_ids"] == made
    params = {"max_new_tokens": 40, "min_new_tokens": 9, "sampling_seed": 6, **same}
    by_sglang = post(http, "/generate", {"input_ids": PROMPT, "sampling_params": params})
    assert by_sglang["output_ids"] == made and by_sglang["meta_info"]["finish_reason"]["matched"] == made[-1]
    chat = {"messages": [{"role": "user", "content": "hi"}], "min_tokens": 9, **free}
    ids = post(http, "/v1/chat/completions", chat)["choices"][0]["token_ids"]
    assert len(ids) > 9 and not set(ids[:9]) & set(ENDS)
    # a stop string that is complete too early does not end the text either
    whole = post(http, "/v1/completions", {"prompt": PROMPT, **free, "stop_token_ids": []})["choices"][0]
    word = whole["text"][1:3]
    again = {"prompt": PROMPT, **free, "stop_token_ids": [], "stop": [word], "min_tokens": 20}
    bounded = post(http, "/v1/completions", again)["choices"][0]
    assert len(bounded["token_ids"]) > 20 and whole["text"].startswith(bounded["text"])


# -- SkyRL -------------------------------------------------------------------------------------------------------------
def test_skyrl(served: Served, http: httpx.Client, tmp_path: Path) -> None:
    """Its RemoteInferenceClient; sampling parameters as get_vllm_sampling_params makes them."""
    params = {
        "min_tokens": 1,
        "skip_special_tokens": True,
        "include_stop_str_in_output": True,
        "max_tokens": 12,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "logprobs": 1,
        "stop": None,
    }
    body = {"sampling_params": params, "model": "tiny", "token_ids": PROMPT, "cache_salt": "3"}
    session = {"Content-Type": "application/json", "X-Session-ID": "train-17_2"}
    (choice,) = post(http, "/inference/v1/generate", body, headers=session)["choices"]
    assert choice["finish_reason"] in ("stop", "length") and len(choice["token_ids"]) >= 1
    assert len([entry["logprob"] for entry in choice["logprobs"]["content"]]) == len(choice["token_ids"])
    # its Tinker API
    tinker = {"n": 2, "logprobs": 0, "output_kind": 2, "prompt_logprobs": None, "temperature": 1.0, "max_tokens": 5}
    answer = post(http, "/inference/v1/generate", {"sampling_params": tinker, "model": "tiny", "token_ids": PROMPT})
    assert [len(choice["logprobs"]["content"]) for choice in answer["choices"]] == [5, 5]
    assert answer["prompt_logprobs"] is None
    text = post(http, "/tokenize", {"model": "tiny", "prompt": "hello", "add_special_tokens": False})["tokens"]
    assert post(http, "/detokenize", {"model": "tiny", "tokens": text})["prompt"] == "hello"
    # control: every server by itself
    assert http.get("/get_world_size").json()["world_size"] == 1
    post(http, "/pause", params={"mode": "keep", "clear_cache": "false"})
    post(http, "/resume")
    post(http, "/reset_prefix_cache", {"reset_running_requests": False})
    for path, what in (
        ("/init_weight_transfer_engine", {"init_info": {}}),
        ("/update_weights", {"update_info": {}}),
        ("/collective_rpc", {"method": "skyrl_start_weight_update", "kwargs": {"is_checkpoint_format": True}}),
        ("/fetch_weights", {"target_version": 3}),
        ("/sleep?level=1", None),
    ):
        assert "not offered" in post(http, path, what, 501)["error"]["message"]
    # what it says to its router when a trajectory is complete lets an update through, without a reward
    assert post(http, "/finish_session", params={"session_id": "train-17_2"})["known"] is True
    assert post(http, "/finish_session", params={"session_id": "never-seen"})["known"] is False
    assert update(http, served, tmp_path / "skyrl")["success"] is True
    assert http.get("/sessions/train-17_2").json()["state"] == "open"


# -- AReaL -------------------------------------------------------------------------------------------------------------
def test_areal_with_sglang(served: Served, http: httpx.Client, tmp_path: Path) -> None:
    params = {
        "top_p": 1.0,
        "top_k": 100_000_000,
        "max_new_tokens": 10,
        "temperature": 1.0,
        "stop_token_ids": [],
        "ignore_eos": False,
        "skip_special_tokens": True,
        "frequency_penalty": 0.0,
    }
    body = {"input_ids": PROMPT, "image_data": [], "sampling_params": params, "return_logprob": True, "stream": False}
    meta = post(http, "/generate", body)["meta_info"]
    assert meta["finish_reason"]["type"] in ("stop", "length")
    assert all(value <= 0 and type(token) is int for value, token, _ in meta["output_token_logprobs"])
    refused = post(http, "/generate", body | {"image_data": ["aGk="]}, 400)
    assert refused["error"]["param"] == "image_data"
    post(http, "/pause_generation", {})
    post(http, "/continue_generation", {})
    done = update(http, served, tmp_path / "areal", abort_all_requests=True)
    assert done["success"] is True
    assert http.get("/health").status_code == 200
    for path in ("/update_weights_from_distributed", "/release_memory_occupation", "/init_weights_update_group"):
        post(http, path, {}, 501)


def test_areal_with_vllm(served: Served, http: httpx.Client, tmp_path: Path) -> None:
    body = {
        "top_p": 1.0,
        "top_k": 100_000_000,
        "max_tokens": 10,
        "temperature": 1.0,
        "stop_token_ids": [],
        "ignore_eos": False,
        "skip_special_tokens": True,
        "return_tokens_as_token_ids": True,
        "logprobs": 0,
        "use_beam_search": False,
        "stream": False,
        "prompt": PROMPT,
    }
    (choice,) = post(http, "/v1/completions", body)["choices"]
    ids = [int(token.split(":")[1]) for token in choice["logprobs"]["tokens"]]
    assert len(ids) == len(choice["logprobs"]["token_logprobs"]) > 0
    post(http, "/areal_pause_generation", {})
    assert http.get("/is_paused").json() == {"is_paused": True}
    post(http, "/areal_continue_generation", {})
    before = served.gateway.upstream.policy_version
    model = make_chat_model(tmp_path / "areal", seed=before + 1)
    assert post(http, "/areal_update_weights", {"model_path": str(model)})["success"] is True
    assert served.gateway.upstream.policy_version == before + 1
    for path in ("/areal_set_update_weight_meta", "/areal_update_weights_xccl", "/areal_init_weights_update_group"):
        post(http, path, {}, 501)


# -- slime -------------------------------------------------------------------------------------------------------------
def test_slime(served: Served, http: httpx.Client, tmp_path: Path) -> None:
    params = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 10,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    body = {"sampling_params": params, "return_logprob": True, "input_ids": PROMPT}
    route = {"X-SMG-Routing-Key": "sample-4"}
    seeded = body | {"sampling_params": params | {"sampling_seed": 43}}
    answers = [post(http, "/generate", seeded, headers=route) for _ in range(2)]
    assert (
        answers[0]["output_ids"]
        == answers[1]["output_ids"]
        == [entry[1] for entry in answers[0]["meta_info"]["output_token_logprobs"]]
    )
    # evaluation, and its agents' adapter
    post(http, "/generate", body | {"sampling_params": params | {"min_new_tokens": 4, "repetition_penalty": 1.1}})
    post(http, "/generate", body | {"rid": "0" * 32})
    # with --rollout-top-p other than 1 it asks for what only its own SGLang can say
    nucleus = params | {"top_p": 0.9, "custom_params": {"return_top_p_token_ids": True}}
    refused = post(http, "/generate", body | {"sampling_params": nucleus}, 400)
    assert refused["error"]["param"] == "sampling_params.custom_params"
    # control
    info = http.get("/server_info").json()
    assert (info["tp_size"], info["pp_size"]) == (1, 1)
    assert http.get("/health_generate").status_code == 200 and http.get("/flush_cache").status_code == 200
    post(http, "/abort_request", {"abort_all": True})
    (load,) = http.get("/v1/loads", params={"include": "core"}).json()["loads"]
    assert load["num_running_reqs"] + load["num_waiting_reqs"] == 0
    post(http, "/pause_generation", {})
    version = str(served.gateway.upstream.policy_version + 5)
    assert update(http, served, tmp_path / "slime", weight_version=version)["success"] is True
    post(http, "/continue_generation", {})
    assert post(http, "/generate", body)["meta_info"]["weight_version"] == version
    post(http, "/pull_weights", {"local_checkpoint_dir": "/a", "source_dir": "/b", "target_version": 3}, 501)


# -- NeMo-Gym ----------------------------------------------------------------------------------------------------------
def test_nemo_gym(http: httpx.Client) -> None:
    history = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "so", "tool_calls": [], "reasoning_content": "hm", "reasoning": "hm"},
        {"role": "user", "content": [{"type": "text", "text": "go on"}]},
    ]
    body = {
        "messages": history,
        "model": "tiny",
        "max_tokens": 9,
        "temperature": 1.0,
        "top_p": 1.0,
        "metadata": {},
        "tools": [],
        "chat_template_kwargs": {"enable_thinking": False},
        "logprobs": True,
        "top_logprobs": 0,
        "return_tokens_as_token_ids": True,
    }
    asked = {name: body[name] for name in ("model", "messages", "tools", "chat_template_kwargs")}
    for extra in ({}, {"return_token_ids": True}):
        answer = post(http, "/v1/chat/completions", body | extra)
        (choice,) = answer["choices"]
        assert choice["message"].get("reasoning_content") is None
        entries = choice["logprobs"]["content"]
        made = [int(entry["token"].removeprefix("token_id:")) for entry in entries]
        assert all(entry["token"].startswith("token_id:") and entry["logprob"] <= 0 for entry in entries)
        prompt = post(http, "/tokenize", asked)["tokens"]
        if extra:
            assert answer["prompt_token_ids"] == prompt and choice["token_ids"] == made
        else:
            assert "token_ids" not in choice and "prompt_token_ids" not in answer
    # it makes an empty completion of a context that is full, and knows it by these words
    long = [{"role": "user", "content": "word " * 2000}]
    for told in (body | {"messages": long}, body | {"max_tokens": 600}):
        response = http.post("/v1/chat/completions", json=told)
        assert response.status_code == 400 and ("context length" in response.text or "max_tokens" in response.text)


# -- aborting by name --------------------------------------------------------------------------------------------------
def test_a_request_is_aborted_by_its_name_and_no_other(served: Served, http: httpx.Client) -> None:
    long = {"temperature": 0, "ignore_eos": True}
    asks = [
        ("/generate", {"input_ids": PROMPT, "rid": "a", "sampling_params": {"max_new_tokens": 400, **long}}),
        ("/sessions/named/generate",
         {"input_ids": PROMPT, "rid": "b", "sampling_params": {"max_new_tokens": 400, **long}}),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 400, "request_id": "c", **long}),
        ("/inference/v1/generate",
         {"token_ids": PROMPT, "request_id": "d", "sampling_params": {"max_tokens": 400, **long}}),
        ("/generate", {"input_ids": PROMPT, "rid": "stays", "sampling_params": {"max_new_tokens": 90, **long}}),
    ]  # fmt: skip

    async def main() -> list[Any]:
        async with httpx.AsyncClient(base_url=served.url, timeout=60, trust_env=False) as client:
            calls = [asyncio.create_task(client.post(path, json=body)) for path, body in asks]
            under_way = served.gateway.runner
            await asyncio.to_thread(
                wait_for, lambda: under_way.running == 5 and all(len(g.ids) > 2 for g in list(under_way._tasks))
            )
            told = [
                await client.post("/abort_request", json={"rid": "a"}),
                await client.post("/abort_request", json={"rid": "b"}),
                await client.post("/abort_requests", json={"request_ids": ["cmpl-c", "d", "unheard-of"]}),
                await client.post("/abort_request", json={"rid": "unheard-of"}),
            ]
            assert [answer.json()["aborted"] for answer in told] == [1, 1, 2, 0]
            return [(await call).json() for call in calls]

    first, bound, text, tokens, other = asyncio.run(main())
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in (first, bound, other)] == [
        "abort",
        "abort",
        "length",
    ]
    assert [answer["choices"][0]["finish_reason"] for answer in (text, tokens)] == ["abort", "abort"]
    assert len(other["output_ids"]) == 90
    for answer in (first, bound):
        assert 2 < len(answer["output_ids"]) < 400
    # what a session has after an abort is in the journal, and is gone on from
    (trajectory,) = http.get("/sessions/named").json()["trajectories"]
    assert trajectory["token_ids"] == PROMPT + bound["output_ids"]
    served.wait_idle()
    http.delete("/sessions/named")


# -- policy versions ---------------------------------------------------------------------------------------------------
def test_weights_wait_for_trajectories_that_must_finish_on_the_old_ones(
    served: Served, http: httpx.Client, tmp_path: Path
) -> None:
    old = served.gateway.upstream.policy_version
    model = make_chat_model(tmp_path / "new", seed=old + 1)
    turn = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "temperature": 0, "return_token_ids": True}

    def say(where: str, prompt: list[int]) -> list[int]:
        return post(http, f"{where}/v1/completions", turn | {"prompt": prompt})["choices"][0]["token_ids"]

    first = say("/sessions/on-old", PROMPT)
    told: dict[str, Any] = {}

    def new_weights() -> None:
        told["update"] = httpx.post(
            f"{served.url}/update_weights_from_disk", json={"model_path": str(model)}, timeout=60, trust_env=False
        ).json()

    def new_session() -> None:
        told["late"] = say("/sessions/on-new", PROMPT)

    updating = threading.Thread(target=new_weights)
    updating.start()
    wait_for(lambda: served.upstream.engine._gate._closed)  # the update waits
    late = threading.Thread(target=new_session)
    late.start()
    # the session that has begun goes on meanwhile, on the old weights; the one that begins waits for the new ones
    second = say("/sessions/on-old", PROMPT + first + [5])
    assert not told and http.get("/weight_info").json() == {"weight_version": str(old)}
    post(http, "/sessions/on-old/finish", {"reward": 1.0})
    updating.join(60)
    late.join(60)
    assert told["update"]["success"] is True
    (before,) = http.get("/sessions/on-old").json()["trajectories"]
    assert {v for v, mask in zip(before["weights_versions"], before["loss_mask"], strict=True) if mask} == {old}
    assert before["token_ids"] == [*PROMPT, *first, 5, *second]
    (after,) = http.get("/sessions/on-new").json()["trajectories"]
    assert {v for v, mask in zip(after["weights_versions"], after["loss_mask"], strict=True) if mask} == {old + 1}
    assert told["late"] != first
    http.delete("/sessions/on-new")


def test_an_update_that_would_wait_for_ever_is_refused_in_time(
    tmp_path: Path, served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True}
    post(http, "/sessions/forgotten/v1/completions", turn)
    engine = served.upstream.engine
    old = engine.policy_version
    monkeypatch.setattr(engine._updates, "deadline", lambda: time.monotonic() + 0.3)
    model = make_chat_model(tmp_path / "new", seed=9)
    refused = post(http, "/update_weights_from_disk", {"model_path": str(model)}, 400)
    assert "did not end" in refused["message"] and engine.policy_version == old
    post(http, "/sessions/forgotten/v1/completions", turn | {"prompt": [1, 2, 3]})
    http.delete("/sessions/forgotten")


def test_the_journal_of_all_this_is_consistent(served: Served) -> None:
    served.wait_idle()
    verdict = verify_run(served.run)
    assert verdict.rollouts > 0 and verdict.consistent, verdict.findings


def test_a_turn_is_made_again_where_none_may_span_versions(tmp_path: Path) -> None:
    """`restart_turn`: nothing is shown before the turn is complete, and all of what is shown is of one version."""
    body = {"prompt": PROMPT, "max_tokens": 250, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    body["logprobs"] = 0
    with (
        Served(tmp_path, {"standby": "none", "version_policy": "restart_turn"}) as served,
        httpx.Client(base_url=served.url, timeout=60, trust_env=False) as http,
    ):
        old = post(http, "/v1/completions", body)["choices"][0]["token_ids"]
        model = make_chat_model(tmp_path / "new", seed=1)

        async def read(where: str) -> list[Any]:
            return [event async for event in stream(served.url, f"{where}/v1/completions", body)]

        async def main() -> list[list[Any]]:
            calls = [asyncio.create_task(read(where)) for where in ("", "/sessions/again")]
            begun = served.gateway.runner._tasks
            await asyncio.to_thread(wait_for, lambda: len(begun) == 2 and all(len(g.ids) > 4 for g in list(begun)))
            answer = await asyncio.to_thread(post, http, "/update_weights_from_disk", {"model_path": str(model)})
            assert answer["success"] is True
            return await asyncio.gather(*calls)

        streams = asyncio.run(main())
        calm = post(http, "/v1/completions", body)["choices"][0]
        assert calm["token_ids"] != old
        for events in streams:
            assert events[-1] == "[DONE]" and tokens_of(events) == calm["token_ids"]
        (trajectory,) = http.get("/sessions/again").json()["trajectories"]
        assert trajectory["token_ids"] == PROMPT + calm["token_ids"]
        assert trajectory["logprobs"][len(PROMPT) :] == calm["logprobs"]["token_logprobs"]
        assert set(trajectory["weights_versions"][len(PROMPT) :]) == {1}
        post(http, "/sessions/again/finish", {"reward": 0.0})
        served.wait_idle()
        verdict = verify_run(served.run)
        assert verdict.rollouts > 0 and verdict.consistent, verdict.findings
