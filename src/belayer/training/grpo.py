"""GRPO with TRL's trainer, arranged so that weights are an exact function of (model, seed, tokens, rewards).

Why two runs that deliver the same rollouts end with bitwise the same weights, killed and resumed or not:
one update per batch, so the importance ratio is exactly 1 and no log probability of the sampler enters the loss;
batches in (group, index) order; a fixed number of compute threads; random numbers reseeded from (seed, step) before
each update; tensors in freshly allocated memory, so that alignment does not depend on how they were loaded; and the
whole state saved after each step, before anyone hears of it.

Order after an optimiser step: state saved and marked whole → weights published → step acknowledged → step reported. A
kill between any two of them resumes with the next step (`newest_state` says which), whose weights the run hands to the
engine when it opens.
"""

from __future__ import annotations

import hashlib
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from belayer.config import TrainConfig
from belayer.training.interface import RolloutSource, StepReport, TrainingError, TrainingStopped, TrainOutcome
from belayer.training.state import SavedState, mark_complete, newest_state, remove_unfinished, weights_digest
from belayer.training.task import Task

if TYPE_CHECKING:
    from belayer.trajectory import Trajectory


def train(
    config: TrainConfig,
    task: Task,
    source: RolloutSource,
    state_dir: Path,
    *,
    seed: int,
    on_step: Callable[[StepReport], None],
    stop: threading.Event,
) -> TrainOutcome:
    """Train the model in `state_dir`/model until `config.steps`, going on from the newest saved state if there is one.

    Blocks; run it in a thread of its own, on the CPU in float32. `stop` ends it after the step at hand. Seeds the
    global random numbers of Python, numpy and torch, as TRL does. Raises `TrainingError` for rollouts or a state that
    cannot be used, and whatever `source` raises except `TrainingStopped`.
    """
    remove_unfinished(state_dir)
    state = newest_state(state_dir)
    stopped = False
    if state is not None:
        try:
            source.acknowledge(state.step - 1)  # a kill may have come between saving and acknowledging
        except TrainingStopped:
            return TrainOutcome(steps=state.step, stopped=True, model=state.folder)
    if (state.step if state else 0) < config.steps and not stop.is_set():
        from belayer.training._torch import with_threads

        with with_threads(config.threads):
            stopped = _Training(config, task, source, state_dir, seed, on_step, stop).run(state)
    done = newest_state(state_dir)
    steps = done.step if done else 0
    return TrainOutcome(
        steps=steps, stopped=stopped or steps < config.steps, model=done.folder if done else state_dir / "model"
    )


