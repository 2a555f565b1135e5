"""What the trainer and the run say to each other. Importing this module loads neither torch nor TRL."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from belayer.errors import BelayerError

if TYPE_CHECKING:
    import torch

    from belayer.trajectory import Trajectory


class TrainingError(BelayerError):
    """The training job got rollouts, or a saved state, that it cannot train on."""


class TrainingStopped(Exception):
    """Raised by a source's `collect` when the run is being stopped; `train` then returns what it has so far."""


class RolloutSource(Protocol):
    """Where rollouts come from and where new weights go. All calls block and come from the trainer's thread."""

    def collect(self, step: int, tasks: list[Any], group_size: int) -> list[Trajectory]:
        """`group_size` trajectories per task, ordered by (group, index). Raises `TrainingStopped` to end early."""
        ...

    def publish(self, named_tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """New weights under their Hugging Face names. The tensors are the trainer's own: read, do not keep them."""
        ...

    def acknowledge(self, step: int) -> None:
        """The trajectories of `step` were trained on and the result is saved. May come twice after a resume."""
        ...


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One optimiser step; `step` counts from 0, as in `collect`. Times in seconds.

    `logprob_gap` is the largest difference between the sampler's and the trainer's log probability of a sampled token
    (about 1e-5 in float32; large when the engine runs other weights or another temperature). `stale_tokens` counts
    model tokens that were not sampled from this step's weights. Neither enters the loss. `weights_digest` identifies
    the weights after the step: two runs with the same tokens and rewards have the same digests.
    """

    step: int
    reward_mean: float
    reward_std: float
    loss: float
    entropy: float
    grad_norm: float
    rollouts: int
    model_tokens: int
    logprob_gap: float
    stale_tokens: int
    weights_digest: str
    rollout_s: float
    optimise_s: float
    save_s: float
    weights_s: float
    wall_s: float


class TrainOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How the training ended: after `steps` optimiser steps, the policy in the folder `model`."""

    steps: int
    stopped: bool
    model: Path
