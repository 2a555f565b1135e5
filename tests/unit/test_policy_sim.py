"""The policy simulator: its clock and disk against arithmetic, its worlds against what must be true of any policy."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from benchmarks._policy_kernel import Clock, Disk, Event, Process, Write
from benchmarks._policy_sim import MB, Turn, World, simulate

from belayer.checkpoint.policy import Adaptive, Always, EveryN, Never, Paper, YoungDaly
from belayer.checkpoint.predictors import Cost, DiskSpeed, FailureRate, LogNormal, expected_exposed

pytestmark = pytest.mark.unit

SMALL = World(sandboxes=6, rounds=(5, 12))


def finish_times(rate: float, starts: list[tuple[float, float]]) -> list[float]:
    """When users of a shared disk are done, each a (start, bytes), by the kernel."""
    clock = Clock()
    disk = Disk(clock, rate)
    ends: dict[int, float] = {}

    def body(number: int, start: float, nbytes: float):
        yield start
        yield Write(nbytes)
        ends[number] = clock.now

    for number, (start, nbytes) in enumerate(starts):
        Process(clock, disk, body(number, start, nbytes))
    clock.run(lambda: len(ends) == len(starts))
    assert disk.active == 0
    return [ends[number] for number in range(len(starts))]


def test_users_of_the_disk_share_it_equally() -> None:
    assert finish_times(10.0, [(0.0, 50.0)]) == pytest.approx([5.0])
    assert finish_times(10.0, [(0.0, 50.0), (0.0, 50.0)]) == pytest.approx([10.0, 10.0])
    # alone for 2 s, then half of it each: 30 left of the first takes 6 s, 20 left of the second then 2 s alone
    assert finish_times(10.0, [(0.0, 50.0), (2.0, 50.0)]) == pytest.approx([8.0, 10.0])


def test_the_disk_against_small_steps() -> None:
    rng = random.Random(4)
    starts = [(rng.uniform(0, 5), rng.uniform(1, 30)) for _ in range(12)]
    left = [nbytes for _, nbytes in starts]
    ends = [0.0] * len(starts)
    now, step = 0.0, 1e-3
    while any(value > 0 for value in left):
        active = [i for i, (start, _) in enumerate(starts) if start <= now and left[i] > 0]
        for i in active:
            left[i] -= 10.0 * step / len(active)
            if left[i] <= 0:
                ends[i] = now + step
        now += step
    assert finish_times(10.0, starts) == pytest.approx(ends, abs=0.05)


def test_a_process_that_is_stopped_gives_the_disk_back() -> None:
    clock = Clock()
    disk = Disk(clock, 10.0)
    seen: list[float] = []

    def body(nbytes: float):
        yield Write(nbytes)
        seen.append(clock.now)

    Process(clock, disk, body(100.0))
    victim = Process(clock, disk, body(100.0))
    clock.at(4.0, victim.stop)
    clock.run(lambda: bool(seen))
    assert victim.done.value == "stopped" and seen == pytest.approx([12.0])  # 4 s at half, 80 bytes at 10 a second


def test_an_event_wakes_who_waits_and_who_comes_late() -> None:
    clock = Clock()
    disk = Disk(clock, 1.0)
    event, got = Event(), []

    def body(delay: float):
        yield delay
        got.append((yield event))

    Process(clock, disk, body(0.0))
    Process(clock, disk, body(5.0))
    clock.at(2.0, lambda: event.set("news"))
    clock.run(lambda: len(got) == 2)
    assert got == ["news", "news"] and clock.now == 5.0


@pytest.mark.parametrize("make", [Never, Always, lambda: EveryN(2), YoungDaly, Paper, Adaptive])
def test_equal_seeds_are_equal_runs(make) -> None:
    first, second = simulate(SMALL, make(), 7), simulate(SMALL, make(), 7)
    assert first == second and len(first.wall_s) == SMALL.sandboxes
    assert simulate(SMALL, make(), 8).wall_s != first.wall_s


def test_without_failures_and_contention_nothing_is_faster_than_never() -> None:
    calm = World(sandboxes=1, bytes_per_s=1e15, mtbf_s=1e15, rounds=(10, 10), freeze_s=0.0)
    turns = [Turn(2.0, 1.0, 0.0, 100 * MB)] * 10
    never = simulate(calm, Never(), 1, lambda _: turns)
    always = simulate(calm, Always(), 1, lambda _: turns)
    assert never.wall_s == pytest.approx([30.0]) and always.wall_s == pytest.approx([30.0])
    assert (never.checkpoints, always.checkpoints) == (0, 9) and always.hidden == 1.0
    slow = World(sandboxes=1, bytes_per_s=10 * MB, mtbf_s=1e15, rounds=(10, 10), freeze_s=0.0)
    waiting = simulate(slow, Always(), 1, lambda _: turns)
    # each of the 9 checkpoints takes 10 s, of which the bubble hides 2
    assert waiting.wall_s == pytest.approx([30.0 + 9 * 8.0]) and waiting.exposed_s == pytest.approx(72.0)


def test_a_failure_costs_the_work_since_the_checkpoint() -> None:
    world = World(sandboxes=40, bytes_per_s=1e15, mtbf_s=300.0, rounds=(30, 30), freeze_s=0.0, restore_s=0.0)
    turns = [Turn(1.0, 2.0, 0.0, MB)] * 30
    never = simulate(world, Never(), 1, lambda _: turns)
    always = simulate(world, Always(), 1, lambda _: turns)
    assert never.failures > 5 and never.checkpoints == 0
    assert always.mean_wall_s < never.mean_wall_s
    assert always.mean_wall_s >= 90.0 - 1e-6


def test_always_collapses_on_a_slow_disk_although_little_is_exposed() -> None:
    world = World(sandboxes=48, bytes_per_s=60 * MB, mtbf_s=1e5, rounds=(15, 15), waits_for_disk=False)
    never, always, adaptive = (simulate(world, make(), 3) for make in (Never, Always, Adaptive))
    assert always.mean_wall_s > 2 * never.mean_wall_s
    assert always.exposed_s < 0.02 * sum(always.wall_s)
    assert adaptive.mean_wall_s < 1.02 * never.mean_wall_s


def test_a_cost_that_grows_with_the_bytes_is_learned() -> None:
    cost = Cost(0.5)
    assert cost.seconds(0.0) == pytest.approx(0.5) and 0.5 < cost.seconds(1e9) < 2.0
    rng = random.Random(1)
    for _ in range(300):
        nbytes = rng.uniform(1e6, 1e9)
        cost.add(0.05 + nbytes / 5e8 + rng.gauss(0, 0.01), nbytes)
    assert cost.seconds(5e8) == pytest.approx(1.05, rel=0.05) and cost.seconds(0.0) == pytest.approx(0.05, abs=0.02)
    plain = Cost(0.5)
    for _ in range(10):
        plain.add(0.2, 0.0)
    assert plain.seconds(0.0) == pytest.approx(0.2, rel=0.05)


def test_the_first_checkpoint_of_a_small_sandbox_says_little_of_large_ones() -> None:
    """It took 0.4 s for 5 MB because the machine was busy: 60 MB do not take 5 s, and soon their cost is known."""
    cost = Cost(0.08)
    cost.add(0.42, 5e6)
    assert 0.1 < cost.seconds(60e6) < 0.6
    for _ in range(8):
        cost.add(0.12, 60e6)
    assert cost.seconds(60e6) == pytest.approx(0.12, rel=0.5)


def test_the_longer_checkpoints_are_those_that_do_not_fit() -> None:
    bubble, rng, cost = LogNormal(1.0, 1.0), random.Random(3), Cost(0.1)
    took = [0.1 * math.exp(rng.gauss(0.0, 0.6)) for _ in range(2000)]
    for each in took:
        cost.add(each, 0.0)
    truly = statistics.fmean(expected_exposed(each, bubble) for each in took)
    assert 0.5 * truly < cost.exposed(0.0, bubble) < 2.5 * truly  # of the newest ones, which differ from the rest
    assert expected_exposed(cost.seconds(0.0), bubble) < 0.6 * truly


def test_the_disk_is_as_fast_as_it_was_when_it_was_free() -> None:
    disk = DiskSpeed(first=100e6)
    assert disk.seconds(1e9) == 10.0
    for seconds in (4.0, 2.0, 8.0):
        disk.add(seconds, 1e9)
    assert disk.seconds(1e9) == pytest.approx(2.0, rel=0.01)


def test_the_failure_rate_is_learned() -> None:
    rate = FailureRate(3600.0)
    rng = random.Random(5)
    for _ in range(200):
        rate.survived(rng.expovariate(1 / 50.0))
        rate.failed()
    assert rate.per_s == pytest.approx(1 / 50.0, rel=0.4)


def test_young_daly_spaces_by_cost_and_failure_rate() -> None:
    from belayer.checkpoint import Situation

    policy = YoungDaly()
    for _ in range(50):
        policy.cost(2.0)
    # √(2·2 s / (1/3600 s)) = 120 s
    assert not policy.decide(Situation(actions_since=3, redo_s=9.0, since_s=119.0)).take
    assert policy.decide(Situation(actions_since=3, redo_s=9.0, since_s=121.0)).take


def test_adaptive_lets_a_dear_moment_pass_and_takes_a_cheap_one() -> None:
    from belayer.checkpoint import Situation

    policy = Adaptive(prior_s=1000.0)
    rng = random.Random(2)
    for _ in range(100):
        policy.bubble(rng.lognormvariate(math.log(5), 0.3))
        policy.action(2.0)
        policy.cost(0.5, 200e6)
        policy.written(0.5, 200e6)
    work = {"actions_since": 5, "redo_s": 20.0, "nbytes": 200e6}
    taken = [policy.decide(Situation(others=others, **work)).take for others in [0.0, 50.0] * 20]
    assert statistics.mean(taken[0::2]) == 1.0 and statistics.mean(taken[1::2]) == 0.0
