"""GRPO through TRL: the same tokens and rewards give bitwise the same weights, killed and resumed or not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from belayer.config import TrainConfig
from belayer.errors import BelayerError
from belayer.training import StepReport, TrainingError, TrainingStopped, load_task, newest_state, prepare_model, train
from belayer.trajectory import Trajectory

pytestmark = pytest.mark.unit

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = TrainConfig(
    task="shell_task.py:ShellTask", model="tiny_model.py:build", steps=4, groups=2, group_size=2, learning_rate=1e-2
)


class Scripted:
    """Trajectories that depend on nothing but (step, group, index), and a log of what the trainer asked for.

    `kill_at` is a call, for instance "publish 2", in which the process kills itself; `draws` how many numbers a step
    takes from the global generator, as anything else in a driver may.
    """

    def __init__(self, kill_at: str = "", draws: int = 0) -> None:
        self.kill_at, self.draws = kill_at, draws
        self.calls: list[str] = []

    def collect(self, step: int, tasks: list[Any], group_size: int) -> list[Trajectory]:
        import torch

        self._called(f"collect {step}")
        torch.rand(self.draws)
        return [
            trajectory(step, group, index, load_task(CONFIG.task, EXAMPLES))
            for group in range(len(tasks))
            for index in range(group_size)
        ]

    def publish(self, named_tensors: Iterable[tuple[str, Any]], policy_version: int) -> None:
        assert all(tensor.requires_grad is False for _, tensor in named_tensors)
        self._called(f"publish {policy_version}")

    def acknowledge(self, step: int) -> None:
        self._called(f"acknowledge {step}")

    def _called(self, call: str) -> None:
        self.calls.append(call)
        if call == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def trajectory(step: int, group: int, index: int, task: Any) -> Trajectory:
    prompt = task.tokenizer.encode(f"{'abc'[group]}/p same\n$ ")
    command = task.tokenizer.encode(f"cat {'pqr'[(step + index) % 3]}\n"[: 4 + index * 2])
    after = task.tokenizer.encode("k\n$ ")
    mask = [0] * len(prompt) + [1] * len(command) + [0] * len(after) + [1] * len(command)
    return Trajectory(
        rollout_id=f"s{step}-{group}-{index}",
        group=f"s{step}-{group}",
        attempt=0,
        reward=0.25 * ((step + 2 * group + 3 * index) % 4),
        token_ids=[*prompt, *command, *after, *command],
        loss_mask=mask,
        logprobs=[-4.0 * mark for mark in mask],
        weights_versions=[step if mark else -1 for mark in mask],
        task=None,
        turns=2,
    )


def run(folder: Path, source: Scripted, *, stop_after: int | None = None, steps: int = CONFIG.steps):
    """Train in `folder`; returns the outcome and the reports."""
    config = CONFIG.model_copy(update={"steps": steps})
    prepare_model(config, load_task(config.task, EXAMPLES), folder, 1, print, base=EXAMPLES)
    reports: list[StepReport] = []
    stop = threading.Event()

    def on_step(report: StepReport) -> None:
        reports.append(report)
        if report.step + 1 == stop_after:
            stop.set()

    task = load_task(config.task, EXAMPLES)
    return train(config, task, source, folder, seed=1, on_step=on_step, stop=stop), reports


@pytest.mark.integration
@pytest.mark.timeout(240)
def test_a_training_that_is_killed_and_resumed_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed twice: after a state was saved and before the run heard of it, and in the middle of saving."""
    pytest.importorskip("trl")
    monkeypatch.setenv("BELAYER_CACHE", str(tmp_path / "cache"))
    killed = subprocess.Popen([sys.executable, __file__, str(tmp_path / "killed"), "publish 2"])

    source = Scripted()
    outcome, reports = run(tmp_path / "calm", source)
    expected = [report.weights_digest for report in reports]
    assert len(set(expected)) == CONFIG.steps, "the weights did not change"
    assert (outcome.steps, outcome.stopped, outcome.model) == (4, False, tmp_path / "calm" / "checkpoint-4")
    assert source.calls == [
        call for step in range(4) for call in (f"collect {step}", f"publish {step + 1}", f"acknowledge {step}")
    ]
    assert [report.step for report in reports] == [0, 1, 2, 3]
    assert all(report.rollouts == 4 and report.stale_tokens == 0 and report.grad_norm > 0 for report in reports)
    assert reports[0].reward_mean == pytest.approx(0.25 * (0 + 3 + 2 + 1) / 4)
    assert reports[0].model_tokens == 2 * 2 * (4 + 6)
    assert reports[0].logprob_gap > 0.01, "the scripted log probabilities are not the model's"
    assert {folder.name for folder in (tmp_path / "calm").glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-4"}

    assert killed.wait(120) == -signal.SIGKILL
    state = newest_state(tmp_path / "killed")
    assert state is not None and (state.step, state.weights_digest) == (2, expected[1])
    source = Scripted(draws=3)
    outcome, reports = run(tmp_path / "killed", source, stop_after=3)
    assert (outcome.steps, outcome.stopped) == (3, True)
    assert source.calls[:2] == ["acknowledge 1", "collect 2"], "the step that was saved is acknowledged, not done again"
    assert reports[0].weights_digest == expected[2]

    (tmp_path / "killed" / "checkpoint-3" / "complete.json").unlink()  # as a kill in the middle of saving leaves it
    source = Scripted(draws=5)
    outcome, reports = run(tmp_path / "killed", source)
    assert source.calls[:2] == ["acknowledge 1", "collect 2"]
    assert [report.weights_digest for report in reports] == expected[2:]
    assert outcome.steps == 4

    source = Scripted()
    outcome, reports = run(tmp_path / "killed", source)
    assert (source.calls, reports, outcome.steps, outcome.stopped) == (["acknowledge 3"], [], 4, False)


class _Refusing(Scripted):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def collect(self, step: int, tasks: list[Any], group_size: int) -> list[Trajectory]:
        raise self.error


class _Short(Scripted):
    def collect(self, step: int, tasks: list[Any], group_size: int) -> list[Trajectory]:
        return super().collect(step, tasks, group_size)[1:]


class _Silent(Scripted):
    def collect(self, step: int, tasks: list[Any], group_size: int) -> list[Trajectory]:
        import msgspec

        first, *rest = super().collect(step, tasks, group_size)
        return [msgspec.structs.replace(first, loss_mask=[0] * len(first.loss_mask)), *rest]


@pytest.mark.integration
@pytest.mark.timeout(240)
def test_bad_rollouts_a_stop_and_a_damaged_state_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl")
    monkeypatch.setenv("BELAYER_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "run"
    with pytest.raises(TrainingError, match="needs 4 trajectories and got 3"):
        run(folder, _Short())
    with pytest.raises(TrainingError, match="s0-0-0 cannot be trained on"):
        run(folder, _Silent())
    with pytest.raises(BelayerError, match="disk"):
        run(folder, _Refusing(BelayerError("the disk is full")))
    outcome, reports = run(folder, _Refusing(TrainingStopped()))
    assert (outcome.steps, outcome.stopped, reports) == (0, True, [])
    assert outcome.model == folder / "model"

    run(folder, Scripted(), steps=1)
    file = folder / "checkpoint-1" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(TrainingError, match="does not load as what was saved"):
        run(folder, Scripted())


if __name__ == "__main__":
    run(Path(sys.argv[1]), Scripted(kill_at=sys.argv[2]))
