"""A policy that can be changed while its run lives: by a file in the run's directory, which `belayer policy` writes.

The file is looked at before each decision. What was learned under one policy is known to the next. The change is
journalled by each rollout at its next decision, and holds for later sessions of the run until the file is gone.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from belayer.checkpoint.policy import Decision, Learned, Situation, make_policy
from belayer.checkpoint.predictors import Contention
from belayer.config import PolicyConfig
from belayer.errors import ConfigError

FILE = "policy.json"


def read_choice(file: Path) -> PolicyConfig | None:
    """What the file says, None when there is none. Raises `ConfigError`."""
    try:
        return PolicyConfig.model_validate(json.loads(file.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ValidationError) as error:
        raise ConfigError(f"{file} does not say which policy to use: {error}") from None


class LivePolicy:
    """`config` decides until `file` says something else."""

    def __init__(self, config: PolicyConfig, file: Path) -> None:
        self._config = config
        self._file = file
        self._learned = Learned(config.mtbf_s)
        self._learner = make_policy(PolicyConfig(name="adaptive"), self._learned)  # told everything, asked nothing
        self._current = make_policy(config, self._learned)
        self._choice = config
        self._seen: tuple[int, int, int] | None = None
        self._wrong = ""
        self._look()

    @property
    def name(self) -> str:
        return self._current.name

    @property
    def contention(self) -> Contention:
        return self._learned.contention

    def decide(self, situation: Situation) -> Decision:
        self._look()
        decision = self._current.decide(situation)
        return Decision(decision.take, f"{decision.why} ({self._wrong})") if self._wrong else decision

    def begin_by(self, nbytes: float) -> float:
        return self._current.begin_by(nbytes)

    def bubble(self, seconds: float) -> None:
        self._learner.bubble(seconds)

    def action(self, seconds: float) -> None:
        self._learner.action(seconds)

    def cost(self, seconds: float, nbytes: float = 0.0) -> None:
        self._learner.cost(seconds, nbytes)

    def written(self, seconds: float, nbytes: float) -> None:
        self._learner.written(seconds, nbytes)

    def failure(self) -> None:
        self._learner.failure()

    def _look(self) -> None:
        try:
            found = self._file.stat()
            seen = (found.st_mtime_ns, found.st_size, found.st_ino)
        except OSError:
            seen = None
        if seen == self._seen:
            return
        self._seen = seen
        try:
            choice = read_choice(self._file) or self._config
            self._wrong = ""
        except ConfigError as error:  # the policy that decided until now goes on
            choice, self._wrong = self._choice, error.what
        if choice != self._choice:
            self._choice = choice
            self._current = make_policy(choice, self._learned)
