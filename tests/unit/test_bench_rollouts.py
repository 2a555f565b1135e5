"""The live benches' pure parts: turns and their scale, the paced engine, strikes, arms, calibration."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import random
import statistics
import time
from typing import Any, cast

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

from benchmarks._calibration import LEVELS, SETTLED, Calibration, poisson_p
from benchmarks._e2e_rollouts import Lived, arm_config, cell, merged, rollout_ratio, sameness
from benchmarks._in_step import overlap
from benchmarks._paced import PacedEngine, token
from benchmarks._rollout_overhead import SHAPES, Seen, hidden_if_always
from benchmarks._strikes import Strikes
from benchmarks._turns import TOOL, TOOL_LIMIT_S, TURN, Shape, lengths, tasks

from belayer import events as ev
from belayer.checkpoint.predictors import FailureRate
from belayer.config import Config
from belayer.engine import GenerationRequest, Sampling, TokenChunk
from belayer.observe.survivorship import LengthClass

pytestmark = pytest.mark.unit


# -- turns -----------------------------------------------------------------------------------------------------------
def test_small_batches_have_the_published_quantiles() -> None:
    found = sorted(lengths(40, TURN, random.Random(0), math.inf))
    assert statistics.median(found) == pytest.approx(5.7, rel=0.05)
    assert found[35] == pytest.approx(22, rel=0.1)  # p90
    tools = sorted(lengths(40, TOOL, random.Random(0), TOOL_LIMIT_S))
    assert statistics.median(tools) == pytest.approx(0.3, rel=0.1)
    assert tools[-1] == TOOL_LIMIT_S
    assert found == sorted(lengths(40, TURN, random.Random(9), math.inf)), "another seed only shuffles"


def test_overlap_of_spans() -> None:
    assert overlap([]) == (0, 0.0)
    assert overlap([(1.0, 2.0), (2.0, 3.0)]) == (1, 0.0)
    assert overlap([(1.0, 4.0), (2.0, 3.0), (2.5, 5.0)]) == (3, pytest.approx(2.0))


def test_scale_shortens_turns_and_tools_and_nothing_else() -> None:
    whole = tasks(Shape(6, 6, (2, 4), 1.0), 50.0, 3)
    fifth = tasks(Shape(6, 6, (2, 4), 0.2), 50.0, 3)
    counts = sorted(len(task["steps"]) for task in whole)
    assert counts == [2, 2, 3, 3, 4, 4]
    for one, other in zip(whole, fifth, strict=True):
        for (tokens, tool_s, nbytes), (fewer, shorter, same) in zip(one["steps"], other["steps"], strict=True):
            assert abs(tokens * 0.2 - fewer) <= 1 and shorter == pytest.approx(tool_s * 0.2, abs=2e-4)
            assert nbytes == same
    assert whole == tasks(Shape(6, 6, (2, 4), 1.0), 50.0, 3)


def test_more_is_hidden_where_turns_are_longer() -> None:
    shares = [hidden_if_always([0.08] * 5, scale) for scale in (0.02, 0.1, 0.2, 1.0)]
    assert shares == sorted(shares)
    # c = 0.1 s under LogN(1.74 + ln 0.2, 1.1), by hand: 1 - 0.0039
    assert hidden_if_always([0.1], 0.2) == pytest.approx(0.9961, abs=5e-4)


def test_every_full_bench_has_ten_pairs_and_slots_for_all() -> None:
    from benchmarks._rollout_overhead import PAIRS

    assert PAIRS[False] >= 10
    assert all(shape.slots >= shape.rollouts for shape in SHAPES.values()), "a run's wall time is that of one wave"


# -- the paced engine --------------------------------------------------------------------------------------------------
def _generate(resume: list[int]) -> tuple[list[TokenChunk], float]:
    request = GenerationRequest(
        id="r", prompt_ids=[1], sampling=Sampling(max_tokens=30, temperature=1.0, seed=5), resume_ids=resume
    )
    chunks: list[TokenChunk] = []
    begun = time.monotonic()
    asyncio.run(PacedEngine(tokens_per_s=200.0).generate(request, chunks.append))
    return chunks, time.monotonic() - begun


def test_a_paced_turn_takes_its_time_and_says_the_same_again() -> None:
    chunks, wall_s = _generate([])
    ids = [each for chunk in chunks for each in chunk.token_ids]
    assert ids == [token(5, position) for position in range(30)]
    assert [chunk.start for chunk in chunks] == [sum(len(c.token_ids) for c in chunks[:n]) for n in range(len(chunks))]
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length" and wall_s >= 30 / 200


def test_a_resumed_turn_only_takes_what_is_left() -> None:
    chunks, wall_s = _generate([token(5, position) for position in range(20)])
    assert chunks[0].start == 20 and sum(len(chunk.token_ids) for chunk in chunks) == 10
    assert wall_s >= 10 / 200


# -- strikes and arms --------------------------------------------------------------------------------------------------
def test_strikes_come_at_the_rate_that_was_asked_for_and_at_the_same_ages_again() -> None:
    def ages(name: str) -> list[int]:
        strikes = Strikes(cast(Any, None), 2.0, 7)
        return [tick for tick in range(8_000) if strikes.ages(name, 0.05)]

    found = ages("a")
    assert len(found) == pytest.approx(200, rel=0.25)  # 400 s of life
    assert found == ages("a") and found != ages("b")


def test_the_arm_that_starts_anew_never_restores_and_none_gives_up() -> None:
    anew, mine = arm_config(Config(), "restart"), arm_config(Config(), "belayer")
    assert anew.policy.name == "never" and anew.recovery.infra_retries == 0
    assert mine.policy == Config().policy and mine.recovery.infra_retries >= 100
    assert anew.recovery.attempts == mine.recovery.attempts >= 100


def _lived(**changes: Any) -> Lived:
    fields: dict[str, Any] = {
        "wall_s": 10.0,
        "rollout_s": {0: 4.0, 1: 6.0},
        "found": {0: (0.5, [1, 2, 3], 2), 1: (1.0, [4, 5, 6, 7], 2)},
        "struck": 0,
        "restores": 0,
        "restarts": 0,
        "replayed": 0,
        "tokens_made": 7,
        "tokens_delivered": 7,
        "checkpoints": 1,
        "seconds": {"restore": 0.1},
        "lost": 0,
        "lengths": [LengthClass(2, 2, rollouts=2, delivered=2)],
        "findings": 0,
        "duplicated": 0,
    }
    return Lived(**(fields | changes))


def test_rollouts_are_compared_with_themselves_undisturbed() -> None:
    found = rollout_ratio([_lived()], [_lived(rollout_s={0: 4.4, 1: 6.6})])
    assert found["rollouts"] == pytest.approx(1.1) and found["pairs"] == 2
    assert found["interval"] == (pytest.approx(1.1), pytest.approx(1.1))


def test_identical_trajectories_are_tested_in_pairs_and_lost_ones_are_not_overlooked() -> None:
    same = sameness([_lived()], [_lived()])
    assert (same["identical"], same["reward"]["p"], same["length"]["p"]) == (2, 1.0, 1.0)
    assert same["test"].startswith("paired")
    lost = sameness([_lived()], [_lived(found={1: (1.0, [4, 5, 6, 7], 2)})])
    assert lost["compared"] == 1 and lost["test"].startswith("two groups") and lost["length"]["with"] == 4.0


def test_a_cell_counts_what_was_done_again_and_checks_what_was_delivered() -> None:
    calm, mine = [_lived()], [_lived(wall_s=10.1, struck=2, restores=2)]
    anew = [_lived(wall_s=15.0, struck=2, restarts=2, tokens_made=12)]
    found = cell(SHAPES[True], 0.73, 5.0, calm, mine, anew)
    assert not any(found["checks"].values())
    assert found["against_no_faults"]["belayer"]["wall"] == pytest.approx(1.01)
    assert found["against_no_faults"]["restart"]["wall"] == pytest.approx(1.5)
    assert found["ratios"]["restart"] == pytest.approx(15 / 10.1)
    assert found["arms"]["restart"]["tokens_redone"] == 5
    broken = cell(SHAPES[True], 0.73, 5.0, calm, [_lived(found={0: (0.2, [1, 2, 9], 2)}, lost=1)], anew)
    assert broken["checks"]["trajectories_changed"] == 2 and broken["checks"]["lost"] == 1
    assert broken["checks"]["state_wrong"] == 1


def test_length_classes_of_several_rounds_add_up() -> None:
    one, two = LengthClass(2, 2, rollouts=3, retried=1), LengthClass(3, 4, rollouts=1, lost=1)
    found = merged([[one, two], [LengthClass(2, 2, rollouts=2, delivered=2)]])
    assert [(each["low"], each["rollouts"]) for each in found] == [(2, 5), (3, 1)]
    assert found[0]["retried"] == 1 and found[0]["delivered"] == 2 and found[1]["lost"] == 1


# -- what events say ---------------------------------------------------------------------------------------------------
def _event(kind: str, **data: Any) -> ev.Event:
    return ev.Event(kind=kind, subject="r", data=data)


def test_checkpoints_are_counted_by_what_became_of_them() -> None:
    seen = Seen()
    seen(_event(ev.CHECKPOINT, wall_s=0.1, exposed_s=0.0, frozen_s=0.05))
    seen(_event(ev.CHECKPOINT, wall_s=0.3, exposed_s=0.1, frozen_s=0.05))
    seen(_event(ev.CHECKPOINT_SKIPPED, action=1, abandoned=False, why=""))
    seen(_event(ev.CHECKPOINT_SKIPPED, action=2, abandoned=True, why=""))
    assert (seen.taken, seen.skipped, seen.abandoned) == (2, 1, 1)
    assert seen.hidden == pytest.approx(0.75)
    seen(_event(ev.CHECKPOINT, wall_s=0.1, exposed_s=0.3, frozen_s=0.05, queued_s=0.5))
    assert seen.hidden == pytest.approx(1 - 0.4 / 1.0), "what waits in the queue is hidden too, as long as nobody waits"
    seen.clear()
    assert seen.figures()["hidden"] is None


def test_coverage_of_turns_that_are_as_predicted() -> None:
    rng = random.Random(3)
    found = Calibration()
    for _ in range(1500):
        found(_event(ev.GENERATE, wall_s=rng.lognormvariate(0.1, 1.1)))
    figures = found.figures()["bubble"]
    assert figures["count"] == 1500 - SETTLED
    for level in LEVELS:
        assert figures["coverage"][f"{level:g}"] == pytest.approx(level, abs=0.04)


def test_coverage_of_checkpoints_whose_time_varies() -> None:
    rng = random.Random(3)
    found = Calibration()
    for _ in range(600):
        found(_event(ev.CHECKPOINT, wall_s=0.08 * rng.lognormvariate(0.0, 0.4), exposed_s=0.0))
    figures = found.figures()["cost"]
    assert figures["mean_ratio"] == pytest.approx(1.0, abs=0.05)
    for level in LEVELS:
        assert figures["coverage"][f"{level:g}"] == pytest.approx(level, abs=0.06)


def test_coverage_shows_a_predictor_that_is_too_sure() -> None:
    """Turns of two kinds are not log-normal: no quantile of one kind's is right for both."""
    rng = random.Random(3)
    found = Calibration()
    for _ in range(1000):
        found(_event(ev.GENERATE, wall_s=0.1 if rng.random() < 0.5 else 10.0))
    assert abs(found.figures()["bubble"]["worst"]) > 0.1


def test_failures_are_held_against_the_rate() -> None:
    found = Calibration(prior_s=100.0)
    for number in range(400):
        found(_event(ev.EXEC, wall_s=1.0))
        if number % 100 == 99:
            found(_event(ev.FAULT_DETECTED, fault="sandbox"))
            found(_event(ev.FAULT_DETECTED, fault="checkpoint"))  # none of an environment
    figures = found.figures()["failures"]
    assert figures["counted"] == 4 and figures["at_risk_s"] == 400.0
    assert 2.0 < figures["expected"] < 6.0 and figures["chance"] > 0.05


def test_poisson() -> None:
    assert poisson_p(0, 0.0) == 1.0
    assert poisson_p(0, 10.0) == pytest.approx(2 * math.exp(-10.0))
    assert poisson_p(10, 10.0) > 0.5
    assert poisson_p(30, 10.0) < 1e-4


def test_a_run_of_a_minute_notices_that_environments_die_every_few_seconds() -> None:
    rate = FailureRate(3600.0)
    for _ in range(8):
        rate.survived(7.5)
        rate.failed()
    assert rate.per_s > 1 / 75
    calm = FailureRate(3600.0)
    calm.survived(36_000.0)
    assert calm.per_s < 1e-5
