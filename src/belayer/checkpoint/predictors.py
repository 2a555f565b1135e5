"""What a policy believes about times to come, learned from those that were seen."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable


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

    @property
    def mean(self) -> float:
        return math.exp(self.m + self.s**2 / 2)

    def quantile(self, z: float) -> float:
        """The time that is not exceeded with probability Φ(z)."""
        return math.exp(self.m + z * self.s)

    def lasts(self, seconds: float) -> float:
        """The probability that it lasts at least `seconds`."""
        return phi((self.m - math.log(max(seconds, 1e-9))) / self.s)

    def fits(self, seconds: float, passed_s: float = 0.0) -> float:
        """The probability that it lasts `seconds` more when `passed_s` of it have passed."""
        return self.lasts(passed_s + seconds) / max(self.lasts(passed_s), SURELY_OVER)


SURELY_OVER = 1e-4  # a bubble that has lasted longer than all but this share: nothing more is concluded from that


def expected_exposed(cost_s: float, bubble: LogNormal, passed_s: float = 0.0) -> float:
    """E[(c − B)+] in seconds for a checkpoint of `cost_s` that begins when `passed_s` of the bubble have passed.

    B, what is left, is log-normal without those that were over by then. With B ~ LogNormal(m, s) and
    d(c) = (ln c − m) / s, X(c) = c·Φ(d) − exp(m + s²/2)·Φ(d − s) is the answer at the bubble's beginning, and later it
    is (X(t + c) − X(t) − c·Φ(d(t))) / (1 − Φ(d(t))).
    """

    def from_its_beginning(seconds: float) -> float:
        d = (math.log(max(seconds, 1e-9)) - bubble.m) / bubble.s
        return max(0.0, seconds * phi(d) - bubble.mean * phi(d - bubble.s))

    if passed_s <= 0:
        return from_its_beginning(cost_s)
    passed_s = min(passed_s, bubble.quantile(3.7))  # beyond, differences of nearly equal numbers
    left = bubble.lasts(passed_s)
    exposed = from_its_beginning(passed_s + cost_s) - from_its_beginning(passed_s) - cost_s * (1.0 - left)
    return min(cost_s, max(0.0, exposed / left))


def phi(x: float) -> float:
    """The standard normal distribution function."""
    return 0.5 * (1.0 + math.erf(x / math.sqrt(2.0)))


class Mean:
    """Running mean that forgets with `half_life` observations; starts at `first`."""

    def __init__(self, first: float, *, half_life: float = 50.0) -> None:
        self.value = first
        self._decay = 0.5 ** (1.0 / half_life)
        self._weight = 1.0

    def add(self, value: float) -> None:
        self._weight = self._weight * self._decay + 1.0
        self.value += (value - self.value) / self._weight


class FailureRate:
    """Failures per second at risk: a Gamma prior of one failure in `prior_s` seconds, and what was counted.

    The prior is `worth` failures: MTBFs of 10³ to 10⁵ s are all likely, and where environments die every few seconds a
    run of minutes has to notice. A simulated sweep is the same within 0.4% for 1.0 and 0.1, and worse below.
    """

    def __init__(self, prior_s: float, *, worth: float = 0.1) -> None:
        self._failures = worth
        self._at_risk_s = worth * prior_s

    def survived(self, seconds: float) -> None:
        self._at_risk_s += seconds

    def failed(self) -> None:
        self._failures += 1.0

    @property
    def per_s(self) -> float:
        return self._failures / self._at_risk_s


class Cost:
    """How long a checkpoint takes: so much for itself, and so much for each byte. Learned by least squares.

    The newest `size` observations count, and a little also two that were never made: one of no bytes that took
    `first_s`, and one of a gigabyte that took `GIGABYTE_S` more. They say what to expect of sizes that nobody has
    seen: a first checkpoint of a small sandbox says nothing about one ten times as large, and who believed that it did
    would take no other and never learn better.
    """

    GIGABYTE_S = 0.7  # images in memory on two cores: CRIU, and a checksum
    WEIGHT = 0.1  # of what was never seen

    def __init__(self, first_s: float, size: int = 200) -> None:
        self._before = [(self.WEIGHT, 0.0, first_s), (self.WEIGHT, 1e9, first_s + self.GIGABYTE_S)]
        self._seen: deque[tuple[float, float]] = deque(maxlen=size)
        self._ratio = LogNormal(1.0, 0.5)  # of what it took to what was expected

    def add(self, seconds: float, nbytes: float) -> None:
        self._ratio.add(seconds / self.seconds(nbytes))
        self._seen.append((nbytes, seconds))

    def quantile(self, nbytes: float, z: float) -> float:
        """The time that is not exceeded with probability Φ(z), by how far off the expected ones were."""
        return self.seconds(nbytes) * self._ratio.quantile(z)

    def exposed(self, nbytes: float, bubble: LogNormal, passed_s: float = 0.0) -> float:
        """`expected_exposed` over what it may take, which is dearer than that of what it takes on average: a checkpoint
        that takes longer than usual is the one that does not fit."""
        draws = ((1 / 6, -math.sqrt(3)), (2 / 3, 0.0), (1 / 6, math.sqrt(3)))  # Gauss-Hermite, three points
        return sum(w * expected_exposed(self.quantile(nbytes, z), bubble, passed_s) for w, z in draws)

    def seconds(self, nbytes: float) -> float:
        """Expected, for so many bytes."""
        points = [*self._before, *((1.0, x, y) for x, y in self._seen)]
        weight = sum(w for w, _, _ in points)
        mean_x = sum(w * x for w, x, _ in points) / weight
        mean_y = sum(w * y for w, _, y in points) / weight
        spread = sum(w * (x - mean_x) ** 2 for w, x, _ in points)
        slope = max(0.0, sum(w * (x - mean_x) * (y - mean_y) for w, x, y in points) / spread)
        return max(1e-4, mean_y + slope * (nbytes - mean_x))


class DiskSpeed:
    """Seconds of the disk that a byte takes when nobody else uses it: the quickest that was seen lately.

    Until one was seen it is `first` bytes a second, rather too little than too much: many may decide before the first
    one has been written.
    """

    def __init__(self, first: float = 200e6) -> None:
        self._first = 1.0 / first
        self._s_per_byte = math.inf

    def add(self, seconds: float, nbytes: float) -> None:
        if nbytes > 0:
            self._s_per_byte = min(self._s_per_byte * 1.001, seconds / nbytes)

    def seconds(self, nbytes: float) -> float:
        """For so many bytes."""
        return nbytes * (self._first if math.isinf(self._s_per_byte) else self._s_per_byte)


class Contention:
    """How much slower everybody else gets while a checkpoint is dumped: learned from the model's turns of this run.

    Of each turn it is told how many seconds and tokens it had, and knows how many dumps ran meanwhile on average. The
    logarithm of the time per token is regressed on that number, with a pull to zero that `RIDGE` weighs and a memory
    of some hundreds of turns. Until the dumps seen tell anything, another one costs `prior_s` for each that runs.
    """

    RIDGE = 1.0

    def __init__(
        self, prior_s: float = 0.05, *, half_life: float = 200.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.prior_s = prior_s
        self._decay = 0.5 ** (1.0 / half_life)
        self._clock = clock
        self._running = 0
        self._seconds = 0.0  # of all dumps, each counted for itself
        self._at = clock()
        self._turns: dict[str, tuple[float, float]] = {}
        self._w = self._x = self._y = self._xx = self._xy = 0.0

    def dump_begins(self) -> None:
        self._pass()
        self._running += 1

    def dump_ends(self) -> None:
        self._pass()
        self._running -= 1

    def turn_begins(self, who: str) -> None:
        self._pass()
        self._turns[who] = (self._at, self._seconds)

    def turn_ends(self, who: str, tokens: int = 0) -> None:
        """Of `tokens` tokens; 0: nothing can be learned from it."""
        begun = self._turns.pop(who, None)
        self._pass()
        if begun is None or tokens <= 0 or self._at <= begun[0]:
            return
        seconds = self._at - begun[0]
        x, y = (self._seconds - begun[1]) / seconds, math.log(seconds / tokens)
        for name, value in (("_w", 1.0), ("_x", x), ("_y", y), ("_xx", x * x), ("_xy", x * y)):
            setattr(self, name, getattr(self, name) * self._decay + value)

    @property
    def slowdown(self) -> float:
        """By which share everybody is slower while one dump runs; 0 until something was seen."""
        return max(0.0, math.expm1(min(self._slope(), 3.0)))

    @property
    def certainty(self) -> float:
        """From 0 (nothing was seen) to 1."""
        spread = self._spread()
        return spread / (spread + self.RIDGE)

    def delay_s(self, cost_s: float, running: int) -> float:
        """What others lose by a dump of `cost_s` seconds, while `running` dumps are under way, in seconds of all."""
        others = max(0, len(self._turns) - 1)
        known = self.certainty
        return known * self.slowdown * cost_s * others + (1.0 - known) * self.prior_s * running

    def _spread(self) -> float:
        return max(0.0, self._xx - self._x**2 / self._w) if self._w else 0.0

    def _slope(self) -> float:
        if not self._w:
            return 0.0
        return (self._xy - self._x * self._y / self._w) / (self._spread() + self.RIDGE)

    def _pass(self) -> None:
        now = self._clock()
        self._seconds += self._running * (now - self._at)
        self._at = now
