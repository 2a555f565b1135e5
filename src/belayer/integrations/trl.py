"""TRL: trajectories of any source as the rollouts of `trl.GRPOTrainer` (written against TRL 1.16).

    GRPOConfig, GRPOTrainer = load_grpo()
    trainer = GRPOTrainer(
        model=..., args=GRPOConfig(...), train_dataset=..., reward_funcs=rollout_reward,
        rollout_func=rollout_func(collect), callbacks=[publish_weights(publish)],
    )

`collect(prompts, trainer)` gets the batch's prompts, each repeated `num_generations` times in a row, and returns one
trajectory per prompt in the same order. Observations are masked out of the loss; the reward is the trajectory's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from belayer.rollout import Trajectory

Collect = Callable[[list[Any], Any], Sequence["Trajectory"]]
Publish = Callable[[Iterable[tuple[str, "torch.Tensor"]], int], None]


def load_grpo() -> tuple[Any, Any]:
    """Import `(GRPOConfig, GRPOTrainer)` without loading vLLM into this process.

    TRL imports its vLLM client whenever vLLM is installed, which costs seconds and memory and fails on versions it does
    not know. Belayer's engine is a process of its own and `use_vllm` stays off, so the trainer does without. Has no
    effect if the trainer was imported before; afterwards `use_vllm=True` is refused in this process.
    """
    import trl.import_utils as probes

    original = probes.is_vllm_available
    probes.is_vllm_available = lambda *args, **kwargs: False
    try:
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.grpo_trainer import GRPOTrainer
    finally:
        probes.is_vllm_available = original
    return GRPOConfig, GRPOTrainer


def rollout_func(collect: Collect) -> Callable[[list[Any], Any], dict[str, Any]]:
    """What `GRPOTrainer(rollout_func=...)` takes, from a function that returns trajectories."""

    def generate(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        trajectories = collect(prompts, trainer)
        if len(trajectories) != len(prompts):
            raise ValueError(f"{len(prompts)} trajectories were asked for, and {len(trajectories)} came")
        return to_trl(trajectories)

    return generate


def to_trl(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """TRL's form of trajectories: what comes before the first model token is the prompt, the rest the completion.

    Raises `ValueError` for a trajectory that holds no token before, or none of, the model's: it cannot be trained on.
    """
    splits = []
    for trajectory in trajectories:
        split = next((at for at, mark in enumerate(trajectory.loss_mask) if mark), 0)
        if split == 0:
            raise ValueError(f"rollout {trajectory.rollout_id} holds no prompt or no model token")
        splits.append(split)
    pairs = list(zip(trajectories, splits, strict=True))
    return {
        "prompt_ids": [list(each.token_ids[:split]) for each, split in pairs],
        "completion_ids": [list(each.token_ids[split:]) for each, split in pairs],
        "logprobs": [list(each.logprobs[split:]) for each, split in pairs],
        "env_mask": [list(each.loss_mask[split:]) for each, split in pairs],
        "rollout_reward": [each.reward for each in trajectories],
    }


def rollout_reward(rollout_reward: list[float], **columns: Any) -> list[float]:
    """The reward function to give to `GRPOTrainer`: the reward that each trajectory brought along."""
    return rollout_reward


def publish_weights(publish: Publish) -> Any:
    """A `TrainerCallback` that calls `publish(named tensors, policy version)` after every optimiser step."""
    from transformers import TrainerCallback

    class PublishWeights(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            publish(((name, tensor.detach()) for name, tensor in model.named_parameters()), state.global_step)

    return PublishWeights()
