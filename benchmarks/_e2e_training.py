"""RL training while things fail: the shell task of examples/, by GRPO, four times with the same seed.

  no_faults   nothing fails
  belayer     sandboxes are killed
  restart     the same number of kills; a rollout whose sandbox died is started again from nothing
  everything  Belayer; sandboxes are killed and damaged, the engine's workers killed and stopped

Steps are the pairs: wall time of step n against step n without faults. In float32 all four must train on the same
tokens and end with the same weights.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from belayer import events as ev
from belayer.config import Config, load_config
from belayer.errors import ConfigError
from belayer.journal import compare_runs, read_histories
from belayer.observe.survivorship import LengthClass, survivorship
from belayer.run import open_directory
from belayer.training.job import run_job
from belayer.trajectory import trajectory
from belayer.verify import verify_run

from ._e2e_rollouts import TARGET, arm_config, merged
from ._eta import Eta
from ._paired import bootstrap, paired_p, series

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "shell_grpo.toml"
SIZE: dict[bool, dict[str, int]] = {
    True: {"train.steps": 2, "train.groups": 4, "train.group_size": 4, "train.warm_start_steps": 0},
    False: {"train.steps": 8},
}
NONE = {"worker_kill": 0, "worker_stop": 0, "sandbox_kill": 0, "sandbox_damage": 0}
KILLS = 0.1  # of all rollouts


class Trained(msgspec.Struct):
    """What an arm came to."""

    steps: list[dict[str, Any]]
    trajectories: dict[str, tuple[float, list[int]]]
    injected: int
    restores: int
    restarts: int
    recoveries: int
    tokens_made: int
    tokens_delivered: int
    lost: int
    duplicated: int
    lengths: list[LengthClass]
    findings: int
    identical: int


class Events:
    """The events that are counted."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.injected = self.restores = self.recoveries = self.tokens = 0

    def __call__(self, event: ev.Event) -> None:
        if event.kind == ev.TRAIN_STEP:
            self.steps.append(event.data)
        elif event.kind == ev.FAULT_INJECTED:
            self.injected += 1
        elif event.kind == ev.RECOVERED:
            self.restores += event.data["what"] == "sandbox"
            self.recoveries += event.data["what"] == "worker"
        elif event.kind == ev.GENERATE:
            self.tokens += event.data["tokens"]