class _Training:
    """One call of `train`: TRL's trainer, and what happens around each of its steps."""

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        source: RolloutSource,
        state_dir: Path,
        seed: int,
        on_step: Callable[[StepReport], None],
        stop: threading.Event,
    ) -> None:
        self.config, self.task, self.source, self.state_dir = config, task, source, state_dir
        self.seed, self.on_step, self.stop = seed, on_step, stop
        self.trajectories: list[Trajectory] = []
        self.logprob_gap = 0.0
        self.started = self.collected = self.optimised = self.collect_s = 0.0
        self.logs: dict[str, Any] = {}

    def run(self, state: SavedState | None) -> bool:
        """Returns whether the source or `stop` ended it before the last step."""
        trainer = self._trainer(state)
        try:
            trainer.train(resume_from_checkpoint=str(state.folder) if state else None)
        except TrainingStopped:
            return True
        return self.stop.is_set()

    # -- the moments of a step ----------------------------------------------------------------------

    def collect(self, prompts: list[str], trainer: Any) -> list[Trajectory]:
        import torch

        step, config = trainer.state.global_step, self.config
        expected = [f"{step} {group}" for group in range(config.groups) for _ in range(config.group_size)]
        if prompts != expected:
            raise TrainingError(f"the trainer asks for {prompts[0]!r} at step {step}", kept="the state saved before it")
        if self.stop.is_set():
            raise TrainingStopped
        self.started = time.perf_counter()
        tasks = self.task.tasks(step, config.groups, self.seed)
        trajectories = self.source.collect(step, tasks, config.group_size)
        self.collected = time.perf_counter()
        self.collect_s = self.collected - self.started
        self._check(step, trajectories)
        self.trajectories = trajectories
        self.logprob_gap = self._logprob_gap(trainer.model)
        # TRL shuffles the batch with the global generator; from here to the update nobody else draws in this thread
        torch.manual_seed(int.from_bytes(hashlib.sha256(f"{self.seed}/{step}".encode()).digest()[:7], "little"))
        return trajectories

    def saved(self, step: int, model: Any) -> None:
        """`step` steps are done and their state is written."""
        digest = weights_digest(model.named_parameters())
        mark_complete(self.state_dir / f"checkpoint-{step}", step, digest)
        saved = time.perf_counter()
        self.source.publish(((name, tensor.detach()) for name, tensor in model.named_parameters()), step)
        published = time.perf_counter()
        self.source.acknowledge(step - 1)
        rewards = [each.reward for each in self.trajectories]
        versions = [
            version
            for each in self.trajectories
            for version, mark in zip(each.weights_versions, each.loss_mask, strict=True)
            if mark
        ]
        report = StepReport(
            step=step - 1,
            reward_mean=fmean(rewards),
            reward_std=pstdev(rewards),
            loss=float(self.logs.get("loss", 0.0)),
            entropy=float(self.logs.get("entropy", 0.0)),
            grad_norm=float(self.logs.get("grad_norm", 0.0)),
            rollouts=len(rewards),
            model_tokens=len(versions),
            logprob_gap=self.logprob_gap,
            stale_tokens=sum(version != step - 1 for version in versions),
            weights_digest=digest,
            rollout_s=self.collect_s,
            optimise_s=self.optimised - self.collected,
            save_s=saved - self.optimised,
            weights_s=published - saved,
            wall_s=time.perf_counter() - self.started,
        )
        self.on_step(report)

    def _check(self, step: int, trajectories: list[Trajectory]) -> None:
        wanted = self.config.groups * self.config.group_size
        if len(trajectories) != wanted:
            raise TrainingError(f"step {step} needs {wanted} trajectories and got {len(trajectories)}")
        for each in trajectories:
            if not any(each.loss_mask) or each.loss_mask[0]:
                raise TrainingError(
                    f"rollout {each.rollout_id} cannot be trained on: it has no prompt, or no token of the model",
                    next_step="let the task's function observe a prompt and then generate at least once",
                )

    def _logprob_gap(self, model: Any) -> float:
        import torch

        from belayer.training._torch import collate, token_logprobs

        ids, mask = collate(
            [each.token_ids for each in self.trajectories], [each.loss_mask for each in self.trajectories]
        )
        sampled = torch.zeros(ids.shape)
        for row, each in enumerate(self.trajectories):
            sampled[row, : len(each.logprobs)] = torch.tensor(each.logprobs)
        with torch.no_grad():
            return float(((token_logprobs(model, ids) - sampled[:, 1:]).abs() * mask).max())

    # -- TRL's trainer ----------------------------------------------------------------------

    def _trainer(self, state: SavedState | None) -> Any:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

        from belayer.integrations.trl import load_grpo, rollout_func, rollout_reward
        from belayer.training._torch import quiet_transformers

        quiet_transformers()
        warnings.filterwarnings("ignore", message="You are using 'rollout_func'")
        GRPOConfig, GRPOTrainer = load_grpo()

        class Trainer(GRPOTrainer):
            def create_model_card(self, *args: Any, **kwargs: Any) -> None:
                """Writes nothing: a state after every step needs no page about itself."""

        config, folder = self.config, self.state_dir / "model"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for tensor in model.parameters():
            tensor.data = tensor.data.clone()  # weights mapped from a file are aligned as the file happens to be
        arguments = GRPOConfig(
            output_dir=str(self.state_dir),
            max_steps=config.steps,
            per_device_train_batch_size=config.groups * config.group_size,
            gradient_accumulation_steps=1,
            steps_per_generation=1,
            num_iterations=1,
            num_generations=config.group_size,
            temperature=config.temperature,
            shuffle_dataset=False,
            learning_rate=config.learning_rate,
            lr_scheduler_type="constant",
            adam_beta2=0.99,  # tens of steps, not thousands
            weight_decay=0.0,
            max_grad_norm=1.0,
            beta=0.0,  # no reference model
            loss_type="dapo",  # mean over the batch's model tokens
            scale_rewards="none",  # dividing by the spread of a group of four makes noise as loud as signal
            save_strategy="steps",
            save_steps=1,
            save_total_limit=2,  # the newest, and the one before it while the newest is not whole
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            seed=self.seed % 2**32,
        )
        trainer = Trainer(
            model=model,
            reward_funcs=rollout_reward,
            args=arguments,
            train_dataset=self._prompts(),
            processing_class=AutoTokenizer.from_pretrained(folder),
            rollout_func=rollout_func(self.collect),
            callbacks=[_callback(self, state)],
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def _prompts(self) -> Any:
        """TRL wants a data set; ours only says which group of which step a row stands for."""
        from datasets import Dataset

        rows = [f"{step} {group}" for step in range(self.config.steps) for group in range(self.config.groups)]
        return Dataset.from_dict({"prompt": rows})


def _callback(training: _Training, resumed: SavedState | None) -> Any:
    from transformers import TrainerCallback

    class AroundStep(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if resumed is None:
                return
            if state.global_step != resumed.step or weights_digest(model.named_parameters()) != resumed.weights_digest:
                raise TrainingError(
                    f"the saved state in {resumed.folder} does not load as what was saved",
                    next_step="remove that folder to go on from the state before it",
                )

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            training.optimised = time.perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            training.logs = logs or {}

        def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            training.saved(state.global_step, model)
            if training.stop.is_set():
                control.should_training_stop = True

    return AroundStep()
