"""What `belayer show` prints: nothing of the journal is missing, and what was cut off is marked."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
from tests.unit.test_verify import story

from belayer.journal import records as r
from belayer.journal.journal import fold
from belayer.observe.transcript import transcript
from belayer.trajectory import trajectory

pytestmark = pytest.mark.unit


def test_a_story_with_a_loss_and_a_cut() -> None:
    records = story()
    other = [r.RolloutStarted(rollout="y", group="g", task=None, seed=1)]
    entries = transcript([*records[:5], *other, *records[5:]], "x", lambda ids: " ".join(map(str, ids)))
    kinds = [entry.kind for entry in entries]
    assert kinds.count("restored") == 2 and kinds.count("context cut") == 1 and kinds.count("checkpoint") == 2
    assert kinds[0] == "started" and kinds[-2:] == ["finished", "delivered"]
    # what is not void is what the trainer gets, token for token
    given = trajectory(fold(records)["x"])
    assert [token for entry in entries if not entry.void for token in entry.ids] == given.token_ids
    void = [(entry.kind, entry.call, entry.k) for entry in entries if entry.void]
    assert void == [("action", 5, 2), ("turn", 7, None), ("action", 8, 3), ("turn", 9, None)]
    first = next(entry for entry in entries if entry.kind == "turn")
    assert (first.ids, first.text, first.versions, first.finish) == ([1, 2], "1 2", [1], "stop")
    done = [entry for entry in entries if entry.kind == "action" and not entry.void]
    assert [entry.result for entry in done] == ["'one'", "'two'", "'other'"]
    cut = next(entry for entry in entries if entry.kind == "context cut")
    assert "at token 8" in cut.detail


def test_attempts_are_kept_apart() -> None:
    records = story()[:6]
    failed = r.RolloutFailed(rollout="x", error="BudgetSpent", reason="it kept dying")
    again = [msgspec.structs.replace(record, attempt=1) for record in story()]
    entries = transcript([*records, failed, *again], "x")
    assert {entry.attempt for entry in entries} == {0, 1}
    assert not any(entry.void for entry in entries if entry.attempt == 0)
    assert next(entry for entry in entries if entry.kind == "failed").detail == "BudgetSpent: it kept dying"


def test_a_voided_turn_is_marked() -> None:
    records = story()
    at = next(i for i, record in enumerate(records) if isinstance(record, r.TokensAppended) and record.call == 1)
    void = r.TurnVoided(rollout="x", call=1, reason="new weights")
    entries = transcript([*records[: at + 1], void, *records[at:]], "x")
    turns = [(entry.ids, entry.void) for entry in entries if entry.kind == "turn" and entry.call == 1]
    assert turns == [([1], True), ([1, 2], False)]


def test_survivorship_counts_by_length() -> None:
    from belayer.observe.survivorship import survivorship

    def history(turns: int, **state: object) -> object:
        calls = [SimpleNamespace(kind="generate")] * turns + [SimpleNamespace(kind="action")]
        plain = {"acknowledged": True, "failed": None, "attempts": 1, "restores": 0, "truncations": 0}
        return SimpleNamespace(calls=calls, **{**plain, **state})

    found = survivorship(
        [
            history(0, acknowledged=False, failed="BudgetSpent"),
            history(3),
            history(4, restores=2, truncations=1),
            history(80, attempts=2),
        ]  # pyright: ignore[reportArgumentType]
    )
    shown = [
        (each.low, each.high, each.rollouts, each.delivered, each.lost, each.retried, each.restored, each.truncated)
        for each in found
    ]
    assert shown == [(0, 0, 1, 0, 1, 0, 0, 0), (3, 4, 2, 2, 0, 0, 1, 1), (55, None, 1, 1, 0, 1, 0, 0)]
