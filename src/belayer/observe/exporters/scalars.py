"""TensorBoard and Weights & Biases: the numbers of each optimiser step, and how the run was doing at its end."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from typing import Any

from belayer import events as ev
from belayer.errors import ConfigError
from belayer.events import Event
from belayer.observe._values import number, whole
from belayer.observe.summary import Summary


class StepScalars:
    """Collects {name: number} of a step from events; a base for what writes them."""

    def __init__(self) -> None:
        self._summary = Summary()

    def __call__(self, event: Event) -> None:
        self._summary(event)
        if event.kind != ev.TRAIN_STEP:
            return
        step = whole(event.data, "step")
        if step is not None:
            self.write(step, {**self._of_step(event), **self._of_run()})

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Record the numbers of one step."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def _of_step(self, event: Event) -> dict[str, float]:
        found = {key: number(event.data, key) for key in event.data if key != "step"}
        return {f"train/{key}": value for key, value in found.items() if value is not None}

    def _of_run(self) -> dict[str, float]:
        run = self._summary.result()
        numbers: dict[str, float] = {
            "belayer/rollouts_delivered": run.rollouts_delivered,
            "belayer/rollouts_failed": run.rollouts_failed,
            "belayer/rollouts_truncated": run.rollouts_truncated,
            "belayer/tokens_generated": run.tokens_generated,
            "belayer/faults_injected": run.faults_injected,
            "belayer/faults_detected": run.faults_detected,
            "belayer/recoveries": len(run.recoveries),
            "belayer/checkpoints": run.checkpoints,
        }
        if run.hidden_checkpoint_share is not None:
            numbers["belayer/checkpoint_hidden_ratio"] = run.hidden_checkpoint_share
        if run.recoveries:
            numbers["belayer/last_recovery_seconds"] = run.recoveries[-1].total_s
        return numbers


class TensorBoardWriter(StepScalars):
    """Writes event files into `folder`. Raises `ConfigError` without tensorboard."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._record = _module("tensorboard", "tensorboard.compat.proto.event_pb2").Event
        self._values = _module("tensorboard", "tensorboard.compat.proto.summary_pb2").Summary
        files = _module("tensorboard", "tensorboard.summary.writer.event_file_writer")
        self._at = 0.0
        self._writer = files.EventFileWriter(str(folder), flush_secs=5)

    def __call__(self, event: Event) -> None:
        self._at = event.at
        super().__call__(event)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        values = [self._values.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._writer.add_event(self._record(wall_time=self._at, step=step, summary=self._values(value=values)))

    def close(self) -> None:
        self._writer.close()


class WandbWriter(StepScalars):
    """Logs to a W&B run; WANDB_PROJECT, WANDB_MODE and the like are read by wandb itself.

    A resumed run continues the same W&B run. Raises `ConfigError` without wandb.
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self._wandb = _module("wandb", "wandb")
        self._folder = run_dir
        self._run: Any = None

    def write(self, step: int, scalars: dict[str, float]) -> None:
        if self._run is None:  # on the exporter's thread: it may wait for the network
            about = (self._folder / "run.json").read_bytes()  # never changes, also when the run is resumed
            self._run = self._wandb.init(
                id=hashlib.blake2b(about, digest_size=8).hexdigest(),
                resume="allow",
                name=self._folder.name,
                dir=str(self._folder),
            )
        self._run.log(scalars, step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def _module(exporter: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"the exporter {exporter} lacks a package: {error}", next_step=f"pip install {exporter}"
        ) from None
