"""Clients of a gateway over one living engine: what they ask, what they are told, and what they never notice."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import needs_root, needs_vllm
from tests.engine_kit import VOCABULARY
from tests.gateway_kit import Served, make_chat_model, relay, stream, tokens_of, wait_for

from belayer.events import ignore
from belayer.gateway.sessions import Sessions
from belayer.journal import Journal
from belayer.verify import verify_run

pytestmark = [pytest.mark.contract, needs_root, needs_vllm]

PROMPT = [(7 * j) % 256 for j in range(30)]
# greedy, sampled, filtered, penalised: all of it has to go on exactly
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 11},
    {"seed": 12, "temperature": 0.7, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1},
    {"seed": 13, "temperature": 1.3, "min_p": 0.02, "presence_penalty": 0.5, "frequency_penalty": 0.2},
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("gateway"), max_requests=24, max_body_bytes=200_000) as running:
        yield running


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=120, trust_env=False) as client:
        yield client


def ask(http: httpx.Client, path: str, body: dict[str, Any], **kwargs: Any) -> Any:
    response = http.post(path, json=body, **kwargs)
    assert response.status_code == 200, response.text
    return response.json()


def ask_get(http: httpx.Client, path: str) -> Any:
    response = http.get(path)
    assert response.status_code == 200, response.text
    return response.json()


def completion(http: httpx.Client, body: dict[str, Any], where: str = "", **kwargs: Any) -> dict[str, Any]:
    full = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    return ask(http, f"{where}/v1/completions", full | body, **kwargs)["choices"][0]


# -- the openai client -------------------------------------------------------------------------------------------------
def test_the_openai_client_completes_and_streams_the_same(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    wish: dict[str, Any] = {"model": "tiny", "prompt": "hello there", "max_tokens": 24, "seed": 5, "logprobs": 0}
    whole = client.completions.create(**wish)
    chunks = list(client.completions.create(**wish, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    values = [v for c in chunks if c.choices for v in c.choices[0].logprobs.token_logprobs]  # type: ignore[union-attr]
    assert whole.choices[0].logprobs is not None and values == whole.choices[0].logprobs.token_logprobs
    assert chunks[-1].usage == whole.usage
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    client.close()


def test_chat_by_the_async_client(served: Served) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0) as client:
            wish: dict[str, Any] = {
                "model": "tiny",
                "messages": [
                    {"role": "system", "content": "be brief"},
                    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                ],
                "max_completion_tokens": 16,
                "temperature": 0,
                "logprobs": True,
                "extra_body": {"return_token_ids": True},
            }
            whole = await client.chat.completions.create(**wish)
            spelt = "[system]be brief\n[user]hi\n[assistant]"
            (prompt,) = await served.gateway.text.encode([spelt], 512, special=False)
            assert whole.prompt_token_ids == prompt  # type: ignore[attr-defined]
            choice = whole.choices[0]
            assert choice.logprobs is not None and choice.logprobs.content is not None
            assert len(choice.logprobs.content) == len(choice.token_ids) == 16  # type: ignore[attr-defined]
            content, finish = "", None
            async for chunk in await client.chat.completions.create(**wish, stream=True):
                content += chunk.choices[0].delta.content or ""
                finish = chunk.choices[0].finish_reason or finish
            assert (content, finish) == (choice.message.content, choice.finish_reason)

    asyncio.run(main())


def test_stop_strings_and_stop_tokens_end_the_text_where_they_must(http: httpx.Client) -> None:
    whole = completion(http, {"temperature": 0})
    word = whole["text"][5:8]
    stopped = completion(http, {"temperature": 0, "stop": [word, "never"]})
    assert stopped["text"] == whole["text"][: whole["text"].index(word)]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", word)
    assert stopped["token_ids"] == whole["token_ids"][: len(stopped["token_ids"])]
    token = whole["token_ids"][7]
    at = whole["token_ids"].index(token)
    by_token = completion(http, {"temperature": 0, "stop_token_ids": [token]})
    assert by_token["token_ids"] == whole["token_ids"][: at + 1] and by_token["stop_reason"] == token
    kept = completion(http, {"temperature": 0, "stop": word, "include_stop_str_in_output": True})
    assert kept["text"] == stopped["text"] + word


def test_several_prompts_and_choices_come_in_order(http: httpx.Client) -> None:
    body = {"prompt": [PROMPT, PROMPT[:10]], "n": 2, "seed": 4, "max_tokens": 8, "return_token_ids": True}
    answer = ask(http, "/v1/completions", body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [len(choice["prompt_token_ids"]) for choice in answer["choices"]] == [30, 30, 10, 10]
    one, two = answer["choices"][0]["token_ids"], answer["choices"][1]["token_ids"]
    assert one != two, "the choices of one prompt must be different samples"
    assert answer["usage"]["prompt_tokens"] == 40
    assert ask(http, "/v1/completions", body)["choices"] == answer["choices"]


# -- a worker dies -----------------------------------------------------------------------------------------------------
def test_streams_outlive_the_worker_without_a_changed_token(served: Served, http: httpx.Client) -> None:
    calm = [completion(http, kind | {"max_tokens": 200}) for kind in KINDS]
    served.wait_standby()

    async def one(number: int, started: asyncio.Event) -> list[Any]:
        body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
        events = []
        where = f"/sessions/struck-{number}" if number % 2 else ""
        async for event in stream(served.url, f"{where}/v1/completions", body | KINDS[number]):
            events.append(event)
            if len(tokens_of(events)) > 10:
                started.set()
        return events

    async def main() -> tuple[list[list[Any]], int]:
        started = [asyncio.Event() for _ in KINDS]
        tasks = [asyncio.create_task(one(number, event)) for number, event in enumerate(started)]
        for event in started:
            await event.wait()
        assert not all(task.done() for task in tasks)
        dead = await asyncio.to_thread(served.kill_worker)
        return await asyncio.gather(*tasks), dead

    streams, dead = asyncio.run(main())
    assert served.upstream.engine.worker_pid != dead, "no worker died: this test has shown nothing"
    for number, (events, expected) in enumerate(zip(streams, calm, strict=True)):
        assert events[-1] == "[DONE]"
        assert tokens_of(events) == expected["token_ids"]
        objects = [e for e in events if isinstance(e, dict)]
        logprobs = [v for e in objects for v in e["choices"][0]["logprobs"]["token_logprobs"]]
        assert logprobs == expected["logprobs"]["token_logprobs"]
        assert "".join(e["choices"][0]["text"] for e in objects) == expected["text"]
        if number % 2:
            (trajectory,) = http.get(f"/sessions/struck-{number}").json()["trajectories"]
            assert trajectory["token_ids"] == PROMPT + expected["token_ids"]
            assert trajectory["logprobs"][len(PROMPT) :] == expected["logprobs"]["token_logprobs"]


# -- sessions ----------------------------------------------------------------------------------------------------------
def test_a_session_is_one_trajectory(http: httpx.Client) -> None:
    first = completion(http, {"max_tokens": 6}, "/sessions/linear")
    context = PROMPT + first["token_ids"] + [1, 2, 3]
    second = completion(http, {"prompt": context, "max_tokens": 5}, headers={"X-Session-ID": "linear"})
    about = http.get("/sessions/linear").json()
    assert (about["state"], about["turns"]) == ("open", 2)
    (trajectory,) = about["trajectories"]
    assert trajectory["token_ids"] == context + second["token_ids"]
    assert trajectory["loss_mask"] == [0] * 30 + [1] * 6 + [0] * 3 + [1] * 5
    made = first["logprobs"]["token_logprobs"] + second["logprobs"]["token_logprobs"]
    assert [v for v, m in zip(trajectory["logprobs"], trajectory["loss_mask"], strict=True) if m] == made
    assert [v for v in trajectory["weights_versions"] if v >= 0] == [0] * 11
    finished = ask(http, "/sessions/linear/finish", {"reward": 0.5})
    assert (finished["state"], finished["reward"]) == ("finished", 0.5)
    assert ask(http, "/sessions/linear/finish", {"reward": 0.5}) == finished
    assert http.post("/sessions/linear/finish", json={"reward": 1}).status_code == 409
    assert http.post("/sessions/linear/v1/completions", json={"prompt": PROMPT}).status_code == 409
    assert http.delete("/sessions/linear").json()["state"] == "deleted"
    assert http.post("/sessions/linear/v1/completions", json={"prompt": PROMPT}).status_code == 410


def test_another_history_begins_another_branch(http: httpx.Client) -> None:
    first = completion(http, {"max_tokens": 4}, "/sessions/branches")
    completion(http, {"prompt": [9, 9, *PROMPT], "max_tokens": 4}, "/sessions/branches")
    again = completion(http, {"max_tokens": 4}, "/sessions/branches")
    assert again["token_ids"] != first["token_ids"], "answered before: asking again is another sample"
    about = http.get("/sessions/branches").json()
    assert [t["rollout_id"] for t in about["trajectories"]] == ["branches", "branches~1", "branches~2"]
    assert sum(sum(t["loss_mask"]) for t in about["trajectories"]) == 12


def test_a_retry_is_answered_from_the_journal(served: Served, http: httpx.Client) -> None:
    where, key = "/sessions/keys", {"Idempotency-Key": "call-1"}
    first = completion(http, {}, where, headers=key)
    assert completion(http, {}, where, headers=key) == first
    # the openai client counts its retries in a header
    second = completion(http, {"prompt": PROMPT + first["token_ids"]}, where)
    body = {"prompt": PROMPT + first["token_ids"]}
    assert completion(http, body, where, headers={"x-stainless-retry-count": "1"}) == second
    # a seed makes it the same request anyway
    seeded = {"prompt": [5] * 8, "seed": 3}
    assert completion(http, seeded, where)["token_ids"] == completion(http, seeded, where)["token_ids"]
    reused = http.post(f"{where}/v1/completions", json={"prompt": [1, 2, 3]}, headers=key)
    assert reused.status_code == 422, reused.text
    assert http.get(where).json()["turns"] == 3
    # X-Request-ID is often somebody's trace id: another request with the same one is simply another request
    trace = {"X-Request-ID": "trace"}
    one = completion(http, {"prompt": [1, 2, 3]}, where, headers=trace)
    assert completion(http, {"prompt": [1, 2, 3]}, where, headers=trace) == one
    assert completion(http, {"prompt": [4, 5, 6]}, where, headers=trace) != one


def test_a_trace_id_finds_each_of_its_requests_again(served: Served, http: httpx.Client, tmp_path: Path) -> None:
    where, trace = "/sessions/traced", {"X-Request-ID": "r1"}
    bodies = [{"prompt": PROMPT[:9]}, {"prompt": PROMPT[9:20]}]
    one, two = (completion(http, body, where, headers=trace) for body in bodies)
    assert [completion(http, body, where, headers=trace) for body in bodies] == [one, two]
    assert http.get(where).json()["turns"] == 2
    # and after a restart
    shutil.copytree(served.run / "journal", tmp_path / "journal")
    journal = Journal(tmp_path / "journal")
    try:
        runner = served.gateway.runner
        session = Sessions(journal, served.upstream, runner, 0, ignore).get("traced")
        for turn, answer in zip(served.gateway.sessions.get("traced").turns, (one, two), strict=True):
            found = session.known(turn.prompt_ids, turn.intent.sampling, False, "r1", False, False)
            assert found is not None and found.call is not None and found.call.ids == answer["token_ids"]
    finally:
        journal.close()


def test_a_refused_request_leaves_no_session(http: httpx.Client) -> None:
    for number, body in enumerate(({"prompt": [VOCABULARY]}, {"prompt": PROMPT, "n": 2}, {"prompt": [10**30]})):
        assert http.post(f"/sessions/ghost-{number}/v1/completions", json=body).status_code == 400
        assert http.get(f"/sessions/ghost-{number}").status_code == 404
    assert completion(http, {"max_tokens": 3}, "/sessions/ghost-0")["finish_reason"] == "length"


def test_ending_a_session_ends_the_call_under_way(served: Served, http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}

    async def main(id: str, method: str, path: str, about: Any) -> tuple[httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(base_url=served.url, timeout=60, trust_env=False) as client:
            call = asyncio.create_task(client.post(f"/sessions/{id}/v1/completions", json=body))
            await asyncio.to_thread(wait_for, lambda: served.gateway.runner.running == 1)
            ended = await client.request(method, f"/sessions/{id}{path}", json=about)
            return await call, ended

    call, ended = asyncio.run(main("ended-1", "DELETE", "", None))
    assert ended.json()["state"] == "deleted"
    assert (call.status_code, call.json()["error"]["code"]) == (410, "session_deleted"), call.text
    assert http.post("/sessions", json={"id": "ended-1"}).status_code == 410
    call, ended = asyncio.run(main("ended-2", "POST", "/finish", {"failed": "enough"}))
    assert ended.json()["state"] == "failed"
    assert (call.status_code, call.json()["error"]["code"]) == (409, "session_over"), call.text
    served.wait_idle()


def test_a_call_goes_on_without_its_client_and_is_there_for_the_retry(served: Served, http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 150, "ignore_eos": True, "return_token_ids": True}

    async def leave() -> list[int]:
        events: list[Any] = []
        async for event in stream(served.url, "/sessions/gone/v1/completions", body):
            events.append(event)
            if len(tokens_of(events)) >= 5:
                break
        return tokens_of(events)

    seen = asyncio.run(leave())
    answer = completion(http, {"max_tokens": 150, "logprobs": None}, "/sessions/gone")
    assert answer["token_ids"][: len(seen)] == seen and len(answer["token_ids"]) == 150
    assert http.get("/sessions/gone").json()["turns"] == 1
    seed = served.gateway.sessions.get("gone").turns[0].intent.sampling.seed
    calm = completion(http, {"max_tokens": 150, "seed": seed})
    assert calm["token_ids"] == answer["token_ids"]


def test_without_a_session_a_call_ends_with_its_client(served: Served) -> None:
    async def leave() -> None:
        async for _ in stream(served.url, "/v1/completions", {"prompt": PROMPT, "max_tokens": 450, "ignore_eos": True}):
            break

    before = served.gateway.metrics.registry.get_sample_value("belayer_gateway_tokens_total") or 0
    asyncio.run(leave())
    served.wait_idle()
    made = (served.gateway.metrics.registry.get_sample_value("belayer_gateway_tokens_total") or 0) - before
    assert made < 450, "it was generated to its end for nobody"
    assert not served.gateway.runner._asking


def test_the_journal_of_all_this_is_consistent(served: Served, http: httpx.Client) -> None:
    completion(http, {"max_tokens": 4}, "/sessions/left-open")
    served.wait_idle()
    verdict = verify_run(served.run)
    assert verdict.rollouts > 0 and verdict.consistent, verdict.findings


# -- trainers ----------------------------------------------------------------------------------------------------------
def test_pause_freezes_what_is_under_way_and_resume_goes_on_exactly(served: Served, http: httpx.Client) -> None:
    calm = completion(http, {"seed": 8, "max_tokens": 150})
    body = {"prompt": PROMPT, "max_tokens": 150, "ignore_eos": True, "seed": 8, "return_token_ids": True}

    async def main() -> list[Any]:
        events: list[Any] = []
        async for event in stream(served.url, "/v1/completions", body):
            events.append(event)
            if len(tokens_of(events)) >= 5 and not served.gateway.runner.paused and ":" not in events:
                assert (await asyncio.to_thread(http.post, "/pause?mode=keep")).status_code == 200
            if event == ":" and served.gateway.runner.paused:  # frozen, and the stream is kept alive
                state = await asyncio.to_thread(http.get, "/is_paused")
                assert state.json() == {"is_paused": True}
                await asyncio.to_thread(http.post, "/resume")
        return events

    events = asyncio.run(main())
    assert ":" in events and tokens_of(events) == calm["token_ids"]


def test_an_abort_hands_over_what_there_is(served: Served, http: httpx.Client) -> None:
    """AReaL's loop: paused for new weights in mid-flight, it asks again with what it has as the prompt."""

    async def main() -> list[int]:
        made: list[int] = []
        async with httpx.AsyncClient(base_url=served.url, timeout=60, trust_env=False) as client:
            reason = "abort"
            while reason == "abort":
                params = {"max_new_tokens": 200 - len(made), "temperature": 0, "ignore_eos": True}
                body = {"input_ids": PROMPT + made, "sampling_params": params, "return_logprob": True, "rid": "one"}
                call = asyncio.create_task(client.post("/sessions/areal/generate", json=body))
                if not made:
                    await asyncio.to_thread(
                        wait_for, lambda: len(http.get("/sessions/areal").json().get("trajectories") or []) == 1
                    )
                    await client.post("/pause_generation", json={"mode": "abort"})
                    await client.post("/continue_generation", json={})
                answer = (await call).json()
                meta = answer["meta_info"]
                made += [entry[1] for entry in meta["output_token_logprobs"]]
                reason = meta["finish_reason"]["type"]
                if not made and reason == "abort":
                    made = []
        return made

    made = asyncio.run(main())
    calm = completion(http, {"temperature": 0, "max_tokens": 200})
    assert made == calm["token_ids"]


