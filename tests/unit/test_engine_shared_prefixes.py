"""Who is prefilled when, where several requests have the same beginning."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer.engine.backends.shared_prefixes import PrefillOrder

pytestmark = pytest.mark.unit

PAGE = 4


def queued(**requests: str) -> PrefillOrder:
    order = PrefillOrder(PAGE)
    for key, tokens in requests.items():
        order.add(key, [ord(c) for c in tokens])
    return order


def test_strangers_are_prefilled_together() -> None:
    assert queued(a="aaaaa", b="bbbbb", c="aab", d="aac").ready() == ["a", "b", "c", "d"]


def test_the_members_of_a_group_wait_for_the_first() -> None:
    order = queued(a="ppppx", b="ppppy", c="ppppz")
    assert order.ready() == ["a"]
    assert order.ready() == []
    order.computed("a")
    order.computed("a")
    assert order.ready() == ["b", "c"]


def test_what_two_of_them_share_beyond_that_is_computed_once_too() -> None:
    order = queued(a="ppppaaaa.", b="ppppbbbb.", c="ppppbbbb!", d="ppppbbbb?")
    assert order.ready() == ["a"]
    order.computed("a")
    assert order.ready() == ["b"]
    order.computed("b")
    assert order.ready() == ["c", "d"]


def test_one_that_nobody_wants_any_more_holds_nobody_up() -> None:
    order = queued(a="ppppx", b="ppppy", c="ppppz")
    assert order.ready() == ["a"]
    order.end("b")
    order.end("a")
    assert order.ready() == ["c"]


def test_the_last_token_is_never_shared() -> None:
    """Two equal prompts of whole pages: the second computes its last page itself."""
    assert queued(a="pppp", b="pppp").ready() == ["a", "b"]


@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=16), min_size=1, max_size=8), st.randoms())
def test_everybody_comes_to_be_prefilled_and_no_page_is_computed_twice(prompts: list[str], random) -> None:
    order = PrefillOrder(PAGE)
    for number, prompt in enumerate(prompts):
        order.add(str(number), [ord(c) for c in prompt])
    cached: set[str] = set()
    computing: dict[str, set[str]] = {}
    seen: list[str] = []
    while len(seen) < len(prompts):
        for key in order.ready():
            prompt = prompts[int(key)]
            pages = {prompt[:end] for end in range(PAGE, len(prompt), PAGE)} - cached
            assert not any(pages & other for other in computing.values())
            computing[key] = pages
            seen.append(key)
        key = random.choice(list(computing))  # there is one: whoever waits, waits for somebody
        order.computed(key)
        cached |= computing.pop(key)
    assert sorted(seen) == sorted(map(str, range(len(prompts))))
