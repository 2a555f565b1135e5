"""Are the predictors' quantiles what they say? Predicted before each observation, counted after it.

The predictors of `checkpoint/predictors.py` are fed with what a run recorded, in its order, as the policy was. Before
they are told a value they are asked for their quantiles: of many values, a share of about q must lie at or below the
predicted q-quantile (coverage). Of the failure rate it is asked how many failures it expected over the time at risk.

Checkpoints' exposed time is predicted as well, for each: the sum over those taken is compared with what was waited.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from statistics import NormalDist
from typing import Any

from belayer import events as ev
from belayer.checkpoint.predictors import Cost, FailureRate, LogNormal
from belayer.journal.records import CheckpointPublished
from belayer.journal.segments import scan
from belayer.observe.metrics import scan_metrics

LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
SETTLED = 10  # the first values meet the prior; they are counted apart


class Coverage:
    """How often each predicted quantile was not exceeded."""

    def __init__(self) -> None:
        self.count = 0
        self._below = dict.fromkeys(LEVELS, 0)

    def see(self, quantiles: dict[float, float], value: float) -> None:
        self.count += 1
        for level, quantile in quantiles.items():
            self._below[level] += value <= quantile

    def figures(self) -> dict[str, Any]:
        """`band` is how far a perfect predictor's coverage may be off by chance (95%), were the values independent."""
        if not self.count:
            return {"count": 0}
        covered = {f"{level:g}": below / self.count for level, below in self._below.items()}
        band = {f"{level:g}": 1.96 * math.sqrt(level * (1 - level) / self.count) for level in LEVELS}
        worst = max(LEVELS, key=lambda level: abs(covered[f"{level:g}"] - level))
        return {
            "count": self.count,
            "coverage": covered,
            "band": band,
            "worst": covered[f"{worst:g}"] - worst,
            "worst_level": worst,
        }


class Calibration:
    """An event sink. The predictors start as a policy's do."""

    def __init__(self, *, prior_s: float = 3600.0) -> None:
        self._bubble = LogNormal(1.0, 1.0)
        self._cost = Cost(0.08)
        self._failures = FailureRate(prior_s)
        self._bubbles = Coverage()
        self._costs = Coverage()
        self._cost_ratio: list[float] = []
        self._seen = {"bubble": 0, "cost": 0}
        self._expected = 0.0
        self._counted = 0
        self._at_risk_s = 0.0
        self._exposed = [0.0, 0.0]  # predicted, waited
        self.bubbles: list[float] = []

    def __call__(self, event: ev.Event) -> None:
        if event.kind == ev.GENERATE:
            self._see_bubble(event.data["wall_s"])
        elif event.kind == ev.EXEC:
            self._survive(event.data["wall_s"])
        elif event.kind == ev.CHECKPOINT:
            self._see_cost(event.data["wall_s"], event.data.get("bytes", 0.0), event.data["exposed_s"])
        elif event.kind == ev.FAULT_DETECTED and event.data.get("fault") == "sandbox":
            self._failures.failed()
            self._counted += 1

    def _see_bubble(self, seconds: float) -> None:
        self._seen["bubble"] += 1
        self.bubbles.append(seconds)
        if self._seen["bubble"] > SETTLED:
            quantiles = {level: self._bubble.quantile(NormalDist().inv_cdf(level)) for level in LEVELS}
            self._bubbles.see(quantiles, seconds)
        self._bubble.add(seconds)
        self._survive(seconds)

    def _see_cost(self, seconds: float, nbytes: float, exposed_s: float) -> None:
        self._seen["cost"] += 1
        expected = self._cost.seconds(nbytes)
        self._exposed[0] += self._cost.exposed(nbytes, self._bubble)
        self._exposed[1] += exposed_s
        if self._seen["cost"] > SETTLED:
            self._cost_ratio.append(seconds / expected)
            quantiles = {level: self._cost.quantile(nbytes, NormalDist().inv_cdf(level)) for level in LEVELS}
            self._costs.see(quantiles, seconds)
        self._cost.add(seconds, nbytes)

    def _survive(self, seconds: float) -> None:
        self._expected += self._failures.per_s * seconds
        self._at_risk_s += seconds
        self._failures.survived(seconds)

    def figures(self) -> dict[str, Any]:
        ratios = self._cost_ratio
        return {
            "bubble": self._bubbles.figures(),
            "cost": self._costs.figures()
            | {
                "observed": len(ratios),
                "mean_ratio": statistics.fmean(ratios) if ratios else None,
                "median_ratio": statistics.median(ratios) if ratios else None,
            },
            "failures": {
                "counted": self._counted,
                "expected": self._expected,
                "at_risk_s": self._at_risk_s,
                "chance": poisson_p(self._counted, self._expected),
            },
            "exposed": {"predicted_s": self._exposed[0], "waited_s": self._exposed[1]},
        }


def poisson_p(counted: int, expected: float) -> float:
    """Two-sided probability of a count at least as far out as this one, if so many are expected."""
    logarithm = math.log(max(expected, 1e-300))
    chances = [math.exp(-expected + k * logarithm - math.lgamma(k + 1)) for k in range(counted + 1)]
    below = math.fsum(chances)
    return min(1.0, 2 * min(below, 1 - below + chances[-1]))


def of_run(run: Path, prior_s: float) -> Calibration:
    """Of a recorded run whose policy began with that prior. Raises `OSError` where it has no metrics."""
    found = Calibration(prior_s=prior_s)
    for event in scan_metrics(run / "metrics.jsonl").events:
        found(event)
    return found


_PREDICTED_COST = re.compile(r"cost ([0-9.]+) ms")
_PREDICTED_EXPOSED = re.compile(r"exposed ([0-9.]+) ms")


def journalled(run: Path, events: Iterable[ev.Event]) -> dict[str, Any]:
    """What the run itself believed at each checkpoint, by the numbers in its journal, against what then happened."""
    happened = {
        (event.subject, event.data["action"], event.data["id"]): (event.data["wall_s"], event.data["exposed_s"])
        for event in events
        if event.kind == ev.CHECKPOINT
    }
    ratios: list[float] = []
    predicted = waited = 0.0
    for record in scan(run / "journal"):
        if not isinstance(record, CheckpointPublished):
            continue
        cost, exposed = _PREDICTED_COST.search(record.why), _PREDICTED_EXPOSED.search(record.why)
        found = happened.get((record.rollout, record.k, record.id))
        if cost is None or exposed is None or found is None:
            continue
        ratios.append(found[0] * 1e3 / max(1e-3, float(cost[1])))
        predicted += float(exposed[1]) / 1e3
        waited += found[1]
    if not ratios:
        return {"checkpoints": 0}
    return {
        "checkpoints": len(ratios),
        "cost_median_ratio": statistics.median(ratios),
        "cost_mean_ratio": statistics.fmean(ratios),
        "exposed_predicted_s": predicted,
        "exposed_waited_s": waited,
    }
