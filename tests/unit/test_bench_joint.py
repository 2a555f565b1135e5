"""The joint campaign would notice: its plan holds every pair, its checks find what they look for, its test is one."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from belayer.errors import ConfigError
from belayer.faults import failpoints
from belayer.faults.joint_kinds import DEAR, ELSEWHERE, FEW, KINDS, few, pairs, points, stream

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the benchmarks make models with torch"),
]


def test_the_plan_is_seeded_and_holds_every_pair_before_any_comes_again():
    count = len(pairs())
    first, again, other = (list(itertools.islice(stream(seed), count + 500)) for seed in (1, 1, 2))
    assert first == again != other
    assert {(fault.point, fault.kind) for fault in first[:count]} == set(pairs())
    assert {kind for _, kind in pairs()} == KINDS.keys() and {point for point, _ in pairs()} == set(points())
    assert [fault.index for fault in first] == list(range(count + 500))
    left_out = failpoints.NAMES.keys() - set(points())
    assert all(name.startswith(ELSEWHERE) for name in left_out) and len(points()) > 50
    assert all(name.startswith(("checkpoint.export.", "checkpoint.import.")) for name in left_out)


@pytest.mark.parametrize("seed", range(5))
def test_a_quick_campaign_strikes_with_every_kind_where_its_only_round_comes_by(seed):
    from benchmarks._joint_settings import setting

    quick = few(seed, setting(0).comes_to)
    assert quick == few(seed, setting(0).comes_to)
    assert Counter(fault.kind for fault in quick) == {kind: 1 if kind in DEAR else FEW for kind in KINDS}
    assert all(setting(0).comes_to(fault.point) for fault in quick)
    assert {fault.index for fault in quick} < set(range(len(pairs())))


def test_in_few_rounds_every_failpoint_is_come_to():
    from benchmarks._joint_settings import config, plan, setting
    from benchmarks.faults import workload

    from belayer.config import Config

    rounds = [setting(number) for number in range(60)]
    for point in points():
        assert sum(how.comes_to(point) for how in rounds) >= 15, point
        assert any(how.comes_to(point) for how in rounds[:3]), point
    for how in rounds:
        told = Config.model_validate(config(how, workload().model, Path("/model"), 3))
        assert told.run.retention == how.retention and (told.run.durability == "host") == how.durable
    assert plan(0, 96) != plan(1, 96) != plan(1, 12)  # another seed's or number's outcomes are others


def outcome(name: str, *, tokens: int = 10, reward: float = 0.5, digest: str = "d", fickle: bool = False) -> Any:
    from benchmarks._joint_task import Outcome

    return Outcome(rollout=name, attempt=0, reward=reward, tokens=tokens, turns=2, digest=digest, fickle=fickle)


def test_the_permutation_test_is_exact_for_few_pairs_and_sees_a_shift_among_many():
    from benchmarks._joint_report import sign_flips

    assert sign_flips([0.0] * 50) == 1.0
    assert sign_flips([1.0, 2.0, 3.0]) == pytest.approx(2 / 8)  # all one way, or all the other
    assert sign_flips([1.0, -1.0]) == 1.0
    assert sign_flips([0.1, 0.2, -0.3] * 20) > 0.5
    assert sign_flips([0.1, 0.2, 0.3] * 20) < 0.001


def test_pairs_are_of_the_same_rollout():
    from benchmarks._joint_report import compared

    calm = [outcome("a", tokens=10), outcome("b", tokens=30, fickle=True)]
    struck = [outcome("a", tokens=10), outcome("b", tokens=40), outcome("a", tokens=10), outcome("b", tokens=20)]
    found = compared(calm, struck)
    assert (found["pairs"], found["trajectories"], found["compared_token_by_token"]) == (2, 4, 2)
    assert found["tokens"]["with"] == 20 == found["tokens"]["without"] and found["tokens"]["p"] == 1.0
    shifted = compared(calm, [outcome("b", tokens=50)])
    assert shifted["tokens"]["difference"] == 20


def campaign(folder: Path) -> Any:
    from benchmarks._joint_campaign import Campaign
    from benchmarks.faults import workload

    made = Campaign(
        workload().model,
        faults=10,
        rollouts=2,
        seed=0,
        quick=False,
        state=folder / "x.state.json",
        say=lambda text: None,
    )
    made.saved.calm = [outcome("j-0-0"), outcome("j-1-0", fickle=True)]
    return made


def delivered(each: Any) -> dict[str, Any]:
    return {"what": "delivered", "at": 0.0, "outcome": msgspec.to_builtins(each)}


def run_of(folder: Path, names: tuple[str, ...]) -> Path:
    """A run directory whose journal has these rollouts, finished and acknowledged."""
    from belayer.journal import Journal
    from belayer.journal import records as r

    run = folder / "disk" / "round-0"
    (folder / "logs").mkdir()
    journal = Journal(run / "journal")
    for name in names:
        journal.record(r.RolloutStarted(rollout=name, group="g", task=1, seed=1))
        journal.record(r.RolloutFinished(rollout=name, reward=0.5))
        journal.record(r.Acknowledged(rollout=name))
    journal.close()
    return run


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([outcome("j-0-0"), outcome("j-1-0", fickle=True)], {}),
        ([outcome("j-0-0", digest="other"), outcome("j-1-0", fickle=True)], {"changed": 1}),
        ([outcome("j-0-0", reward=0.6), outcome("j-1-0", fickle=True)], {"changed": 1}),
        ([outcome("j-0-0"), outcome("j-1-0", fickle=True, digest="other", reward=0.1)], {}),  # may differ
        ([outcome("j-0-0")], {"lost": 1}),
        ([outcome("j-0-0"), outcome("j-1-0", fickle=True), outcome("j-1-0", fickle=True, tokens=9)], {"changed": 1}),
    ],
    ids=["same", "tokens", "reward", "fickle", "lost", "twice"],
)
def test_what_was_handed_over_is_compared(tmp_path, given, found):
    from benchmarks._joint_checks import check_round

    made, run = campaign(tmp_path), run_of(tmp_path, ("j-0-0", "j-1-0"))
    log = tmp_path / "logs" / "round-0.log"
    log.write_text("".join(json.dumps(delivered(each)) + "\n" for each in given) + '{"what": "deliv')  # torn
    assert bool(check_round(made.saved, run, 0, log)) == bool(found)
    assert made.saved.found == found


def test_what_was_acknowledged_and_comes_again_is_a_duplicate(tmp_path):
    from benchmarks._joint_checks import check_deliveries

    made = campaign(tmp_path)
    first, second = outcome("j-0-0"), outcome("j-1-0")
    check_deliveries(
        made.saved, [delivered(first), {"what": "acknowledged", "rollout": "j-0-0"}, delivered(second)], set(), 0
    )
    assert made.saved.found == {}
    check_deliveries(made.saved, [delivered(second)], {"j-0-0"}, 0)  # not acknowledged yet: it has to come again
    assert made.saved.found == {}
    check_deliveries(made.saved, [delivered(first)], {"j-0-0"}, 0)
    assert made.saved.found == {"duplicated": 1}


def test_a_journal_that_breaks_a_promise_is_found(tmp_path):
    from benchmarks._joint_checks import check_journal

    from belayer.journal import Journal
    from belayer.journal import records as r

    made, run = campaign(tmp_path), run_of(tmp_path, ("j-0-0",))
    journal = Journal(run / "journal")
    journal.record(r.RolloutStarted(rollout="j-1-0", group="g", task=1, seed=1))
    journal.record(r.ActionIntended(rollout="j-1-0", call=0, k=2, g=1, asked="x"))
    journal.close()
    wrong = check_journal(made.saved, run, 0)
    assert wrong == {"j-1-0"}
    assert made.saved.found["inconsistent"] >= 1 and made.saved.found["not_acknowledged"] == 1


def test_the_result_fails_for_anything_that_was_found(tmp_path):
    from benchmarks._joint_record import Record
    from benchmarks._joint_report import COUNTED, result_of

    def result(**found: int) -> Any:
        made = campaign(tmp_path).saved
        made.struck = [outcome("j-0-0"), outcome("j-1-0", fickle=True)]
        made.records = [Record(n, "turn.begin", "sandbox.kill", injected=True) for n in range(10)]
        made.found = found
        return result_of(made, 10, quick=False)

    assert result()["ok"]
    assert not any(result(**{name: 1})["ok"] for name in COUNTED)
    few = campaign(tmp_path).saved
    assert (
        result_of(few, 10, quick=False)["checks"]["faults_missing"] == 10 and not result_of(few, 10, quick=True)["ok"]
    )


def test_two_campaigns_at_once_are_refused():
    from benchmarks.faults import bench

    with pytest.raises(ConfigError, match="two campaigns"):
        bench(True, engine=True, sandbox=True)
