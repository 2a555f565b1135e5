"""The checker must see every broken promise: a whole story, and what happens when one thing in it is otherwise."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from belayer.journal import records as r
from belayer.verify import verify_records
from belayer.verify.witness import Attempt

pytestmark = pytest.mark.unit

GENERATE, EXEC = "generate {}", '{"type":"exec","command":"ls"}'


def story() -> list[r.AnyRecord]:
    """A rollout that is lost twice: the first time it comes back whole, the second time its context is cut."""
    start = r.RolloutStarted(rollout="x", group="g", task={"n": 1}, seed=3)
    records: list[r.AnyRecord] = [start]
    attempt = Attempt(start)

    def add(kind: Callable[..., r.AnyRecord], **fields: object) -> None:
        record = kind(rollout="x", **fields)
        attempt.see(record)
        records.append(record)

    def turn(call: int, *ids: int, version: int = 1) -> None:
        for number, token in enumerate(ids):
            last = number == len(ids) - 1
            add(
                r.TokensAppended,
                call=call,
                source="model",
                ids=[token],
                logprobs=[-0.5],
                weights_version=version,
                asked=GENERATE,
                finish="stop" if last else "",
            )

    def action(call: int, k: int, g: int, observed: str) -> None:
        add(r.ActionIntended, call=call, k=k, g=g, asked=EXEC)
        add(r.ActionCompleted, call=call, k=k, g=g, observed=observed, result={"value": observed})

    def observe(call: int, *ids: int) -> None:
        add(r.TokensAppended, call=call, source="observation", ids=list(ids), asked="observe")

    observe(0, 7, 8)
    turn(1, 1, 2)
    action(2, 1, 1, "one")
    add(r.CheckpointPublished, k=1, g=1, id="c1", level="full", context_hash=attempt.context_hash(1))
    observe(3, 9)
    turn(4, 3, 4)
    add(r.ActionIntended, call=5, k=2, g=1, asked=EXEC)  # it dies under this one
    add(r.EnvRestored, k=1, g=2, checkpoint="c1", replayed=0, reason="died")
    action(5, 2, 2, "two")
    observe(6, 10)
    turn(7, 5)
    action(8, 3, 2, "three")
    add(r.CheckpointPublished, k=3, g=2, id="c3", level="full", context_hash=attempt.context_hash(3))
    turn(9, 6)
    # c3 is damaged, and action 3 says something else when it is done again: only two actions can be had
    add(r.EnvRestored, k=2, g=3, checkpoint="c1", replayed=1, reason="died")
    add(r.ContextTruncated, call=7, k=3, position=8, reason="another observation")
    turn(7, 5)
    action(8, 3, 3, "other")
    add(r.ValueDrawn, call=9, what="now", value=1.0)
    add(r.RolloutFinished, reward=1.0)
    add(r.Acknowledged)
    assert attempt.breaches == []
    return records


def test_a_consistent_story() -> None:
    verdict = verify_records(story())
    assert verdict.consistent, verdict.findings
    assert (verdict.rollouts, verdict.finished, verdict.delivered) == (1, 1, 1)
    assert (verdict.restores, verdict.truncated_tokens) == (2, 2)


Change = Callable[[list[r.AnyRecord]], None]


def nth(kind: type, number: int = 0) -> Callable[[list[r.AnyRecord]], int]:
    return lambda records: [i for i, record in enumerate(records) if isinstance(record, kind)][number]


def without(kind: type, number: int = 0) -> Change:
    return lambda records: records.pop(nth(kind, number)(records)) and None


def twice(kind: type, number: int = 0) -> Change:
    def change(records: list[r.AnyRecord]) -> None:
        at = nth(kind, number)(records)
        records.insert(at, records[at])

    return change


def other(kind: type, number: int = 0, **fields: object) -> Change:
    def change(records: list[r.AnyRecord]) -> None:
        at = nth(kind, number)(records)
        records[at] = msgspec.structs.replace(records[at], **fields)

    return change


def swapped(kind: type, number: int = 0) -> Change:
    """With the record after it."""

    def change(records: list[r.AnyRecord]) -> None:
        at = nth(kind, number)(records)
        records[at], records[at + 1] = records[at + 1], records[at]

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (without(r.RolloutStarted), "belongs to no attempt"),
        (twice(r.RolloutStarted), "follows after attempt"),
        (other(r.RolloutStarted, attempt=1), "first attempt is number 1"),
        (without(r.TokensAppended), "follows after 0 calls"),
        (twice(r.TokensAppended, 2), "after it had ended"),
        (other(r.TokensAppended, 1, logprobs=[]), "0 logprobs"),
        (other(r.TokensAppended, 1, logprobs=[float("nan")]), "a logprob that is none"),
        (other(r.TokensAppended, 0, logprobs=[-1.0]), "were not sampled"),
        (other(r.TokensAppended, 1, ids=[-5]), "negative token id"),
        (other(r.TokensAppended, 1, weights_version=2), "older weights"),
        (other(r.TokensAppended, 2, asked="generate {1}"), "other sampling"),
        (other(r.TokensAppended, 2, finish=""), "before call 1 was over"),
        (without(r.ActionIntended), "without having been begun"),
        (twice(r.ActionIntended), "may have run already"),
        (other(r.ActionIntended, 0, k=2), "was begun after 0 actions"),
        (other(r.ActionIntended, 2, asked="another"), "tried again as another action"),
        (other(r.ActionIntended, 2, g=1), "after 2"),
        (other(r.ActionIntended, 2, g=5), "nobody restored"),
        (without(r.ActionCompleted), "may have run already"),
        (twice(r.ActionCompleted), "without having been begun"),
        (other(r.ActionCompleted, 0, k=2), "without having been begun"),
        (other(r.ActionCompleted, 0, g=7), "without having been begun"),
        (other(r.ActionCompleted, 0, observed="a lie"), "does not carry the context"),
        (without(r.CheckpointPublished), "never published"),
        (twice(r.CheckpointPublished), "published twice"),
        (other(r.CheckpointPublished, 0, k=0), "the environment was at 1"),
        (other(r.CheckpointPublished, 0, g=9), "is of generation 9"),
        (other(r.CheckpointPublished, 0, context_hash="beef"), "does not carry the context"),
        (without(r.EnvRestored), "may have run already"),
        (other(r.EnvRestored, 0, checkpoint="c9"), "never published"),
        (other(r.EnvRestored, 0, replayed=1), "1 were replayed"),
        (other(r.EnvRestored, 0, checkpoint=""), "were done anew"),
        (other(r.EnvRestored, 0, g=1), "was restored after"),
        (other(r.EnvRestored, 0, k=2, replayed=1), "were completed"),
        (other(r.EnvRestored, 1, k=1, replayed=0), "the environment has 1"),
        (without(r.EnvRestored, 1), "the environment has 3"),
        (without(r.ContextTruncated), "on a context that describes another state"),
        (other(r.ContextTruncated, call=8), "too late"),
        (other(r.ContextTruncated, call=6), "too early"),
        (other(r.ContextTruncated, call=5), "the context has [1]"),
        (other(r.ContextTruncated, position=7), "somewhere else"),
        (other(r.ContextTruncated, call=30), "at call 30 of"),
        (other(r.RolloutFinished, reward=float("inf")), "its reward is inf"),
        (twice(r.RolloutFinished), "follows after its end"),
        (without(r.RolloutFinished), "without having finished"),
        (swapped(r.RolloutFinished), "without having finished"),
        (twice(r.Acknowledged), "acknowledged twice"),
        (swapped(r.ActionCompleted), "was published while an action was under way"),
    ],
)
def test_every_broken_promise_is_seen(change: Change, text: str) -> None:
    records = story()
    change(records)
    verdict = verify_records(records)
    assert any(text in finding.what for finding in verdict.findings), verdict.findings


def test_a_restore_from_a_branch_that_was_cut_off() -> None:
    records = story()
    at = nth(r.ValueDrawn)(records)
    records.insert(at, r.EnvRestored(rollout="x", k=3, g=4, checkpoint="c3", replayed=0, reason="died"))
    verdict = verify_records(records)
    assert {finding.what for finding in verdict.findings} == {
        "c3 is of a branch that was cut off",
        "c3 is not of this context",
    }


def test_a_second_attempt() -> None:
    first = story()[:8]
    failed = r.RolloutFailed(rollout="x", error="BudgetSpent", reason="it kept dying")
    again = [msgspec.structs.replace(record, attempt=1) for record in story()]
    assert verify_records([*first, failed, *again]).consistent
    verdict = verify_records([*first, *again])
    assert [finding.what for finding in verdict.findings] == ["attempt 1 began before attempt 0 had failed"]
    other_seed = [msgspec.structs.replace(again[0], seed=4), *again[1:]]
    assert "another seed" in verify_records([*first, failed, *other_seed]).findings[0].what
    silent = msgspec.structs.replace(failed, reason="")
    assert "without a reason" in verify_records([*first, silent]).findings[0].what


def test_a_voided_turn() -> None:
    records = story()
    at = nth(r.TokensAppended, 2)(records)
    void = r.TurnVoided(rollout="x", call=1, reason="new weights")
    begun = records[at - 1]
    assert verify_records([*records[:at], void, begun, *records[at:]]).consistent
    verdict = verify_records([*records[: at + 1], void, *records[at + 1 :]])
    assert any("is no turn under way" in finding.what for finding in verdict.findings)


def test_a_trainer_that_would_be_given_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from belayer.verify import checker

    right = checker.trajectory
    wrong = {"token_ids": [0], "loss_mask": [1], "logprobs": [-9.0], "weights_versions": [8], "turns": 0}
    for name, value in wrong.items():
        monkeypatch.setattr(
            checker,
            "trajectory",
            lambda history, name=name, value=value: msgspec.structs.replace(right(history), **{name: value}),
        )
        (finding,) = verify_records(story()).findings
        assert finding.what == f"a trainer gets other {name} than were journalled"
