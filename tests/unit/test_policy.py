"""The checkpoint policies: what they promise, and the expected exposed time against simulation."""

from __future__ import annotations

import math
import random
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer.checkpoint import Situation, make_policy
from belayer.checkpoint.live_policy import LivePolicy
from belayer.checkpoint.policy import Adaptive
from belayer.checkpoint.predictors import LogNormal, expected_exposed
from belayer.config import PolicyConfig

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", ["adaptive", "always", "never", "every-n", "young-daly", "paper"])
def test_nothing_changed_means_no_checkpoint(name):
    decision = make_policy(PolicyConfig(name=name)).decide(Situation(actions_since=0, redo_s=100.0))
    assert not decision.take and decision.why


def test_every_n_takes_every_nth():
    policy = make_policy(PolicyConfig(name="every-n", every=3))
    taken = [policy.decide(Situation(actions_since=n, redo_s=1.0)).take for n in range(1, 5)]
    assert taken == [False, False, True, True]


@given(cost=st.floats(0.01, 5), median=st.floats(0.05, 20), sigma=st.floats(0.2, 1.5))
def test_expected_exposed_time_matches_simulation(cost, median, sigma):
    bubble = LogNormal(median, sigma)
    rng = random.Random(1)
    draws = [math.exp(rng.gauss(math.log(median), sigma)) for _ in range(4000)]
    simulated = sum(max(0.0, cost - draw) for draw in draws) / len(draws)
    assert expected_exposed(cost, bubble) == pytest.approx(simulated, abs=0.05 * cost)


@given(
    cost=st.floats(0.01, 5),
    median=st.floats(0.05, 20),
    sigma=st.floats(0.2, 1.5),
    passed=st.floats(0.0, 1.0),
)
def test_expected_exposed_time_of_one_that_begins_later(cost, median, sigma, passed):
    """Against the sum over what is left of the bubble, slice by slice."""
    bubble = LogNormal(median, sigma)
    passed_s = bubble.quantile(3.0) * passed
    slices = 400
    step = cost / slices
    within = sum(  # E[(c - left)+] is the integral of P(left <= u) from 0 to c
        1.0 - bubble.lasts(passed_s + (n + 0.5) * step) / bubble.lasts(passed_s) for n in range(slices)
    )
    assert expected_exposed(cost, bubble, passed_s) == pytest.approx(within * step, abs=0.01 * cost)
    assert bubble.fits(cost, passed_s) == pytest.approx(bubble.lasts(passed_s + cost) / bubble.lasts(passed_s))


def test_a_living_run_begins_with_the_failure_rate_that_is_configured(tmp_path):
    rates = []
    for mtbf_s in (60.0, 6000.0):
        policy = LivePolicy(PolicyConfig(mtbf_s=mtbf_s), tmp_path / "policy.json")
        why = policy.decide(Situation(actions_since=1, redo_s=1.0)).why
        rates += [float(each) for each in re.findall(r"failures ([\d.]+)/h", why)]
    assert rates == [60.0, 0.6]


def test_who_would_queue_while_its_agent_waits_pays_for_the_queue():
    policy = Adaptive(prior_s=20.0)
    calm = Situation(actions_since=5, redo_s=4.0, bubble_over=True)
    assert policy.decide(calm).take
    assert not policy.decide(msgspec.structs.replace(calm, queue=15.0)).take


def test_the_estimate_follows_what_it_sees():
    rng = random.Random(2)
    bubble = LogNormal(1.0, 1.0)
    for _ in range(400):
        bubble.add(math.exp(rng.gauss(math.log(6.0), 0.8)))
    assert bubble.quantile(0.0) == pytest.approx(6.0, rel=0.35)
    assert bubble.s == pytest.approx(0.8, rel=0.35)


def test_adaptive_prefers_long_bubbles_expensive_work_and_frequent_failures():
    def trained(bubble_s: float, failures: int) -> Adaptive:
        policy = Adaptive()
        for _ in range(50):
            policy.bubble(bubble_s)
            policy.cost(0.1)
        for _ in range(failures):
            policy.failure()
        return policy

    dear, cheap = Situation(actions_since=3, redo_s=120.0), Situation(actions_since=1, redo_s=0.01)
    assert trained(10.0, 1).decide(dear).take
    assert not trained(0.01, 0).decide(cheap).take
    assert trained(0.01, 200).decide(dear).take
    assert "exposed" in trained(0.01, 0).decide(cheap).why
