"""When to checkpoint: decided at every turn boundary, as the next LLM request leaves and the environment falls idle.

A checkpoint costs what the rollout has to wait for it, because the bubble (the time the model needs) was too short, and
what it takes from the other sandboxes of the host. It saves work that a failure would make us redo. Every policy has a
name, so that the choice can be measured (`belayer bench policy`); `adaptive` explains its own.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

import msgspec

from belayer.checkpoint.predictors import Contention, Cost, DiskSpeed, FailureRate, LogNormal, Mean
from belayer.config import PolicyConfig


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """What is known at a turn boundary. Times in seconds."""

    actions_since: int  # completed actions that the newest checkpoint does not hold
    redo_s: float  # time to get here again without a new checkpoint: restore or create, then replay
    restore_s: float = 0.0  # time to get here again with one
    since_s: float = 0.0  # since the newest checkpoint, or since the rollout began
    nbytes: float = 0.0  # what a checkpoint would write; 0: not known
    running: int = 0  # other checkpoints that are being taken right now
    others: float = 0.0  # how many others use the disk, on average
    remaining_s: float = math.inf  # until the rollout is expected to end
    passed_s: float = 0.0  # of the bubble
    bubble_over: bool = False  # the reply is here: all that a checkpoint takes now, the agent waits for
    wait_s: float = 0.0  # … and for so long until it can begin
    queue: float = 0.0  # … and for so many whole checkpoints before it


class Decision(msgspec.Struct, frozen=True):
    take: bool
    why: str


class Policy(Protocol):
    """Decides, and is told afterwards how long things really took."""

    @property
    def name(self) -> str: ...

    @property
    def contention(self) -> Contention:
        """Learns what dumps cost others; it is told by whoever dumps."""
        ...

    def decide(self, situation: Situation) -> Decision: ...

    def begin_by(self, nbytes: float) -> float:
        """How many seconds of a bubble may pass before a checkpoint must begin, to fit in with some certainty."""
        ...

    def bubble(self, seconds: float) -> None: ...

    def action(self, seconds: float) -> None: ...

    def cost(self, seconds: float, nbytes: float = 0.0) -> None: ...

    def written(self, seconds: float, nbytes: float) -> None:
        """Writing a checkpoint to the disk took so long, whether or not anybody waited for it."""
        ...

    def failure(self) -> None: ...


class _Deaf:
    """For policies that do not learn."""

    def __init__(self) -> None:
        self.contention = Contention()

    def begin_by(self, nbytes: float) -> float:
        return 0.0

    def bubble(self, seconds: float) -> None:
        pass

    def action(self, seconds: float) -> None:
        pass

    def cost(self, seconds: float, nbytes: float = 0.0) -> None:
        pass

    def written(self, seconds: float, nbytes: float) -> None:
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
            return _NOTHING_NEW
        return Decision(True, "policy always")


class EveryN(_Deaf):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.name = f"every-{n}"
        self._n = n

    def decide(self, situation: Situation) -> Decision:
        # who would have to queue while its agent waits has a bubble of its own again after the next action
        crowded = situation.bubble_over and (situation.queue > 0 or situation.wait_s > 0)
        n = 2 * self._n if crowded else self._n
        due = situation.actions_since >= n
        return Decision(due, f"{situation.actions_since} of {n} actions since the newest checkpoint")


class Learned:
    """What is known of bubbles, actions, costs, the disk, failures and contention. Policies can share it."""

    def __init__(self, prior_s: float = 3600.0) -> None:
        self.bubble = LogNormal(1.0, 1.0)
        self.action = Mean(0.3)
        self.cost = Cost(0.08)
        self.disk = DiskSpeed()
        self.failures = FailureRate(prior_s)
        self.contention = Contention()


class _Learning:
    """What the policies that learn all know: bubbles, actions, costs and failures."""

    def __init__(self, *, prior_s: float = 3600.0, learned: Learned | None = None) -> None:
        """`learned`: what another policy knows already, and goes on learning."""
        self._learned = mine = learned or Learned(prior_s)
        self._bubble, self._action, self._cost = mine.bubble, mine.action, mine.cost
        self._disk, self._failures, self.contention = mine.disk, mine.failures, mine.contention

    def begin_by(self, nbytes: float) -> float:
        return max(0.0, self._bubble.quantile(-0.674) - 1.5 * self._cost.seconds(nbytes))

    def bubble(self, seconds: float) -> None:
        self._bubble.add(seconds)
        self._failures.survived(seconds)

    def action(self, seconds: float) -> None:
        self._action.add(seconds)
        self._failures.survived(seconds)

    def cost(self, seconds: float, nbytes: float = 0.0) -> None:
        self._cost.add(seconds, nbytes)

    def written(self, seconds: float, nbytes: float) -> None:
        self._disk.add(seconds, nbytes)

    def failure(self) -> None:
        self._failures.failed()

    @property
    def _turn_s(self) -> float:
        return self._bubble.mean + self._action.value


class YoungDaly(_Learning):
    """One checkpoint every √(2c/λ) seconds (Young 1974, Daly 2006), blind to bubbles and to other sandboxes."""

    name = "young-daly"

    def decide(self, situation: Situation) -> Decision:
        if situation.actions_since == 0:
            return _NOTHING_NEW
        interval = math.sqrt(2 * self._cost.seconds(situation.nbytes) / self._failures.per_s)
        take = situation.since_s >= interval
        return Decision(
            take, f"{situation.since_s:.1f} s since the newest checkpoint, the interval is {interval:.1f} s"
        )


class Paper(_Learning):
    """The published rule: p·C ≥ (1 − q)·c, with p the probability that the environment fails before the next chance, C
    what redoing would cost, c what the checkpoint takes and q the probability that it fits into the bubble."""

    name = "paper"

    def decide(self, situation: Situation) -> Decision:
        if situation.actions_since == 0:
            return _NOTHING_NEW
        cost = self._cost.seconds(situation.nbytes)
        p = -math.expm1(-self._failures.per_s * self._turn_s)
        q = 0.0 if situation.bubble_over else self._bubble.fits(cost, situation.passed_s)
        saved, price = p * situation.redo_s, (1 - q) * cost
        return Decision(saved >= price, f"p·C {saved * 1e3:.2f} ms, (1-q)·c {price * 1e3:.2f} ms")


class Adaptive(_Learning):
    """Takes a checkpoint when what it is expected to cost everybody is below what it is expected to save.

    Cost O: the expected exposed time E[(c − B)+], and the delay of others: they share the disk with it, each for as
    long as it writes. Saving V: with failures at rate λ and work that must be redone growing by ρ seconds a second, a
    renewal argument gives V = (g/ρ)·R − λR²/2ρ up to R* = g/λ, and g²/2λρ from there on, where R is the work at
    risk and g the loss a second under the best spacing, √(2λρ·O). O is that of a cheap moment among the recent ones,
    since a dear moment can be let pass. Never more than λ·R for the time that remains of the rollout.

    `contention_s` is the price of one more dump while others run, until it is known what it really costs others.
    """

    name = "adaptive"

    def __init__(self, *, prior_s: float = 3600.0, contention_s: float = 0.05, learned: Learned | None = None) -> None:
        super().__init__(prior_s=prior_s, learned=learned)
        self.contention.prior_s = contention_s
        self._prices: deque[float] = deque(maxlen=100)

    def decide(self, situation: Situation) -> Decision:
        if situation.actions_since == 0:
            return _NOTHING_NEW
        cost = self._cost.seconds(situation.nbytes)
        if situation.bubble_over:
            exposed = situation.wait_s + (1.0 + situation.queue) * cost
        else:
            exposed = self._cost.exposed(situation.nbytes, self._bubble, situation.passed_s)
        delay = self._disk.seconds(situation.nbytes) * situation.others
        delay += self.contention.delay_s(cost, situation.running)
        price = exposed + delay
        if not (situation.bubble_over or situation.passed_s) or not self._prices:  # else it is one that nobody chose
            self._prices.append(price)
        rate = self._failures.per_s
        saved = self._saved(max(0.0, situation.redo_s - situation.restore_s), rate, situation.remaining_s)
        take = price <= saved
        why = (
            f"price {price * 1e3:.1f} ms {'<=' if take else '>'} saved {saved * 1e3:.1f} ms (exposed "
            f"{exposed * 1e3:.1f} ms, delay of others {delay * 1e3:.1f} ms, cost {cost * 1e3:.0f} ms, bubble "
            f"{self._bubble.quantile(0.0) * 1e3:.0f} ms, redo {situation.redo_s:.2f} s, failures {rate * 3600:.2f}/h)"
        )
        return Decision(take, why)

    def _saved(self, work_s: float, rate: float, remaining_s: float) -> float:
        """V(R): what having nothing at risk is worth, against having `work_s` at risk, in seconds."""
        growth = self._action.value / self._turn_s
        cheap = sorted(self._prices)[len(self._prices) // 4]
        best = math.sqrt(2 * rate * growth * cheap)
        # work at risk costs at least the loss until the next chance
        at_least = rate * work_s * self._turn_s
        ripe = best / rate
        value = best / growth * work_s - rate * work_s**2 / (2 * growth) if work_s < ripe else cheap
        return min(max(value, at_least), rate * work_s * remaining_s)


_NOTHING_NEW = Decision(False, "no action since the newest checkpoint")


def make_policy(config: PolicyConfig, learned: Learned | None = None) -> Policy:
    """The policy that `config.name` names; `learned`: what it knows already."""
    learned = learned or Learned(config.mtbf_s)
    match config.name:
        case "never":
            return Never()
        case "always":
            return Always()
        case "every-n":
            return EveryN(config.every)
        case "young-daly":
            return YoungDaly(learned=learned)
        case "paper":
            return Paper(learned=learned)
        case "adaptive":
            return Adaptive(learned=learned)
