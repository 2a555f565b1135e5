"""TRL: protected rollouts for `trl.GRPOTrainer` (written against TRL 1.16).

Three ways, from the most protection to the least change: `ProtectedRollouts` (engine and sandboxes are Belayer's),
`SandboxEnvironment` (TRL generates, its tools act in protected sandboxes), and for trajectories of any source:

    GRPOConfig, GRPOTrainer = load_grpo()
    trainer = GRPOTrainer(
        model=..., args=GRPOConfig(...), train_dataset=..., reward_funcs=rollout_reward,
        rollout_func=rollout_func(collect), callbacks=[publish_weights(publish)],
    )

`collect(prompts, trainer)` gets the batch's prompts, each repeated `num_generations` times in a row, and returns one
trajectory per prompt in the same order. Observations are masked out of the loss; the reward is the trajectory's own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belayer import events
from belayer.config import Config
from belayer.errors import BelayerError
from belayer.integrations._extras import missing
from belayer.integrations._host import shared_host
from belayer.integrations._loop import LoopThread, before_exit
from belayer.run import Run, Solve

if TYPE_CHECKING:
    import torch

    from belayer.integrations._protected import BlockingSandbox, ProtectedSandbox
    from belayer.trajectory import Trajectory

Collect = Callable[[list[Any], Any], Sequence["Trajectory"]]
Publish = Callable[[Iterable[tuple[str, "torch.Tensor"]], int], None]


def load_grpo() -> tuple[Any, Any]:
    """Import `(GRPOConfig, GRPOTrainer)` without loading vLLM into this process.

    TRL imports its vLLM client whenever vLLM is installed, which costs seconds and memory and fails on versions it does
    not know. Belayer's engine is a process of its own and `use_vllm` stays off, so the trainer does without. Has no
    effect if the trainer was imported before; afterwards `use_vllm=True` is refused in this process.
    """
    try:
        import trl.import_utils as probes
    except ImportError as error:
        raise missing("TRL", "train", error) from error
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


class ProtectedRollouts:
    """A `rollout_func` that rolls out `solve` in a run of Belayer's: protected engine, protected sandboxes.

        rollouts = ProtectedRollouts(solve, "runs/trl", Config(...))
        trainer = GRPOTrainer(model=..., rollout_func=rollouts, reward_funcs=rollout_reward, ...)

    `solve(rollout)` is a rollout function (see `belayer.Rollout`), and `rollout.task` is the prompt, or what
    `task(prompt)` makes of it. The run is opened at the first batch, with the trainer's weights; they are published
    anew before a batch whenever the trainer has made a step. The model folder is `engine.model`, or the trainer's.
    Batches are named by their step: a trainer that is started again with the same data goes on from the journal.
    """

    def __init__(
        self,
        solve: Solve,
        directory: str | Path,
        config: Config | None = None,
        *,
        task: Callable[[Any], Any] = lambda prompt: prompt,
        sink: events.EventSink = events.ignore,
    ) -> None:
        self.run: Run | None = None
        self._solve, self._directory, self._config = solve, directory, config or Config()
        self._task, self._sink = task, sink
        self._loop = LoopThread("belayer rollouts")
        self._published = -1
        self._batches: dict[int, int] = {}
        self._unacknowledged: list[Trajectory] = []
        self._closed = False

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """For the trainer. Raises `RolloutFailed` and its like where a batch cannot be completed: none is shortened."""
        return self._loop.block(self._collect(prompts, trainer))

    async def _collect(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        step = trainer.state.global_step
        run = await self._opened(trainer, step)
        if self._published != step:
            await run.update_weights(_tensors(trainer), step)
            self._published = step
        if self._unacknowledged:
            run.acknowledge(*self._unacknowledged)  # the trainer asks for more, so it has had these
        batch = self._batches[step] = self._batches.get(step, -1) + 1
        tasks = [self._task(prompt) for prompt in prompts]
        trajectories = await run.collect(self._solve, tasks, name=f"step{step}.{batch}")
        self._unacknowledged = list(trajectories)
        return to_trl(trajectories)

    async def _opened(self, trainer: Any, step: int) -> Run:
        if self.run is None:
            config = self._config
            if config.engine.model is None:
                folder = Path(trainer.model.config.name_or_path)
                config = config.model_copy(update={"engine": config.engine.model_copy(update={"model": folder})})
            self.run = await Run.open(
                self._directory,
                config,
                tokenizer=trainer.processing_class,
                weights=_tensors(trainer),
                policy_version=step,
                sink=self._sink,
            )
            self._published = step
            before_exit(self.close)
        return self.run

    def close(self) -> None:
        """Stop the run. Also done when the interpreter ends; harmless when done twice."""
        if self._closed:
            return
        self._closed = True
        try:
            if self.run is not None:
                self._loop.block(self.run.close())
        finally:
            self._loop.close()


class EnvironmentLost(BaseException):
    """A tool's sandbox cannot be kept consistent with the conversation; `error` says why.

    Not an `Exception`: the trainer makes those that a tool raises a message for the model, and would train on it.
    """

    def __init__(self, error: BelayerError) -> None:
        super().__init__(str(error))
        self.error = error


class SandboxEnvironment:
    """An environment for `GRPOTrainer(environment_factory=SandboxEnvironment)`: one tool, `bash`, protected.

    Derive from it for more tools, `get_reward`, and `_prepare`; every public method is a tool for the trainer.
    `self._sandbox` is the protected sandbox of the conversation, a new one after every `reset`. What `get_reward`
    returns is journalled as its reward.
    """

    _timeout_s = 60.0
    _image: str | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        given = cls.__dict__.get("get_reward")
        if inspect.iscoroutinefunction(given):

            @functools.wraps(given)
            async def get_reward_later(self: SandboxEnvironment) -> float | None:
                return self._scored(await given(self))

            cls.get_reward = get_reward_later  # pyright: ignore[reportAttributeAccessIssue]
        elif given is not None:

            @functools.wraps(given)
            def get_reward(self: SandboxEnvironment) -> float | None:
                return self._scored(given(self))

            cls.get_reward = get_reward  # pyright: ignore[reportAttributeAccessIssue]

    def __init__(self) -> None:
        self._host = shared_host()
        self._protected: ProtectedSandbox | None = None

    def reset(self, **row: Any) -> str | None:
        """Begin a conversation with a new sandbox; `row` is the data set's. The result is added to the prompt."""
        self._end()
        self._protected = self._host.block(self._host.sandbox("trl", image=self._image, group="trl"))
        return self._prepare(row)

    def bash(self, command: str) -> str:
        """Run a command in a bash shell that stays the same for the whole conversation.

        Args:
            command: The command to run.

        Returns:
            What it printed, and its exit code if that is not 0.
        """
        with _surfaced():
            result = self._sandbox.shell(command, timeout_s=self._timeout_s)
        if result.exit_code == 0:
            return result.text
        return f"{result.text}\n[{'timeout' if result.timed_out else f'exit code {result.exit_code}'}]"

    def _prepare(self, row: dict[str, Any]) -> str | None:
        """What `reset` does in the new sandbox. Does nothing unless it is overridden."""

    @property
    def _sandbox(self) -> BlockingSandbox:
        if self._protected is None:
            raise RuntimeError("a tool was called before reset")
        return self._protected.blocking

    def _scored(self, reward: float | None) -> float | None:
        if self._protected is not None:
            self._protected.reward = reward
        return reward

    def _end(self) -> None:
        if self._protected is not None:
            self._protected.blocking.close()
            self._protected = None


@contextmanager
def _surfaced() -> Iterator[None]:
    try:
        yield
    except BelayerError as error:
        raise EnvironmentLost(error) from error


def _tensors(trainer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    return ((name, tensor.detach()) for name, tensor in model.named_parameters())
