"""When to checkpoint: decided at every turn boundary, as the next LLM request leaves and the environment falls idle.

A checkpoint costs only what the rollout has to wait for it. If the bubble (the time the model needs) is B ~ LogNormal
and a checkpoint takes c, the expected exposed time is

    E[(c - B)+] = c·Φ(d) - exp(m + s²/2)·Φ(d - s),      d = (ln c - m) / s

and it pays when that is below what it saves: the failure rate λ over the time at risk, times the work R that a failure
would make us redo. Baseline policies are kept by name, so that the choice can be measured.
"""

from __future__ import annotations

import math
from typing import Protocol

import msgspec

from belayer.config import PolicyConfig


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """What is known at a turn boundary. Times in seconds."""

    actions_since: int  # completed actions that the newest checkpoint does not hold
    redo_s: float  # time to get here again without a new checkpoint: restore or create, then replay
    running: int = 0  # checkpoints being taken on this host right now


class Decision(msgspec.Struct, frozen=True):
    take: bool
    why: str


class Policy(Protocol):
    """Decides; `bubble` and `cost` tell it afterwards how long both really took."""

    name: str

    def decide(self, situation: Situation) -> Decision: ...

    def bubble(self, seconds: float) -> None: ...

    def cost(self, seconds: float) -> None: ...

    def failure(self) -> None: ...


class _Deaf:
    """For policies that do not learn."""

    def bubble(self, seconds: float) -> None:
        pass

    def cost(self, seconds: float) -> None:
        pass

    def failure(self) -> None:
        pass


class Never(_Deaf):
    name = "never"

    def decide(self, situation: Situation) -> Decision:
        return Decision(False, "policy never")


class Always(_Deaf):
    name = "always"

    def decide(self, situation: Situation) -> Decision:
        if situation.actions_since == 0:
            return Decision(False, "no action since the newest checkpoint")
        return Decision(True, "policy always")


class EveryN(_Deaf):
    def __init__(self, n: int) -> None:
        self.name = f"every-{n}"
        self._n = n

    def decide(self, situation: Situation) -> Decision:
        due = situation.actions_since >= self._n
        return Decision(due, f"{situation.actions_since} of {self._n} actions since the newest checkpoint")


class LogNormal:
    """Running estimate of a log-normal time, with a weak prior of `median` seconds and spread `sigma`."""

    def __init__(self, median: float, sigma: float, *, half_life: float = 50.0) -> None:
        self._m, self._v = math.log(median), sigma**2
        self._decay = 0.5 ** (1.0 / half_life)
        self._weight = 3.0

    def add(self, seconds: float) -> None:
        x = math.log(max(seconds, 1e-6))
        self._weight = self._weight * self._decay + 1.0
        step = (x - self._m) / self._weight
        self._v += ((x - self._m) ** 2 * (1 - 1 / self._weight) - self._v) / self._weight
        self._m += step

    @property
    def m(self) -> float:
        return self._m

    @property
    def s(self) -> float:
        return math.sqrt(max(self._v, 1e-4))

    def quantile(self, z: float) -> float:
        """The time that is not exceeded with probability Φ(z)."""
        return math.exp(self.m + z * self.s)


def expected_exposed(cost_s: float, bubble: LogNormal) -> float:
    """E[(c − B)+] in seconds for a checkpoint of `cost_s` under a log-normal bubble."""
    d = (math.log(max(cost_s, 1e-9)) - bubble.m) / bubble.s
    mean = math.exp(bubble.m + bubble.s**2 / 2)
    return max(0.0, cost_s * _phi(d) - mean * _phi(d - bubble.s))


def _phi(x: float) -> float:
    return 0.5 * (1.0 + math.erf(x / math.sqrt(2.0)))


class Adaptive:
    """Takes a checkpoint when its expected exposed time is below the expected work it saves.

    The failure rate is a Gamma–Poisson estimate: a prior of one failure in `prior_s` seconds at risk, plus what was
    seen. `contention_s` is the price of one more dump while others run, in seconds per running dump.
    """

    name = "adaptive"

    def __init__(self, *, prior_s: float = 3600.0, contention_s: float = 0.05) -> None:
        self._bubble = LogNormal(1.0, 1.0)
        self._cost = LogNormal(0.08, 0.5)
        self._failures = 1.0
        self._at_risk_s = prior_s
        self._contention_s = contention_s

    def decide(self, situation: Situation) -> Decision:
        if situation.actions_since == 0:
            return Decision(False, "no action since the newest checkpoint")
        cost = self._cost.quantile(0.5)
        exposed = expected_exposed(cost, self._bubble) + self._contention_s * situation.running
        rate = self._failures / self._at_risk_s
        # the work is at risk during this bubble and, without a checkpoint now, until the next chance: one more turn
        horizon = 2 * self._bubble.quantile(0.0) + situation.redo_s
        saved = rate * horizon * situation.redo_s
        take = exposed <= saved
        why = (
            f"exposed {exposed * 1e3:.1f} ms {'<=' if take else '>'} saved {saved * 1e3:.1f} ms "
            f"(cost {cost * 1e3:.0f} ms, bubble {self._bubble.quantile(0.0) * 1e3:.0f} ms, "
            f"redo {situation.redo_s:.2f} s, failures {rate * 3600:.2f}/h)"
        )
        return Decision(take, why)

    def bubble(self, seconds: float) -> None:
        self._bubble.add(seconds)
        self._at_risk_s += seconds

    def cost(self, seconds: float) -> None:
        self._cost.add(seconds)

    def failure(self) -> None:
        self._failures += 1.0


def make_policy(config: PolicyConfig) -> Policy:
    """The policy that `config.name` names."""
    match config.name:
        case "never":
            return Never()
        case "always":
            return Always()
        case "every-n":
            return EveryN(config.every)
        case "adaptive":
            return Adaptive()
