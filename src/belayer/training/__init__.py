"""The training job: a task's rollouts in, new weights out, exactly repeatable and resumable at any step.

Light to import: torch, transformers and TRL are loaded by the functions that need them.
"""

from belayer.training.grpo import train
from belayer.training.interface import RolloutSource, StepReport, TrainingError, TrainingStopped, TrainOutcome
from belayer.training.model import prepare_model
from belayer.training.state import SavedState, newest_state
from belayer.training.task import Task, load_task

__all__ = [
    "RolloutSource",
    "SavedState",
    "StepReport",
    "Task",
    "TrainOutcome",
    "TrainingError",
    "TrainingStopped",
    "load_task",
    "newest_state",
    "prepare_model",
    "train",
]
