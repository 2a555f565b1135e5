"""The gateway's pure parts: its token, its settings, its texts, what it reads from other servers."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from tests.engine_kit import byte_tokenizer

from belayer.cli.serve import _with_token
from belayer.config import load_config
from belayer.engine import GenerationRequest, Sampling, TokenChunk
from belayer.engine.stopping import Pieces, StopWatch
from belayer.errors import ConfigError, EngineUnavailable, JournalError, RequestRefused, StorageFull, TurnRestarted
from belayer.gateway import serving
from belayer.gateway.generation import Generation
from belayer.gateway.http.guards import BearerToken
from belayer.gateway.problems import problem_of
from belayer.gateway.sessions.intent import fingerprint
from belayer.gateway.settings import GatewaySettings
from belayer.gateway.text import Text, TextStream
from belayer.gateway.upstream._wires import Interrupted, Kind, Piece, question, read
from belayer.journal import Journal
from belayer.journal.records import RolloutStarted

pytestmark = pytest.mark.unit

TOKENIZER = byte_tokenizer(1000)
END = 999


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.1", "::", "myhost"])
def test_no_token_no_listening_outside(host: str) -> None:
    with pytest.raises(ConfigError, match="no token"):
        GatewaySettings(host=host).check()
    GatewaySettings(host=host, token="sesame").check()


def test_loopback_needs_none_and_a_token_must_fit_in_a_header() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        GatewaySettings(host=host).check()
    with pytest.raises(ConfigError, match="printable"):
        GatewaySettings(token="two words").check()


def test_the_token_guards_everything_but_health() -> None:
    async def page(request: Any) -> PlainTextResponse:
        return PlainTextResponse("in")

    app = Starlette(
        routes=[Route("/health", page), Route("/metrics", page)],
        middleware=[Middleware(BearerToken, token="sesame")],
    )

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            assert (await client.get("/health")).status_code == 200
            for header in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Basic sesame"}):
                answer = await client.get("/metrics", headers=header)
                assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert (await client.get("/metrics", headers={"Authorization": "Bearer sesame"})).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestRefused("x"), 400),
        (EngineUnavailable("x"), 503),
        (StorageFull("x"), 503),
        (JournalError("x"), 503),
        (TurnRestarted("x"), 503),
        (TimeoutError(), 504),
        (RuntimeError("x"), 500),
    ],
)
def test_every_error_has_a_status(error: BaseException, status: int) -> None:
    problem = problem_of(error)
    assert problem.status == status
    assert ("Retry-After" in problem.headers()) is (status == 503)


# -- what it is started with ------------------------------------------------------------------------------------------
def test_a_mistyped_model_binds_no_run_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = GatewaySettings(port=0)
    for folder, words in ((tmp_path / "typo", "no model folder"), (tmp_path, "no config.json")):
        config = load_config(None, {"engine.model": folder})
        with pytest.raises(ConfigError, match=words) as caught:
            asyncio.run(serving.serve(config, settings, run))
        assert "belayer serve" in str(caught.value)
        assert not run.exists()


def test_a_run_directory_changes_hands_until_it_holds_sessions(tmp_path: Path) -> None:
    config = load_config(None, {})
    for serves in ("/models/one", "/models/two", "/models/two"):
        opened = serving._open(config, tmp_path, serves)
        assert opened.about["gateway"] == serves
        opened.close()
    journal = Journal(tmp_path / "journal")
    journal.record(RolloutStarted(rollout="s", group="s", task=None, seed=1))
    journal.close()
    serving._open(config, tmp_path, "/models/two").close()
    with pytest.raises(ConfigError, match="holds sessions"):
        serving._open(config, tmp_path, "/models/three")
    assert json.loads((tmp_path / "run.json").read_text())["gateway"] == "/models/two"


@pytest.mark.parametrize(("content", "why"), [(None, "No such file"), (b"", "empty"), (b"\xff\xfe", "no text")])
def test_a_token_file_that_is_none_says_what_to_do(tmp_path: Path, content: bytes | None, why: str) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=why) as caught:
        _with_token(GatewaySettings(), file)
    assert "Errno" not in str(caught.value) and "BELAYER_TOKEN" in str(caught.value)


# -- text --------------------------------------------------------------------------------------------------------------
def _text(
    ids: list[int], cuts: list[int], stops: tuple[str, ...], keep: bool = False, min_tokens: int = 0
) -> tuple[str, str | None]:
    stream = TextStream(Pieces(TOKENIZER, []), stops, frozenset({END}), keep, min_tokens)
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    out = "".join(stream.feed(ids[a:b]) for a, b in itertools.pairwise(bounds))
    return out + stream.end(), stream.matched


@given(
    text=st.text("abc<>é", min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 99), max_size=5),
    keep=st.booleans(),
    min_tokens=st.integers(0, 5),
)
def test_a_stream_says_what_the_whole_says_up_to_the_stop_string(
    text: str, cuts: list[int], keep: bool, min_tokens: int
) -> None:
    stops = ("ab", "c<", "<|end|>")
    ids = [*TOKENIZER.encode(text).ids, END]
    min_tokens = min(min_tokens, len(ids) - 1)
    last = StopWatch(TOKENIZER, [], stops, min_tokens).feed(ids)
    assert last is not None  # the last token spells a stop string
    shown, matched = _text(ids[: last + 1], cuts, stops, keep, min_tokens)
    full = text + "<|end|>"
    early = len(TOKENIZER.decode(ids[:min_tokens])) if min_tokens else 0  # the characters that end nothing
    at = min(at for stop in stops if (at := full.find(stop, max(0, early - len(stop) + 1))) >= 0)
    assert matched is not None and full.startswith(matched, at)
    end = at + (len(matched) if keep else 0)
    assert shown == full[: min(end, len(text))]  # the end token itself is special, and special tokens are not shown


def test_a_long_text_is_tokenised_beside_the_event_loop(tmp_path: Path) -> None:
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    text = Text(tmp_path)
    words = "ab c" * 100_000

    async def main() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        work = asyncio.ensure_future(text.encode([words], 1 << 20, special=False))
        ticks = 0
        while not work.done():
            await asyncio.sleep(0.001)
            ticks += 1
        assert work.result() == [TOKENIZER.encode(words, add_special_tokens=False).ids]
        assert ticks > 10, f"the loop stood still: {ticks} turns in {loop.time() - began:.2f} s"

    asyncio.run(main())


def test_special_tokens_are_not_shown() -> None:
    ids = [*TOKENIZER.encode("ab").ids, END, *TOKENIZER.encode("cd").ids]
    assert _text(ids, [], ()) == ("abcd", None)


# -- sessions ----------------------------------------------------------------------------------------------------------
def test_a_drawn_seed_is_not_part_of_what_was_asked() -> None:
    one, two = Sampling(max_tokens=4, seed=1), Sampling(max_tokens=4, seed=2)
    assert fingerprint([1, 2], one, False) == fingerprint([1, 2], two, False)
    assert fingerprint([1, 2], one, True) != fingerprint([1, 2], two, True)
    assert fingerprint([1, 2], one, True) != fingerprint([1, 2], one, False)
    assert fingerprint([1, 2], one, False) != fingerprint([1, 3], one, False)


def test_tokens_that_cross_an_abort_do_not_open_it_again() -> None:
    journalled: list[TokenChunk] = []
    made = Generation([1], Sampling(max_tokens=9), journal=journalled.append)

    def chunk(start: int, ids: list[int], finish: str | None = None) -> TokenChunk:
        logprobs = [-0.5] * len(ids)
        return TokenChunk(
            request_id="r", start=start, token_ids=ids, logprobs=logprobs, weights_version=0, finish_reason=finish
        )

    for each in (chunk(0, [5, 6]), chunk(2, [], "abort"), chunk(2, [7]), chunk(3, [8], "length")):
        made.accept(each)
    assert (made.ids, made.finish, made.done) == ([5, 6], "abort", True)
    assert [each.start for each in journalled] == [0, 2]


# -- other servers' streams --------------------------------------------------------------------------------------------
def _read(kind: Kind, *lines: str) -> list[Piece]:
    async def source() -> AsyncIterator[str]:
        for line in lines:
            yield line

    async def main() -> list[Piece]:
        return [piece async for piece in read(kind, source())]

    return asyncio.run(main())


def _sglang(ids: list[int], total: int, finish: str = "null") -> str:
    entries = ",".join(f"[-0.5,{token},null]" for token in ids)
    meta = f'"completion_tokens":{total},"output_token_logprobs":[{entries}],"finish_reason":{finish}'
    return f'data: {{"text":"","meta_info":{{{meta},"weight_version":"7"}}}}'


def test_what_a_server_is_asked_for_counts_the_tokens_that_are_there() -> None:
    sampling = Sampling(max_tokens=20, min_tokens=7, stop_token_ids=(5,))
    request = GenerationRequest(id="r", prompt_ids=[1, 2], sampling=sampling)
    for made, least in (([], 7), ([3] * 4, 3), ([3] * 9, 0)):
        _, body = question("vllm", "m", request, made)
        assert (body["min_tokens"], body["max_tokens"]) == (least, 20 - len(made))
        _, body = question("sglang", "m", request, made)
        params = body["sampling_params"]
        assert (params["min_new_tokens"], params["max_new_tokens"]) == (least, 20 - len(made))


def test_sglang_streams_are_read_whether_they_repeat_or_not() -> None:
    end = '{"type":"length","length":3}'
    repeating = _read("sglang", _sglang([1], 1), ": still here", _sglang([1, 2, 3], 3, end), "data: [DONE]")
    news = _read("sglang", _sglang([1], 1), _sglang([2, 3], 3, end))
    for pieces in (repeating, news):
        assert [token for piece in pieces for token in piece.ids] == [1, 2, 3]
        assert (pieces[-1].finish, pieces[-1].version) == ("length", 7)


@pytest.mark.parametrize(
    "line",
    [
        'data: {"error":{"message":"engine dead"}}',
        "data: {not json",
        'data: {"choices":[{"text":"no ids"}]}',
        'data: {"choices":[{"token_ids":[1,2],"logprobs":{"token_logprobs":[-1.0]}}]}',
        'data: {"choices":[{"token_ids":[1],"logprobs":{"token_logprobs":[null]}}]}',
        'data: {"choices":[{"token_ids":[],"logprobs":null,"finish_reason":"abort"}]}',
        'data: {"choices":[{"token_ids":[],"logprobs":null,"finish_reason":"error"}]}',
    ],
)
def test_what_is_no_good_stream_is_never_taken_for_the_end_of_one(line: str) -> None:
    with pytest.raises(Interrupted):
        _read("vllm", line)
