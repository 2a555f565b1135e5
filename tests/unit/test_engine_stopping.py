"""Stop strings are found at the same token however the completion was cut into pieces."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("tokenizers") is None:
    pytest.skip("needs tokenizers", allow_module_level=True)

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_kit import byte_tokenizer
from tokenizers import Tokenizer

from belayer.engine import GenerationRequest, Sampling
from belayer.engine.stopping import Stopping, StopWatch, already_finished
from belayer.errors import RequestRefused

pytestmark = pytest.mark.unit

TOKENIZER = byte_tokenizer(1000)


def first_hit(tokenizer: Tokenizer, ids: list[int], strings: tuple[str, ...], min_tokens: int) -> int | None:
    """By the words of the documentation: the first token after `min_tokens` that completes one of the strings."""

    def seen(count: int) -> int:
        text = tokenizer.decode(ids[:count], skip_special_tokens=False)
        return sum(text.startswith(string, at) for at in range(len(text)) for string in strings)

    return next((index for index in range(min_tokens, len(ids)) if seen(index + 1) > seen(index)), None)


def watch(strings: tuple[str, ...], prompt: list[int] | None = None, min_tokens: int = 0) -> StopWatch:
    return StopWatch(TOKENIZER, prompt or [], strings, min_tokens)


# a small alphabet, so that strings occur: letters, pieces of two letters, whole and broken characters, a special token
IDS = [*b"ab\n", 0xC3, 0xA4, 0xE2, 0x82, 0xAC, *(TOKENIZER.encode(piece).ids[0] for piece in ("ab", "ba", "bb"))]
STRINGS = ["a", "ab", "bab", "aabb", "\n\n", "ä", "aäb", "€", "<|end|>", "b<|"]
SPECIAL = TOKENIZER.token_to_id("<|end|>")


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.sampled_from([*IDS, SPECIAL]), max_size=40),
    strings=st.lists(
        st.sampled_from(["a", "ab", "bab", "aabb", "\n\n", "ä", "aäb", "€", "<|end|>", "b<|"]), min_size=1
    ),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    prompt=st.lists(st.sampled_from([SPECIAL, *b"xy"]), max_size=20),
    min_tokens=st.sampled_from([0, 0, 1, 5, 20]),
)
def test_however_it_is_cut(
    ids: list[int], strings: list[str], cuts: list[int], prompt: list[int], min_tokens: int
) -> None:
    expected = first_hit(TOKENIZER, ids, tuple(strings), min_tokens)
    looking = watch(tuple(strings), prompt, min_tokens)
    borders = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    for start, end in itertools.pairwise(borders):
        hit = looking.feed(ids[start:end])
        if hit is not None:
            assert start + hit == expected
            return
    assert expected is None


def test_ten_thousand_broken_characters_do_not_hide_it() -> None:
    looking = watch(("ab",))
    assert looking.feed([0xA4] * 300) is None
    assert looking.feed([*b"ab"]) == 1


def test_an_unknown_token_has_no_text() -> None:
    assert watch(("ab",)).feed([*b"a", 10**6, *b"b"]) == 2


def request(**changes: Any) -> GenerationRequest:
    resume = changes.pop("resume", [])
    arguments: dict[str, Any] = {"max_tokens": 10} | changes
    return GenerationRequest(id="r", prompt_ids=[1], sampling=Sampling(**arguments), resume_ids=resume)


def test_what_is_finished_already() -> None:
    assert already_finished(request(), None) is None
    assert already_finished(request(resume=[*b"abc"]), None) is None
    assert already_finished(request(resume=[*b"abcabcabca"]), None) == "length"
    assert already_finished(request(resume=[*b"abc"], stop_token_ids=(99,)), None) == "stop"  # "c"
    # a string that ends at the last token, one that ends earlier, and one that only begins
    for resume, reason in ((b"xab", "stop"), (b"abxx", "stop"), (b"xxa", None), (b"xxxxxxxxab", "stop")):
        assert already_finished(request(resume=[*resume], stop=("ab",)), watch(("ab",))) == reason
    # the first tokens of a completion cannot end it, whoever made them
    for count, reason in ((2, "stop"), (3, None)):
        least = {"min_tokens": count, "stop_token_ids": (99,)}
        assert already_finished(request(resume=[*b"cxc", *b"abc"[:2]], **least), None) == reason
        looking = watch(("ab",), min_tokens=count)
        assert already_finished(request(resume=[*b"xab"], stop=("ab",), min_tokens=count), looking) == reason
        assert looking.feed([*b"b"]) is None and looking.feed([*b"ab"]) == 1
    looking = watch(("ab",))
    assert already_finished(request(resume=[*b"xxa"], stop=("ab",)), looking) is None
    assert looking.feed([*b"b"]) == 0


def test_the_tokenizer_is_loaded_when_it_is_needed(tmp_path: Path) -> None:
    async def scenario() -> None:
        stopping = Stopping(tmp_path)
        assert await stopping.watch(request()) is None
        with pytest.raises(RequestRefused, match="holds none"):
            await stopping.watch(request(stop=("a",)))
        file = tmp_path / "tokenizer.json"
        file.write_text("{")
        with pytest.raises(RequestRefused, match="cannot be used"):
            await stopping.watch(request(stop=("a",)))
        TOKENIZER.save(str(file))
        found = await asyncio.gather(*(stopping.watch(request(stop=("ab",))) for _ in range(3)))
        assert [each.feed([*b"xab"]) for each in found if each is not None] == [2, 2, 2]

    asyncio.run(scenario())