def test_new_weights_come_from_a_folder(served: Served, http: httpx.Client, tmp_path: Path) -> None:

    before = completion(http, {"temperature": 0})
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "model.safetensors").write_bytes(b"no tensors")
    for path in (str(tmp_path), str(damaged), "/" + "a" * 5000, "\0"):
        bad = http.post("/update_weights_from_disk", json={"model_path": path})
        assert bad.status_code == 400 and bad.json()["success"] is False
    folder = make_chat_model(tmp_path / "new", seed=1)
    done = ask(http, "/update_weights_from_disk", {"model_path": str(folder), "weight_version": "3"})
    assert done["success"] and http.get("/weight_info").json() == {"weight_version": "3"}
    after = ask(http, "/generate", {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 40}})
    assert after["meta_info"]["weight_version"] == "3"
    assert after["output_ids"] != before["token_ids"]
    stale = http.post("/update_weights_from_disk", json={"model_path": str(folder), "weight_version": "2"})
    assert stale.status_code == 400 and "not newer" in stale.json()["message"]
    assert json.loads((served.run / "weights.json").read_text())["policy_version"] == 3
    for path in ("/update_weights", "/init_weights_update_group", "/sleep", "/release_memory_occupation"):
        refused = http.post(path, json={})
        assert refused.status_code == 501 and "not offered" in refused.json()["error"]["message"]


