"""Gathered tokens arrive in order, once, and never later than promised."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belayer.engine._wire import Chunk
from belayer.engine.workers.outbox import GATHER_S, Outbox

pytestmark = pytest.mark.unit


def chunk(key: str, start: int, *, end: bool = False) -> Chunk:
    return Chunk(key, start, [start], [-0.5 * start], "length" if end else None)


def test_the_first_and_the_last_token_wait_for_nothing() -> None:
    box = Outbox()
    assert not box and not box.due(0.0, 0.0)
    box.add([chunk("a", 7), chunk("b", 0)])
    assert box and box.due(0.0, 0.0)
    assert len(box.take(0.0)) == 2 and not box
    box.add([chunk("a", 8)])
    assert not box.due(0.001, 0.001)
    box.add([chunk("a", 9), chunk("c", 0)])  # another request begins: all go
    assert box.due(0.002, 0.001)
    assert box.take(0.002)[0] == Chunk("a", 8, [8, 9], [-4.0, -4.5], None)
    box.add([chunk("b", 1, end=True)])
    assert box.due(0.003, 0.001) and box.take(0.003)[0].finish_reason == "length"
    box.add([chunk("b", 0)])  # the same id once more is a new beginning
    assert box.due(0.004, 0.001)


def test_a_slow_step_is_waited_for_by_nobody() -> None:
    box = Outbox()
    box.add([chunk("a", 0)])
    box.take(0.0)
    box.add([chunk("a", 1)])
    assert box.due(0.001, GATHER_S)  # the next step would end too late
    assert not box.due(0.001, GATHER_S / 2)
    assert box.due(GATHER_S, 0.001)


def test_a_request_that_the_driver_may_end_is_sent_at_once() -> None:
    box = Outbox()
    box.expect("a", watched=True)
    box.expect("b", watched=False)
    box.add([chunk("a", 0), chunk("b", 0)])
    box.take(0.0)
    box.add([chunk("b", 1)])
    assert not box.due(0.0, 0.0)
    box.add([chunk("a", 1)])
    assert box.due(0.0, 0.0)
    box.take(0.0)
    box.forget(["a"])
    box.add([chunk("b", 2)])
    assert not box.due(0.0, 0.0)


def test_aborted_requests_leave_nothing() -> None:
    box = Outbox()
    box.add([chunk("a", 0), chunk("b", 0)])
    box.take(0.0)
    box.add([chunk("a", 1), chunk("b", 1)])
    box.forget(["a", "unknown"])
    assert [each.id for each in box.take(0.0)] == ["b"]
    box.add([chunk("a", 0)])
    assert box.due(0.0, 0.0)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    steps=st.lists(st.tuples(st.floats(0.001, 0.05), st.sets(st.integers(0, 4), max_size=5)), max_size=60),
)
def test_nothing_is_lost_repeated_or_late(lengths: list[int], steps: list[tuple[float, set[int]]]) -> None:
    """Requests advance at random; what is sent is what was made, and no token waits past its time."""
    box, made, sent = Outbox(), [0] * len(lengths), [0] * len(lengths)
    now, oldest = 0.0, None
    for step_s, advancing in steps:
        now += step_s
        running = [r for r in sorted(advancing) if r < len(lengths) and made[r] < lengths[r]]
        box.add([chunk(str(r), made[r], end=made[r] + 1 == lengths[r]) for r in running])
        for r in running:
            made[r] += 1
        oldest = now if oldest is None and box else oldest
        if box.due(now, step_s):
            for each in box.take(now):
                r = int(each.id)
                assert each.start == sent[r] and each.token_ids == [*range(sent[r], sent[r] + len(each.token_ids))]
                assert len(each.logprobs) == len(each.token_ids)
                assert (each.finish_reason is not None) == (sent[r] + len(each.token_ids) == lengths[r])
                sent[r] += len(each.token_ids)
            oldest = None
        assert oldest is None or now - oldest <= GATHER_S
    assert box or sent == made
