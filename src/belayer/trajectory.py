"""What a trainer gets of a rollout, made from its journal alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from belayer.journal import Call, History


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """A finished rollout, as a trainer wants it.

    `token_ids`, `loss_mask` (1 for the model's own tokens), `logprobs` (0.0 where the mask is 0) and
    `weights_versions` (-1 where the mask is 0) have equal lengths. (rollout_id, attempt) identifies it for ever.
    """

    rollout_id: str
    group: str
    attempt: int
    reward: float
    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    weights_versions: list[int]
    task: Any
    turns: int
    restores: int = 0
    truncations: int = 0


class Columns(NamedTuple):
    """One entry per token of a context, in four columns of equal length; see `Trajectory`."""

    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    weights_versions: list[int]


def columns(calls: Iterable[Call]) -> Columns:
    """What these calls have put into the context, token by token."""
    made = Columns([], [], [], [])
    for call in calls:
        model, length = call.kind == "generate", len(call.ids)
        made.token_ids.extend(call.ids)
        made.loss_mask.extend([int(model)] * length)
        made.logprobs.extend(call.logprobs if model else [0.0] * length)
        made.weights_versions.extend(call.versions if model else [-1] * length)
    return made


def trajectory(history: History) -> Trajectory:
    """The trajectory of a finished rollout, from its journal alone."""
    assert history.started is not None and history.reward is not None
    return Trajectory(
        rollout_id=history.rollout,
        group=history.started.group,
        attempt=history.attempt,
        reward=history.reward,
        **columns(history.calls)._asdict(),
        task=history.started.task,
        turns=sum(call.kind == "generate" for call in history.calls),
        restores=history.restores,
        truncations=history.truncations,
    )
