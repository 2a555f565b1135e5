"""What a policy believes about times to come, learned from those that were seen."""

from __future__ import annotations

import math
from collections import deque


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

    def fits(self, seconds: float) -> float:
        """The probability that it lasts at least `seconds`."""
        return 1.0 - phi((math.log(max(seconds, 1e-9)) - self.m) / self.s)


def expected_exposed(cost_s: float, bubble: LogNormal) -> float:
    """E[(c − B)+] in seconds for a checkpoint of `cost_s` under a log-normal bubble.

    With B ~ LogNormal(m, s) and d = (ln c − m) / s it is c·Φ(d) − exp(m + s²/2)·Φ(d − s).
    """
    d = (math.log(max(cost_s, 1e-9)) - bubble.m) / bubble.s
    return max(0.0, cost_s * phi(d) - bubble.mean * phi(d - bubble.s))


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

    The newest `size` observations count. Without sizes (bytes 0) it is their mean.
    """

    def __init__(self, first_s: float, size: int = 200) -> None:
        self._first_s = first_s
        self._seen: deque[tuple[float, float]] = deque(maxlen=size)
        self._ratio = LogNormal(1.0, 0.5)  # of what it took to what was expected

    def add(self, seconds: float, nbytes: float) -> None:
        self._ratio.add(seconds / self.seconds(nbytes))
        self._seen.append((nbytes, seconds))

    def quantile(self, nbytes: float, z: float) -> float:
        """The time that is not exceeded with probability Φ(z), by how far off the expected ones were."""
        return self.seconds(nbytes) * self._ratio.quantile(z)

    def seconds(self, nbytes: float) -> float:
        if not self._seen:
            return self._first_s
        n = len(self._seen)
        mean_x = sum(x for x, _ in self._seen) / n
        mean_y = sum(y for _, y in self._seen) / n
        spread = sum((x - mean_x) ** 2 for x, _ in self._seen)
        if spread <= 0:
            return mean_y if mean_x <= 0 else mean_y * max(nbytes, 1.0) / mean_x
        slope = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in self._seen) / spread)
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
