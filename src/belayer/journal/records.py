"""The records of the journal: what happened in a rollout, in order.

Records are msgspec structs in a tagged union, encoded as MessagePack maps, so that a field can be added later without
breaking old journals. `FORMAT` is raised when an old reader could misunderstand a new journal, and when a completion
of an old one would not be continued as it was begun: 2 has another sampling noise, and turns can be voided; 3 has
`PolicyChanged`, and results that retention took away; 4 has `GroupFailed`. docs/journal.md describes all of it for
people.

Numbers: `k` counts the actions of a rollout from 1; 0 is the state before any action. `g` is the generation of the
environment: it is raised by every restore, and an exec of an older generation is refused. Positions count token ids
from 0.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

FORMAT = 4
READABLE = (2, 3, 4)  # the older ones have nothing that 4 has not

# reason of a restore that only a restart of the driver made necessary; it costs no rollout any of its budget
DRIVER_RESTARTED = "the driver was restarted"

Source = Literal["observation", "model"]


class Record(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all records. `rollout` names the rollout, `attempt` counts its fresh starts from 0."""

    rollout: str
    attempt: int = 0


class RolloutStarted(Record, frozen=True, kw_only=True):
    """A rollout begins, from nothing. A later attempt of the same rollout replaces the earlier ones."""

    group: str
    task: Any
    seed: int
    image: str = ""  # of its sandbox; empty: the one of the configuration


class TokensAppended(Record, frozen=True, kw_only=True):
    """Tokens joined the context, either observed (prompt, tool output) or sampled by the model.

    Model tokens carry one logprob each and the policy version that produced them. `call` is the number of the user's
    call that they belong to; the last record of a model turn has `finish` set.
    """

    call: int
    source: Source
    ids: list[int]
    logprobs: list[float] = msgspec.field(default_factory=list)
    weights_version: int = 0
    asked: str = ""
    finish: str = ""


class TurnVoided(Record, frozen=True, kw_only=True):
    """The tokens of the unfinished model turn `call` do not count; it is generated again, by newer weights."""

    call: int
    reason: str


class ActionIntended(Record, frozen=True, kw_only=True):
    """Action `k` is about to be sent to generation `g` of the environment."""

    call: int
    k: int
    g: int
    asked: str


class ActionCompleted(Record, frozen=True, kw_only=True):
    """Action `k` has completed; `observed` is the digest that a replay must reproduce.

    `result` is what `recovery.actions.to_journal` made of it, or what `gone` says when retention took it away.
    """

    call: int
    k: int
    g: int
    observed: str
    result: Any
    wall_s: float = 0.0
    damage: str = ""  # what the action itself did to the system folders; a replay must accept it too


class ValueDrawn(Record, frozen=True, kw_only=True):
    """A value from outside (time) that a replay must see again."""

    call: int
    what: str
    value: Any


class CheckpointPublished(Record, frozen=True, kw_only=True):
    """Checkpoint `id` holds the environment after action `k`, when the context had `context_hash`."""

    k: int
    g: int
    id: str
    level: str
    context_hash: str
    why: str = ""  # the policy's numbers


class CheckpointSkipped(Record, frozen=True, kw_only=True):
    """The policy decided against a checkpoint after action `k`, or one was abandoned; `why` has the numbers."""

    k: int
    why: str


class PolicyChanged(Record, frozen=True, kw_only=True):
    """From here on, with action `k` completed, the checkpoint policy `policy` decides, and not `was` any more."""

    k: int
    policy: str
    was: str


class EnvRestored(Record, frozen=True, kw_only=True):
    """Generation `g` exists and has the first `k` actions applied. `checkpoint` is empty for a fresh environment."""

    k: int
    g: int
    checkpoint: str
    replayed: int
    reason: str


class ContextTruncated(Record, frozen=True, kw_only=True):
    """Everything from call `call` on is void: the environment could not reproduce action `k`.

    The void tokens stay in the journal and never reach a trainer.
    """

    call: int
    k: int
    position: int
    reason: str


class RolloutFinished(Record, frozen=True, kw_only=True):
    """The user's function returned."""

    reward: float


class RolloutFailed(Record, frozen=True, kw_only=True):
    """This attempt ended without a trajectory. `error` is the error's type, `agent`: the user's function raised it."""

    error: str
    reason: str
    agent: bool = False


class GroupFailed(Record, frozen=True, kw_only=True):
    """`group` is short of this rollout, whose last attempt failed, and no further draw is made in this session.

    A later attempt, or a replacement, opens the group again. `first`: the failure that started it.
    """

    group: str
    reason: str
    first: str


class Acknowledged(Record, frozen=True, kw_only=True):
    """The trainer has used the trajectory and saved what came of it."""


AnyRecord = (
    RolloutStarted
    | TokensAppended
    | TurnVoided
    | ActionIntended
    | ActionCompleted
    | ValueDrawn
    | CheckpointPublished
    | CheckpointSkipped
    | PolicyChanged
    | EnvRestored
    | ContextTruncated
    | RolloutFinished
    | RolloutFailed
    | GroupFailed
    | Acknowledged
)


class Gone(msgspec.Struct, frozen=True):
    """Stands in an `ActionCompleted` for a result that retention took away.

    `size`: bytes of the result as it was encoded; `archived`: it is in the archive beside the segment.
    """

    size: int
    archived: bool


def gone_result(gone: Gone) -> dict[str, Any]:
    """`gone` as the `result` of an `ActionCompleted`."""
    return {"gone": msgspec.to_builtins(gone)}


def result_gone(result: Any) -> Gone | None:
    """What retention left of this `result`, or None: it is all there."""
    if isinstance(result, dict) and set(result) == {"gone"}:
        return msgspec.convert(result["gone"], Gone)
    return None