def training_under_faults(quick: bool) -> list[dict[str, Any]]:
    """One cell."""
    if not EXAMPLE.is_file():
        raise ConfigError(f"{EXAMPLE} is not there", next_step="run from a checkout of Belayer")
    overrides: dict[str, Any] = {**SIZE[quick], "engine.images": False}  # none is to be built while this is measured
    if quick:
        overrides["engine.standby"] = "none"  # no worker dies
    base = load_config(EXAMPLE, overrides)
    assert base.train is not None
    rollouts = base.train.steps * base.train.groups * base.train.group_size
    kills = max(1, round(KILLS * rollouts))
    faults = {
        "no_faults": NONE,
        "belayer": NONE | {"sandbox_kill": kills},
        "restart": NONE | {"sandbox_kill": kills},
        "everything": {"worker_kill": 2, "worker_stop": 1, "sandbox_kill": kills // 2, "sandbox_damage": kills // 2},
    }
    if quick:
        del faults["everything"]
    eta = Eta("e2e --train", len(faults))
    arms: dict[str, Trained] = {}
    with tempfile.TemporaryDirectory(prefix="belayer-bench-") as name:
        for arm, what in faults.items():
            begun = time.monotonic()
            config = arm_config(base, arm).model_copy(
                update={"faults": base.faults.model_copy(update={"inject": arm != "no_faults", **what})}
            )
            arms[arm] = _train(config, Path(name), arm)
            eta(f"{arm}: {time.monotonic() - begun:.0f} s with its start, {arms[arm].injected} faults")
    return [_cell(f"GRPO, {base.train.steps} steps, {rollouts} rollouts, {kills} sandbox kills", arms)]


def _train(config: Config, folder: Path, arm: str) -> Trained:
    seen, run_dir = Events(), folder / arm

    def say(text: str) -> None:
        print(f"  {arm}: {text}", file=sys.stderr)

    outcome = asyncio.run(run_job(config, EXAMPLE.parent, open_directory(run_dir, config), sink=seen, say=say))
    histories = list(read_histories(run_dir / "journal").values())
    done = [trajectory(history) for history in histories if history.finished]
    _, delivered, duplicated = outcome.journal_counts
    assert config.train is not None
    planned = config.train.steps * config.train.groups * config.train.group_size
    return Trained(
        steps=seen.steps,
        trajectories={each.rollout_id: (each.reward, each.token_ids) for each in done},
        injected=seen.injected,
        restores=seen.restores,
        restarts=sum(history.attempts - 1 for history in histories),
        recoveries=seen.recoveries,
        tokens_made=seen.tokens,
        tokens_delivered=sum(sum(each.loss_mask) for each in done),
        lost=planned - delivered,
        duplicated=duplicated,
        lengths=survivorship(histories),
        findings=len(verify_run(run_dir).findings),
        identical=0 if arm == "no_faults" else compare_runs(run_dir, folder / "no_faults").rollouts_identical,
    )


def _cell(name: str, arms: dict[str, Trained]) -> dict[str, Any]:
    calm = arms["no_faults"]
    walls = {arm: [step["wall_s"] for step in each.steps] for arm, each in arms.items()}
    others = [arm for arm in arms if arm != "no_faults"]
    protected = [arm for arm in others if arm != "restart"]
    return {
        "workload": name,
        "subject": series(walls["belayer"]),
        "baselines": {arm: series(walls[arm]) for arm in ("no_faults", "restart")},
        "ratios": {
            arm: statistics.median(b / s for b, s in zip(walls[arm], walls["belayer"], strict=True))
            for arm in ("no_faults", "restart")
        },
        "against_no_faults": {
            arm: {
                "wall": sum(walls[arm]) / sum(walls["no_faults"]),
                "rollouts": statistics.median(a / b for a, b in zip(walls[arm], walls["no_faults"], strict=True)),
                "interval": bootstrap(
                    [a / b for a, b in zip(walls[arm], walls["no_faults"], strict=True)], statistics.median
                ),
                "target": TARGET,
            }
            for arm in others
        },
        "arms": {arm: _sums(each) for arm, each in arms.items()},
        "same": {arm: _sameness(calm, arms[arm]) for arm in others},
        "reward_curve": {arm: [step["reward_mean"] for step in each.steps] for arm, each in arms.items()},
        "checks": {
            "lost": sum(arms[arm].lost for arm in protected),
            "duplicated": sum(arms[arm].duplicated for arm in protected),
            "trajectories_changed": sum(len(calm.trajectories) - arms[arm].identical for arm in protected),
            "weights_changed": sum(
                a["weights_digest"] != b["weights_digest"]
                for arm in protected
                for a, b in zip(arms[arm].steps, calm.steps, strict=True)
            ),
            "inconsistent": sum(each.findings for each in arms.values()),
        },
    }


def _sums(each: Trained) -> dict[str, Any]:
    return {
        "struck": each.injected,
        "restores": each.restores,
        "restarts": each.restarts,
        "worker_recoveries": each.recoveries,
        "lost": each.lost,
        "tokens_made": each.tokens_made,
        "tokens_delivered": each.tokens_delivered,
        "tokens_redone": each.tokens_made - each.tokens_delivered,
        "survivorship": merged([each.lengths]),
    }


def _sameness(calm: Trained, other: Trained) -> dict[str, Any]:
    both = sorted(calm.trajectories.keys() & other.trajectories.keys())
    found: dict[str, Any] = {"compared": len(both), "identical": other.identical, "test": "paired, sign flips"}
    values = {"reward": lambda each: each[0], "length": lambda each: float(len(each[1]))}
    for name, of in values.items():
        one = [of(calm.trajectories[key]) for key in both]
        two = [of(other.trajectories[key]) for key in both]
        p = paired_p([b - a for a, b in zip(one, two, strict=True)])
        found[name] = {"without": statistics.fmean(one), "with": statistics.fmean(two), "p": p}
    return found
