"""What a rollout's records add up to: the calls that its function has made and that still count.

A `History` is the fold of one rollout's records in journal order, kept up to date as new records are appended. It
answers a re-run function from the journal, and is what a trajectory is made of. Truncated calls are gone from it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from belayer.errors import JournalCorrupt
from belayer.journal.records import (
    DRIVER_RESTARTED,
    Acknowledged,
    ActionCompleted,
    ActionIntended,
    AnyRecord,
    CheckpointPublished,
    CheckpointSkipped,
    ContextTruncated,
    EnvRestored,
    GroupFailed,
    PolicyChanged,
    RolloutFailed,
    RolloutFinished,
    RolloutStarted,
    TokensAppended,
    TurnVoided,
    ValueDrawn,
)


class Call(msgspec.Struct):
    """One call of the user's function. `asked` is its canonical text, compared when the function is run again."""

    kind: str  # "observe" | "generate" | "action" | "value"
    asked: str
    # observe, generate
    ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[float] = msgspec.field(default_factory=list)
    versions: list[int] = msgspec.field(default_factory=list)
    finish: str = ""
    # action
    k: int = 0
    observed: str = ""
    result: Any = None
    damage: str = ""
    done: bool = False
    # value
    value: Any = None


class Checkpoint(msgspec.Struct, frozen=True):
    k: int
    id: str
    level: str
    context_hash: str


class History:
    """The state of one rollout (its newest attempt) according to the journal."""

    def __init__(self, rollout: str) -> None:
        self.rollout = rollout
        self.attempts = 0
        self.failures: list[tuple[int, str, str]] = []
        self.agent_failures = 0  # of them: those that the user's function brought about
        self.acknowledged = False
        self._reset()

    def _reset(self) -> None:
        self.attempt = 0
        self.started: RolloutStarted | None = None
        self.calls: list[Call] = []
        self.checkpoints: list[Checkpoint] = []
        self.generation = 0
        self.restores = 0
        self.truncations = 0
        self.reward: float | None = None
        self.failed: RolloutFailed | None = None
        self.group_failed: GroupFailed | None = None  # until this rollout, or who replaces it, begins again

    # -- fold -------------------------------------------------------------------------------------

    def apply(self, record: AnyRecord) -> None:
        """Add the next record. Raises `JournalCorrupt` where it cannot follow what came before."""
        if isinstance(record, RolloutStarted):
            self._reset()
            self.attempts += 1
            self.attempt = record.attempt
            self.started = record
            return
        if self.started is None or record.attempt != self.attempt:
            raise JournalCorrupt(f"rollout {self.rollout}: a record of attempt {record.attempt} without its start")
        match record:
            case TokensAppended():
                self._tokens(record)
            case TurnVoided():
                self._void(record)
            case ActionIntended():
                call = self._call(record.call, "action", record.asked)
                if call.asked != record.asked:
                    raise JournalCorrupt(f"rollout {self.rollout}: action {record.k} was asked for in two ways")
                call.k, call.done = record.k, False
                self.generation = max(self.generation, record.g)
            case ActionCompleted():
                call = self._call(record.call, "action", "")
                if call.done or call.k != record.k:
                    raise JournalCorrupt(f"rollout {self.rollout}: action {record.k} completed out of order")
                call.observed, call.result, call.damage = record.observed, record.result, record.damage
                call.done = True
            case ValueDrawn():
                self._call(record.call, "value", record.what).value = record.value
            case CheckpointPublished():
                self.checkpoints.append(Checkpoint(record.k, record.id, record.level, record.context_hash))
            case CheckpointSkipped() | PolicyChanged():
                pass
            case EnvRestored():
                self.generation = record.g
                self.restores += record.reason != DRIVER_RESTARTED
            case ContextTruncated():
                del self.calls[record.call :]
                self.checkpoints = [c for c in self.checkpoints if c.k < record.k]
                self.truncations += 1
            case RolloutFinished():
                self.reward = record.reward
            case RolloutFailed():
                self.failed = record
                self.failures.append((record.attempt, record.error, record.reason))
                self.agent_failures += record.agent
            case GroupFailed():
                if self.failed is None:
                    raise JournalCorrupt(f"rollout {self.rollout}: its group failed, and it has not")
                self.group_failed = record
            case Acknowledged():
                self.acknowledged = True

    def _call(self, number: int, kind: str, asked: str) -> Call:
        if number == len(self.calls):
            self.calls.append(Call(kind, asked))
        elif number != len(self.calls) - 1 or self.calls[number].kind != kind:
            raise JournalCorrupt(f"rollout {self.rollout}: a record for call {number} after {len(self.calls)} calls")
        return self.calls[number]

    def _tokens(self, record: TokensAppended) -> None:
        call = self._call(record.call, "generate" if record.source == "model" else "observe", record.asked)
        call.ids.extend(record.ids)
        if record.source == "model":
            call.logprobs.extend(record.logprobs)
            call.versions.extend([record.weights_version] * len(record.ids))
            call.finish = record.finish

    def _void(self, record: TurnVoided) -> None:
        last = self.calls[-1] if self.calls else None
        if record.call != len(self.calls) - 1 or last is None or last.kind != "generate" or last.finish:
            raise JournalCorrupt(f"rollout {self.rollout}: call {record.call} is no unfinished turn and was voided")
        self.calls.pop()

    def forget_results(self) -> None:
        """Let go of what actions returned: retention keeps it no longer than until the acknowledgement."""
        for call in self.calls:
            call.result = None

    # -- questions --------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Finished with a reward, or failed for this attempt."""
        return self.reward is not None or self.failed is not None

    @property
    def image(self) -> str | None:
        """The image of its sandbox; None: the one of the configuration."""
        return (self.started.image if self.started else "") or None

    @property
    def finished(self) -> bool:
        return self.reward is not None

    def actions(self) -> list[Call]:
        """The completed actions, in order: `actions()[k - 1]` is action k."""
        return [call for call in self.calls if call.kind == "action" and call.done]

    def context(self, calls: int | None = None) -> list[int]:
        """The token ids of the first `calls` calls (all, if None)."""
        return [token for call in self.calls[:calls] for token in call.ids]

    def calls_through_action(self, k: int) -> int:
        """How many calls it takes until action `k` is completed, it included (0 for k = 0)."""
        if k == 0:
            return 0
        for number, call in enumerate(self.calls):
            if call.kind == "action" and call.k == k and call.done:
                return number + 1
        raise JournalCorrupt(f"rollout {self.rollout}: no completed action {k}")

    def context_hash(self, k: int) -> str:
        """Identifies the context at action `k`: every token id up to it and every observation it returned.

        A checkpoint carries it, so that one of a truncated branch is never mistaken for one of the branch that counts.
        """
        digest = hashlib.blake2b(digest_size=16)
        for call in self.calls[: self.calls_through_action(k)]:
            digest.update(f"{call.kind}:{call.asked}:{call.observed}:{call.ids}\n".encode())
        return digest.hexdigest()