def test_what_trainers_send(http: httpx.Client, served: Served) -> None:
    """The bodies that TRL, SkyRL, slime, NeMo-Gym, verifiers and verl send, as far as their fields go."""
    sampled = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    trl = {"model": "tiny", "prompt": [PROMPT, PROMPT[:9]], "n": 2, "max_tokens": 8, "logprobs": 0, **sampled}
    choices = ask(http, "/v1/completions", trl | {"return_token_ids": True, "return_tokens_as_token_ids": True})[
        "choices"
    ]
    for choice in choices:
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
        assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [[t] for t in choice["logprobs"]["tokens"]]
    params = {**sampled, "max_tokens": 8, "logprobs": 0, "seed": 3, "stop": None, "include_stop_str_in_output": True}
    skyrl = {"model": str(served.model), "token_ids": PROMPT, "sampling_params": params, "stream": False}
    (choice,) = ask(http, "/inference/v1/generate", skyrl, headers={"X-Session-ID": "skyrl-1"})["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == choice["token_ids"]
    assert all(entry["logprob"] <= 0 for entry in content) and choice["finish_reason"] in ("length", "stop")
    # one more than the sampled is what SkyRL and verifiers ask for, and not what they read: nothing is made up for it
    ones = ask(http, "/inference/v1/generate", skyrl | {"sampling_params": params | {"logprobs": 1}})["choices"][0]
    assert [(e["token_id"], e["logprob"]) for e in ones["logprobs"]["content"]] == [
        (e["token_id"], e["logprob"]) for e in content
    ]
    assert all(entry["top_logprobs"] == [] for entry in ones["logprobs"]["content"])
    spans = choice["weight_versions"]
    assert [(spans[0]["start"], spans[-1]["end"])] == [(0, len(choice["token_ids"]))]
    slime = {
        "input_ids": PROMPT,
        "sampling_params": {**sampled, "max_new_tokens": 8, "stop": None, "stop_token_ids": None,
                            "skip_special_tokens": True, "no_stop_trim": True, "spaces_between_special_tokens": False},
        "return_logprob": True,
    }  # fmt: skip
    answer = ask(http, "/generate", slime)
    assert [entry[1] for entry in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]
    assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"])
    messages = [{"role": "user", "content": "hi"}]
    nemo = {
        "model": "tiny",
        "messages": messages,
        "max_tokens": 8,
        "logprobs": True,
        "return_tokens_as_token_ids": True,
    }
    chat = ask(http, "/sessions/nemo/v1/chat/completions", nemo)
    prompt = ask(http, "/tokenize", {"model": "tiny", "messages": messages})["tokens"]
    made = [int(e["token"].removeprefix("token_id:")) for e in chat["choices"][0]["logprobs"]["content"]]
    assert http.get("/sessions/nemo").json()["trajectories"][0]["token_ids"] == prompt + made


def test_trls_own_client(served: Served) -> None:
    pytest.importorskip("requests")
    client = pytest.importorskip("trl.generation.vllm_client").VLLMClient(base_url=served.url)
    answer = client.generate([PROMPT, PROMPT[:12]], n=2, max_tokens=6, temperature=1.0)
    assert answer["prompt_ids"] == [PROMPT, PROMPT[:12]]
    assert [len(ids) for ids in answer["completion_ids"]] == [len(values) for values in answer["logprobs"]]


# -- limits ------------------------------------------------------------------------------------------------------------
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": PROMPT, "logprobs": 5}, "logprobs"),
    ("/v1/completions", {"prompt": PROMPT, "logit_bias": {"5": 1.0}}, "logit_bias"),
    ("/v1/completions", {"prompt": PROMPT, "guided_regex": "a+"}, "guided_regex"),
    ("/v1/completions", {"prompt": PROMPT, "response_format": {"type": "json_object"}}, "response_format"),
    ("/v1/completions", {"prompt": PROMPT, "echo": True}, "echo"),
    ("/v1/completions", {"prompt": PROMPT, "min_tokens": 17}, "min_tokens"),
    ("/v1/completions", {"prompt": PROMPT, "min_tokens": -1}, "min_tokens"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "min_tokens": 600}, "min_tokens"),
    ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"min_tokens": True}}, "min_tokens"),
    ("/generate", {"input_ids": PROMPT, "sampling_params": {"min_new_tokens": 129}}, "min_new_tokens"),
    ("/v1/completions", {"prompt": PROMPT, "temprature": 1}, "temperature"),
    ("/v1/completions", {"prompt": PROMPT, "temperature": -1}, "temperature"),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 1000}, "context"),
    ("/v1/completions", {"prompt": [1] * 600}, "context"),
    ("/v1/completions", {"prompt": [VOCABULARY]}, "token ids"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": "half \ud800"}, "JSON"),
    ("/v1/completions", {}, "prompt"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}], "tools": [{"type": "function"}]}, "tools"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}], "chat_template": "{{ 1 }}"}, "chat_template"),
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"structured_outputs": {}}}, "grammar"),
    ("/inference/v1/generate", {"token_ids": PROMPT, "features": {"mm_hashes": {}}}, "features"),
    ("/generate", {"input_ids": PROMPT, "text": "both"}, "either"),
    ("/generate", {"input_ids": PROMPT, "sampling_params": {"regex": "a"}}, "regex"),
    ("/generate", {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
    ("/sessions/one/v1/completions", {"prompt": PROMPT, "n": 2}, "n"),
    ("/sessions/no%20id!/v1/completions", {"prompt": PROMPT}, "session id"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "named"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_served_is_refused_by_name(
    http: httpx.Client, path: str, body: dict[str, Any], named: str
) -> None:
    content = json.dumps(body).encode()
    response = http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and named in f"{error['message']} {error['param']}"


_BIG = 10**400
UNBOUNDED: list[tuple[str, dict[str, Any], str]] = [
    *[
        ("/v1/completions", {name: value}, name)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        for value in (2**64, _BIG, -_BIG, 1e308)
    ],
    *[("/v1/completions", {name: _BIG}, name) for name in ("n", "seed", "top_k", "max_tokens", "logprobs")],
    ("/v1/completions", {"stop_token_ids": [10**30]}, "stop_token_ids"),
    ("/v1/completions", {"stop_token_ids": [2**31 - 1]}, "stop_token_ids"),
    ("/v1/completions", {"prompt": [10**30]}, "prompt"),
    ("/v1/completions", {"prompt": [VOCABULARY]}, "prompt"),
    ("/v1/completions", {"max_tokens": 1000}, "max_tokens"),
    ("/v1/completions", {"stop": ["a"] * 2000}, "stop"),
    ("/v1/completions", {"stop": ["a" * 100_000]}, "stop"),
    ("/sessions/big/v1/completions", {"temperature": 2**64}, "temperature"),
    ("/sessions/big/v1/completions", {"stop_token_ids": [10**30]}, "stop_token_ids"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "seed": _BIG}, "seed"),
    ("/inference/v1/generate", {"token_ids": [VOCABULARY]}, "token_ids"),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
    ("/generate", {"input_ids": [VOCABULARY]}, "input_ids"),
    ("/generate", {"input_ids": [1], "sampling_params": {"temperature": _BIG}}, "sampling_params.temperature"),
    ("/generate", {"input_ids": [1], "return_logprob": True, "logprob_start_len": -_BIG}, "logprob_start_len"),
    ("/detokenize", {"tokens": [10**30]}, "tokens"),
    ("/sessions", {"task": 10**30}, "task"),
    ("/sessions", {"task": {"a": [_BIG]}}, "task"),
    ("/sessions", {"group": "g" * 2000}, "group"),
    ("/sessions", {"seed": _BIG}, "seed"),
    ("/sessions/reward/finish", {"reward": _BIG}, "reward"),
    ("/sessions/reward/finish", {"failed": "x" * 100_000}, "failed"),
]


def test_what_has_no_bound_is_refused_by_name_at_the_door(http: httpx.Client) -> None:
    completion(http, {"max_tokens": 2}, "/sessions/reward")
    for path, body, named in UNBOUNDED:
        full = {"prompt": [1]} | body if path.endswith("/v1/completions") else body
        response = http.post(path, json=full)
        assert response.status_code == 400, (path, named, response.text[:300])
        error = response.json()["error"]
        assert (error["param"], error["type"]) == (named, "invalid_request_error"), (path, str(body)[:80], error)
        assert isinstance(error["code"], str) and "request :" not in error["message"]
    assert http.get("/sessions/big").status_code == 404
    assert ask(http, "/sessions/reward/finish", {"reward": 1e30})["state"] == "finished"


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(http: httpx.Client) -> None:
    text = "a" * 100_000
    for path, body, named in (
        ("/v1/completions", {"prompt": text}, "prompt"),
        ("/v1/completions", {"prompt": ["a", text]}, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 2000}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, "messages"),
        ("/generate", {"text": text}, "text"),
        ("/tokenize", {"prompt": text}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": text}]}, "messages"),
    ):
        response = http.post(path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, named), response.text[:300]


def test_errors_are_what_clients_can_read(served: Served, http: httpx.Client) -> None:
    for method, path, status, code in (
        ("GET", "/no/such/route", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("GET", "/sessions?state=bogus", 400, "invalid_value"),
    ):
        response = http.request(method, path)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    for response in (http.get("/v1/models/other"), http.post("/v1/completions", json={"model": "x", "prompt": [1]})):
        assert response.status_code == 404 and str(served.model) not in response.text
    assert {s["state"] for s in ask_get(http, "/sessions?state=finished")["sessions"]} <= {"finished"}


def test_limits_have_their_status(served: Served, http: httpx.Client) -> None:
    assert http.post("/v1/completions", content=b"x" * 200_001).status_code == 413
    assert http.post("/v1/completions", content=iter([b"x" * 150_000, b"x" * 60_000])).status_code == 413
    assert http.post("/v1/completions", json={"prompt": PROMPT, "model": "other"}).status_code == 404
    assert http.get("/no/such/route").json()["error"]["type"] == "not_found_error"
    assert http.get("/v1/completions").status_code == 405
    assert http.get("/sessions/nobody").status_code == 404
    sample, counted = {"prompt": PROMPT, "max_tokens": 30}, {"x-stainless-retry-count": "1"}
    first = ask(http, "/sessions/twice/v1/completions", sample)["choices"][0]
    served.call(served.gateway.runner.pause("keep"))
    try:
        held = {"prompt": [PROMPT] * 24, "max_tokens": 2}

        async def main() -> httpx.Response:
            async with httpx.AsyncClient(base_url=served.url, timeout=60, trust_env=False) as client:
                waiting = asyncio.create_task(client.post("/v1/completions", json=held))
                await asyncio.to_thread(wait_for, lambda: served.gateway.runner.running == 24)
                refused = await client.post("/v1/completions", json={"prompt": PROMPT})
                # two samples of one prompt: the second is turned away, and its retry is no repetition of the first
                again = await client.post("/sessions/twice/v1/completions", json=sample)
                assert again.status_code == 429
                served._loop.call_soon_threadsafe(served.gateway.runner.resume)
                assert (await waiting).status_code == 200
                retried = await client.post("/sessions/twice/v1/completions", json=sample, headers=counted)
                assert retried.status_code == 200 and retried.json()["choices"][0]["text"] != first["text"]
                repeated = await client.post("/sessions/twice/v1/completions", json=sample, headers=counted)
                assert repeated.json()["choices"] == retried.json()["choices"]
                return refused

        refused = asyncio.run(main())
    finally:
        served._loop.call_soon_threadsafe(served.gateway.runner.resume)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1


def test_health_and_metrics_say_what_is(served: Served, http: httpx.Client) -> None:
    assert http.get("/health").json()["status"] == "ok"
    assert http.get("/health_generate").status_code == 200
    page = http.get("/metrics").text
    assert 'belayer_gateway_requests_total{route="/v1/completions",status="400"}' in page
    served.wait_idle()
    assert "belayer_gateway_in_flight 0.0" in http.get("/metrics").text


_number = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
_leaf = st.none() | st.booleans() | _number | st.text(max_size=4)
_flat = st.lists(_leaf, max_size=3) | st.dictionaries(st.text(max_size=3), _leaf, max_size=2)
_json = _leaf | _flat | st.lists(_flat, max_size=2) | st.dictionaries(st.text(max_size=3), _flat, max_size=2)
_FIELDS = [
    "model",
    "prompt",
    "messages",
    "token_ids",
    "input_ids",
    "text",
    "sampling_params",
    "max_tokens",
    "n",
    "seed",
    "stop",
    "stop_token_ids",
    "logprobs",
    "top_logprobs",
    "temperature",
    "top_p",
    "top_k",
    "stream_options",
    "rid",
    "chat_template_kwargs",
    "return_logprob",
    "skip_special_tokens",
]
_body = _json | st.dictionaries(st.sampled_from(_FIELDS), _json, max_size=5).map(
    lambda fields: {"prompt": [1], "token_ids": [1], "max_tokens": 2} | fields
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(path=st.sampled_from(sorted({path for path, _, _ in REFUSED[:-2]})), body=_body, raw=st.binary(max_size=12))
def test_no_body_is_a_defect(http: httpx.Client, path: str, body: Any, raw: bytes) -> None:
    for content in (json.dumps(body).encode(), raw):
        response = http.post(path, content=content)
        assert response.status_code in (200, 400, 404), response.text
        if response.status_code != 200:
            assert response.json()["error"]["message"]


# -- external servers --------------------------------------------------------------------------------------------------
def test_another_server_goes_on_where_one_was_killed(served: Served, http: httpx.Client, tmp_path: Path) -> None:

    calm = completion(http, {"temperature": 0, "max_tokens": 300})

    async def main(one: str, two: str, victims: dict[str, Any], prefix: str) -> None:
        async with served.in_front([prefix + one, prefix + two], tmp_path / (prefix or "vllm")[:6]) as (url, gateway):
            body = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
            events: list[Any] = []
            killed = False
            async for event in stream(url, "/sessions/s/v1/completions", body):
                events.append(event)
                if len(tokens_of(events)) >= 8 and not killed:
                    killed = True
                    busy = [s["url"] for s in gateway.upstream.state()["servers"] if s["in_flight"]]
                    assert len(busy) == 1, "it ended before a server could be killed"
                    victims[busy[0]].kill()
            assert killed and events[-1] == "[DONE]"
            assert tokens_of(events) == calm["token_ids"]
            async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
                # no token was lost or counted twice on the way to the trainer
                trajectory = (await client.get("/sessions/s")).json()["trajectories"][0]
                assert trajectory["token_ids"] == PROMPT + calm["token_ids"]
                sampled = await client.post("/v1/completions", json=body | {"temperature": 1.0, "max_tokens": 5})
                assert len(sampled.json()["choices"][0]["token_ids"]) == 5
                refused = await client.post("/v1/completions", json=body | {"presence_penalty": 1.0})
                assert refused.status_code == 400 and "presence_penalty" in refused.text
                assert (await client.post("/update_weights_from_disk", json={"model_path": "/x"})).status_code == 501
                assert (await client.get("/health")).status_code == 200
                for victim in victims.values():
                    victim.kill()
                await asyncio.sleep(0.1)
                gateway.upstream._recover_s = 0.5  # type: ignore[attr-defined]
                gone = await client.post("/v1/completions", json=body | {"max_tokens": 5})
                assert gone.status_code == 503 and gone.headers["retry-after"]
                assert (await client.get("/health")).status_code == 503

    for prefix in ("", "sglang+"):
        with relay(served.url) as (one, first), relay(served.url) as (two, second):
            asyncio.run(main(one, two, {one: first, two: second}, prefix))


# -- the end: no test may follow, for the engine is gone ---------------------------------------------------------------
def test_an_engine_that_is_gone_is_never_a_good_answer(served: Served, http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "return_token_ids": True}

    async def main() -> list[Any]:
        events: list[Any] = []
        async for event in stream(served.url, "/sessions/cut/v1/completions", body):
            events.append(event)
            if len(tokens_of(events[:1])) and len(events) == 1:
                await asyncio.to_thread(served.call, served.upstream.close())
            if isinstance(event, dict) and "error" in event:
                break
        return events

    events = asyncio.run(main())
    assert "error" in events[-1] and "[DONE]" not in events, "a stream that was cut off must not look complete"
    turn = http.get("/sessions/cut").json()["trajectories"][0]["turns"][0]
    assert turn["finish_reason"] is None and turn["completion_tokens"] >= len(tokens_of(events[:1]))
    for method, path in (("GET", "/health"), ("POST", "/v1/completions"), ("POST", "/sessions/cut/v1/completions")):
        gone = http.request(method, path, json=body)
        assert gone.status_code == 503 and int(gone.headers["retry-after"]) >= 1, gone.text
        assert "closed" in gone.json()["error"]["message"]
