"""Budgets, groups, quarantine, watchdog: what fails is said, with its first reason, and nothing shrinks in silence.

Against the model environment of `test_consistency`.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from tests.stateful.test_consistency import AlwaysDies, Chaos, ModelEngine, ModelSandboxes, World

from belayer import events
from belayer.cli.show import _print_rollouts
from belayer.config import Config, RecoveryConfig, RunConfig
from belayer.engine import TokenChunk
from belayer.errors import (
    ConfigError,
    GroupFailed,
    NoProgress,
    Quarantined,
    ReplayDivergence,
    RolloutFailed,
    SandboxLost,
)
from belayer.groups import counting
from belayer.journal import Journal, scan
from belayer.observe.transcript import transcript
from belayer.recovery.quarantine import Quarantine
from belayer.recovery.watchdog import ProgressWatchdog
from belayer.run import Run
from belayer.verify import verify_run

pytestmark = pytest.mark.stateful


async def collect(
    folder, function, tasks=("x",), *, group_size=1, chaos=None, max_concurrent=4, image=None, kind=ModelSandboxes,
    **recovery,
):  # fmt: skip
    """(trajectories, journal) of `function` in the model world, with this `[recovery]`."""
    journal = Journal(folder / "journal")
    config = Config(
        run=RunConfig(max_concurrent=max_concurrent), recovery=RecoveryConfig(**({"infra_retries": 2} | recovery))
    )
    run = Run(SimpleNamespace(path=folder), config, journal, SimpleNamespace(close=lambda: None))
    chaos, world = chaos or Chaos([]), World()
    run.sandboxes, run.engine, run.sink = kind(world, chaos), ModelEngine(world, chaos, 5), events.ignore
    try:
        return await run.collect(function, list(tasks), group_size=group_size, name="t", image=image), journal
    finally:
        journal.close()


def reopened(folder):
    journal = Journal(folder / "journal")
    journal.close()
    return journal.histories


async def acts(rollout):
    await rollout.observe([1])
    await rollout.sandbox.exec("a")
    return 1.0


class DiesFor(Chaos):
    """New environments die at once, `times` times."""

    def __init__(self, times: int) -> None:
        super().__init__([])
        self.times = times

    def strikes(self, *kinds: str) -> str:
        if kinds == ("dies at once",) and self.times:
            self.times -= 1
            return "dies at once"
        return ""


# -- budgets -----------------------------------------------------------------------------------------------------------
def test_a_spent_infrastructure_budget_names_its_setting_and_the_first_reason(tmp_path):
    with pytest.raises(GroupFailed) as caught:
        asyncio.run(collect(tmp_path, acts, chaos=AlwaysDies(), attempts=2))
    assert "recovery.attempts = 2" in str(caught.value) and caught.value.first.startswith("rollout t-0-0")
    history = reopened(tmp_path)["t-0-0"]
    assert [error for _, error, _ in history.failures] == ["BudgetSpent", "BudgetSpent"]
    assert "recovery.infra_retries = 2" in history.failures[0][2] and history.agent_failures == 0


def test_an_agents_error_spends_no_budget_of_the_infrastructure(tmp_path):
    calls = []

    async def fails_twice(rollout):
        calls.append(rollout.attempt)
        await rollout.observe([1])
        if len(calls) < 3:
            raise KeyError("mine")
        return 1.0

    (done,), _ = asyncio.run(collect(tmp_path, fails_twice, attempts=1, agent_retries=2))
    assert done.attempt == 2 and calls == [0, 1, 2]
    history = reopened(tmp_path)["t-0-0"]
    assert history.agent_failures == 2 and [error for _, error, _ in history.failures] == ["KeyError", "KeyError"]
    assert verify_run(tmp_path).consistent


def test_a_spent_agent_budget_is_named_too(tmp_path):
    async def fails(rollout):
        await rollout.observe([1])
        raise KeyError("mine")

    with pytest.raises(GroupFailed) as caught:
        asyncio.run(collect(tmp_path, fails, attempts=5, agent_retries=1))
    assert "recovery.agent_retries = 1" in str(caught.value) and "KeyError" in caught.value.first
    assert len(reopened(tmp_path)["t-0-0"].failures) == 2  # not five: that budget is the infrastructure's


def test_deaths_during_one_action_are_counted_by_the_configured_limit(tmp_path):
    class Deadly(Chaos):
        def strikes(self, *kinds: str) -> str:
            return "dies before" if kinds[:1] == ("dies before",) else ""

    with pytest.raises(RolloutFailed, match="died 5 times during action 1"):
        asyncio.run(
            collect(tmp_path, acts, chaos=Deadly([]), attempts=1, infra_retries=50, deaths_per_action=5, breaker=100)
        )


# -- groups ------------------------------------------------------------------------------------------------------------
def test_a_failed_member_is_replaced_by_another_draw(tmp_path):
    done, _ = asyncio.run(
        collect(tmp_path, acts, group_size=3, chaos=DiesFor(3), attempts=1, max_concurrent=1, group="replace")
    )
    assert [each.rollout_id for each in done] == ["t-0-0~1", "t-0-1", "t-0-2"]
    histories = reopened(tmp_path)
    assert histories["t-0-0"].failed is not None and histories["t-0-0~1"].started.group == "t-0"
    assert histories["t-0-0~1"].started.seed != histories["t-0-0"].started.seed, "a replacement is another draw"
    assert sorted(history.rollout for history in counting(histories)) == ["t-0-0~1", "t-0-1", "t-0-2"]
    assert verify_run(tmp_path).consistent
    # and it stays replaced: the run goes on where it was
    again, _ = asyncio.run(collect(tmp_path, acts, group_size=3, attempts=1, group="replace"))
    assert [each.rollout_id for each in again] == [each.rollout_id for each in done]


def test_a_group_that_cannot_be_completed_fails_and_says_why(tmp_path):
    with pytest.raises(GroupFailed) as caught:
        asyncio.run(
            collect(
                tmp_path, acts, group_size=2, chaos=AlwaysDies(), attempts=1, group="replace", replacements=2,
                quarantine=50, max_concurrent=1, breaker=1000,
            )
        )  # fmt: skip
    assert "recovery.replacements = 2" in str(caught.value) and "groups of 2 are short" in str(caught.value)
    assert sum("~" in name for name in reopened(tmp_path)) == 2


def test_by_default_a_short_group_is_an_error_after_all_others_were_handed_over(tmp_path):
    seen = []

    async def main():
        journal = Journal(tmp_path / "journal")
        config = Config(run=RunConfig(max_concurrent=1), recovery=RecoveryConfig(infra_retries=2, attempts=1))
        run = Run(SimpleNamespace(path=tmp_path), config, journal, SimpleNamespace(close=lambda: None))
        chaos, world = DiesFor(3), World()
        run.sandboxes, run.engine, run.sink = ModelSandboxes(world, chaos), ModelEngine(world, chaos, 5), events.ignore
        try:
            async for done in run.rollouts(acts, ["x"], group_size=3, name="t"):
                seen.append(done.rollout_id)
        finally:
            journal.close()

    with pytest.raises(GroupFailed, match="1 of 3 rollouts failed, so that groups of 3 are short"):
        asyncio.run(main())
    assert seen == ["t-0-1", "t-0-2"]


def test_a_failed_group_is_in_the_journal_until_it_is_begun_again(tmp_path, capsys):
    with pytest.raises(GroupFailed) as caught:
        asyncio.run(collect(tmp_path, acts, group_size=2, chaos=DiesFor(3), attempts=1, max_concurrent=1))
    failed = reopened(tmp_path)["t-0-0"].group_failed
    assert failed.group == "t-0" and failed.first == caught.value.first and "recovery.attempts = 1" in failed.reason
    assert reopened(tmp_path)["t-0-1"].group_failed is None
    verdict = verify_run(tmp_path)
    assert verdict.consistent and verdict.failed_groups == ["t-0"]
    records = list(scan(tmp_path / "journal", rollout="t-0-0"))
    assert [entry.kind for entry in transcript(records, "t-0-0")][-2:] == ["failed", "group failed"]
    _print_rollouts(reopened(tmp_path))
    assert "group t-0 is short of t-0-0: rollout t-0-0 failed 1 times" in capsys.readouterr().out
    # the cause is repaired, and the run goes on: what is missing is done, and the group is whole
    done, _ = asyncio.run(collect(tmp_path, acts, group_size=2, attempts=1))
    assert [each.rollout_id for each in done] == ["t-0-0", "t-0-1"]
    verdict = verify_run(tmp_path)
    assert verdict.consistent and verdict.failed_groups == [] and verdict.finished == 2


def test_a_group_whose_replacements_are_used_up_is_in_the_journal_too(tmp_path):
    for attempt in range(2):  # a resumed run tries once more, and says it once more
        with pytest.raises(GroupFailed, match=r"recovery\.replacements = 1"):
            asyncio.run(
                collect(
                    tmp_path, acts, group_size=1, chaos=AlwaysDies(), attempts=1, group="replace", replacements=1,
                    quarantine=50, breaker=1000,
                )
            )  # fmt: skip
        histories = reopened(tmp_path)
        assert histories["t-0-0"].group_failed is None and histories["t-0-0~1"].group_failed.attempt == attempt
        verdict = verify_run(tmp_path)
        assert verdict.consistent and verdict.failed_groups == ["t-0"]


# -- quarantine --------------------------------------------------------------------------------------------------------
def test_what_keeps_failing_is_not_tried_by_every_rollout_in_turn(tmp_path):
    with pytest.raises(GroupFailed):
        asyncio.run(
            collect(
                tmp_path, acts, tasks=("a",), group_size=6, chaos=AlwaysDies(), attempts=1, quarantine=2,
                max_concurrent=1, breaker=1000,
            )
        )  # fmt: skip
    failures = [history.failures[-1] for history in reopened(tmp_path).values()]
    assert [error for _, error, _ in failures] == ["BudgetSpent"] * 2 + ["Quarantined"] * 4
    assert all("the task of group t-0 is set aside" in reason for _, _, reason in failures[2:])


def test_one_success_ends_a_suspicion():
    quarantine = Quarantine(2)
    quarantine.failed("first", "image base", "task 1")
    quarantine.succeeded("image base")
    quarantine.failed("second", "image base", "task 1")
    quarantine.check("image base", "task 2")
    with pytest.raises(Quarantined, match=r"task 1 is set aside: 2 rollouts .* \(first failure: first\)"):
        quarantine.check("image base", "task 1")


class OneBadImage(ModelSandboxes):
    """New environments of the image `bad` die at once."""

    async def create(self, name, *, image=None):
        if image == "bad":
            raise SandboxLost("this image does not run")
        return await super().create(name, image=image)


def test_an_image_is_set_aside_and_the_other_images_of_the_run_go_on(tmp_path):
    tasks = ["bad", "good", "bad", "fine", "bad", "good"]
    with pytest.raises(GroupFailed):
        asyncio.run(
            collect(
                tmp_path, acts, tasks, attempts=1, quarantine=2, max_concurrent=1, breaker=1000, kind=OneBadImage,
                image=lambda task: None if task == "fine" else task,
            )
        )  # fmt: skip
    histories = reopened(tmp_path)
    assert [histories[f"t-{number}-0"].finished for number in range(6)] == [task != "bad" for task in tasks]
    assert [histories[f"t-{number}-0"].failed.error for number in (0, 2, 4)] == [
        "BudgetSpent",
        "BudgetSpent",
        "Quarantined",
    ]
    assert "image bad is set aside: 2 rollouts" in histories["t-4-0"].failed.reason
    assert [histories[f"t-{number}-0"].image for number in (0, 1, 3)] == ["bad", "good", None]
    assert verify_run(tmp_path).consistent
    # the image is repaired: who resumes has looked at it, and everything gets a new chance
    done, _ = asyncio.run(collect(tmp_path, acts, tasks, attempts=1, image=lambda t: None if t == "fine" else t))
    assert len(done) == 6


def test_the_image_of_a_rollout_is_not_exchanged(tmp_path):
    asyncio.run(collect(tmp_path, acts, image="one"))
    with pytest.raises(ConfigError, match="t-0-0 was started with another image"):
        asyncio.run(collect(tmp_path, acts, image="two"))


# -- no progress -------------------------------------------------------------------------------------------------------
def test_the_watchdog_counts_by_its_own_clock():
    now = [0.0]
    watchdog = ProgressWatchdog(10.0, clock=lambda: now[0])
    for mark, at, working, patience in [
        (1, 0.0, True, 0.0),
        (1, 10.0, True, 0.0),  # just not yet
        (2, 11.0, True, 0.0),  # progress
        (2, 20.9, True, 0.0),
        (2, 400.0, False, 0.0),  # nothing is to be expected
        (2, 409.0, True, 0.0),
        (2, 500.0, True, 95.0),  # a command may still take so long by its own limit
    ]:
        now[0] = at
        watchdog.check(mark, working, patience, list)
    with pytest.raises(NoProgress, match=r"for 100 s although 30 rollouts .*\n  r-0(.|\n)*and 18 more"):
        watchdog.check(2, True, 0.0, lambda: [f"r-{number}" for number in range(30)])


def test_a_run_in_which_nothing_happens_ends_with_where_each_rollout_stands(tmp_path):
    async def waits(rollout):
        await rollout.observe([1])
        await rollout.sandbox.exec("a")
        await asyncio.Event().wait()

    with pytest.raises(NoProgress) as caught:
        asyncio.run(asyncio.wait_for(collect(tmp_path, waits, tasks=("x", "y"), no_progress_s=0.3), 10))
    text = str(caught.value)
    assert "t-0-0, attempt 0: in its own function" in text and "t-1-0" in text
    assert "after 2 calls and 0 turns; its environment is ready" in text
    # nothing was spent: the run can be resumed
    done, _ = asyncio.run(collect(tmp_path, acts, tasks=("x", "y")))
    assert [each.attempt for each in done] == [0, 0]


def test_a_function_that_cannot_be_cancelled_holds_nobody_up(tmp_path, monkeypatch):
    monkeypatch.setattr("belayer._ending.END_S", 0.2)

    async def stubborn(rollout):
        await rollout.observe([1])
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    with pytest.raises(NoProgress):
        asyncio.run(asyncio.wait_for(collect(tmp_path, stubborn, no_progress_s=0.2), 5))


def test_a_slow_run_is_no_stopped_run(tmp_path):
    async def slow(rollout):
        for number in range(6):
            await rollout.observe([number])
            await asyncio.sleep(0.1)
        return 1.0

    done, _ = asyncio.run(collect(tmp_path, slow, no_progress_s=0.4))
    assert len(done) == 1


# -- replay ------------------------------------------------------------------------------------------------------------
def divergence_of(folder, first, second) -> ReplayDivergence:
    """What a run says whose function was `first` until the driver died in its last call, and is `second` now."""
    with pytest.raises(NoProgress):
        asyncio.run(collect(folder, first, no_progress_s=0.1))
    with pytest.raises(ReplayDivergence) as caught:
        asyncio.run(collect(folder, second))
    return caught.value


def function(last, *, end=False):
    async def solve(rollout):
        await rollout.observe([1, 2, 3])
        await rollout.generate(max_tokens=3, temperature=1.0)
        await last(rollout)
        if end:
            return 1.0
        await asyncio.Event().wait()

    return solve


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (
            lambda r: r.sandbox.exec("cd /w\nls"),
            lambda r: r.sandbox.exec("cd /w\nls -l"),
            ["- command: ls", "+ command: ls -l"],
        ),
        (
            lambda r: r.generate(max_tokens=3),
            lambda r: r.generate(max_tokens=4),
            ["- max_tokens: 3", "+ max_tokens: 4"],
        ),
        (
            lambda r: r.observe([5, 6, 7, 8]),
            lambda r: r.observe([5, 6, 9]),
            ["4 tokens, now 3; from token 2 on: [7, 8] in the journal, [9] now"],
        ),
        (lambda r: r.observe([5]), lambda r: r.sandbox.exec("ls"), ["  - 2  observe", "  + 2  exec: ls"]),
    ],
    ids=["command", "sampling", "tokens", "kind"],
)
def test_a_function_that_differs_from_its_journal_is_told_what_differs(tmp_path, before, now, said):
    error = divergence_of(tmp_path, function(before), function(now))
    text = str(error)
    assert "call 2 of its function is another one" in text
    assert "    0  observe" in text and "    1  generate" in text  # what came before
    for part in said:
        assert part in text, text
    assert "rollout.random" in text and error.journalled != error.requested
    # nothing was lost: the function as it was goes on
    done, _ = asyncio.run(collect(tmp_path, function(before, end=True)))
    assert done[0].attempt == 0


def test_a_function_that_returns_too_early_is_a_divergence_too(tmp_path):
    async def returns(rollout):
        await rollout.observe([1, 2, 3])
        return 1.0

    error = divergence_of(tmp_path, function(lambda r: r.sandbox.exec("ls")), returns)
    assert "  + 1  the function returned" in str(error) and "and 1 more calls in the journal" in str(error)
    assert reopened(tmp_path)["t-0-0"].reward is None


class Plain:
    """An engine whose turns may span versions; it says one token and then nothing more, if so told."""

    def __init__(self, version: int, *, stops: bool = False) -> None:
        self.policy_version, self.stops = version, stops

    async def generate(self, request, on_tokens):
        for position in range(len(request.resume_ids), request.sampling.max_tokens):
            if self.stops and position:
                await asyncio.Event().wait()
            last = position + 1 == request.sampling.max_tokens
            on_tokens(
                TokenChunk(
                    request_id=request.id,
                    start=position,
                    token_ids=[position],
                    logprobs=[-0.5],
                    weights_version=self.policy_version,
                    finish_reason="length" if last else None,
                )
            )
        return "length"

    async def end_trajectory(self, name):
        pass

    async def close(self):
        pass


@pytest.mark.parametrize(("later", "versions"), [(0, [0, 0, 0]), (3, [3, 3, 3]), (4, [3, 4, 4])])
def test_no_turn_goes_on_with_older_weights_than_began_it(tmp_path, later, versions):
    async def one_turn(rollout):
        await rollout.observe([1])
        await rollout.generate(max_tokens=3)
        return 1.0

    async def session(engine):
        journal = Journal(tmp_path / "journal")
        config = Config(recovery=RecoveryConfig(no_progress_s=0.2))
        run = Run(SimpleNamespace(path=tmp_path), config, journal, SimpleNamespace(close=lambda: None))
        run.sandboxes, run.engine, run.sink = ModelSandboxes(World(), Chaos([])), engine, events.ignore
        try:
            return await run.collect(one_turn, ["x"], name="t")
        finally:
            journal.close()

    with pytest.raises(NoProgress):
        asyncio.run(session(Plain(3, stops=True)))
    (done,) = asyncio.run(session(Plain(later)))
    assert done.token_ids == [1, 0, 1, 2] and done.weights_versions[1:] == versions
    assert verify_run(tmp_path).consistent
