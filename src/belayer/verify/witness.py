"""The second opinion about one attempt of one rollout: walks its records and says which promise each one breaks.

Written against the invariants of prefix consistency (docs/consistency.md), not against `belayer.journal.history`, with
which it shares nothing but the definition of a record. It never raises for a journal that is wrong: every breach
becomes a sentence.

The environment, as the journal describes it, is always in one of these states:

    FRESH       no action has been sent to it
    KNOWN       it has exactly the actions 1 … `applied`
    AMBIGUOUS   an action was sent and no completion is journalled: nobody knows whether it ran
"""

from __future__ import annotations

import enum
import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

from belayer.journal import records as r


class Environment(enum.Enum):
    FRESH = "fresh"
    KNOWN = "known"
    AMBIGUOUS = "ambiguous"


@dataclass
class Step:
    """One call of the rollout's function, put together from its records."""

    kind: str
    asked: str
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    ended: bool = True
    k: int = 0
    observed: str = ""


class Attempt:
    """Walks one attempt. `breaches` are the broken promises, in the order in which they were found."""

    def __init__(self, start: r.RolloutStarted) -> None:
        self.start = start
        self.steps: list[Step] = []
        self.breaches: list[str] = []
        self.environment = Environment.FRESH
        self.applied = 0
        self.generation = 0
        self.pending: r.ActionIntended | None = None
        self.checkpoints: dict[str, r.CheckpointPublished] = {}
        self.void: set[str] = set()  # checkpoints of a branch that does not count any more
        self.must_cut: int | None = None  # the action at which the context must end before anything is done again
        self.finished: r.RolloutFinished | None = None
        self.failed: r.RolloutFailed | None = None
        self.group_failed: r.GroupFailed | None = None
        self.acknowledged = False
        self.restores = self.truncated_tokens = 0

    # -- the walk ----------------------------------------------------------------------------------
    def see(self, record: r.AnyRecord) -> None:
        """Take the next record of this attempt."""
        if isinstance(record, r.Acknowledged):
            self._need(self.finished is not None, "it was acknowledged without having finished")
            self._need(not self.acknowledged, "it was acknowledged twice")
            self.acknowledged = True
            return
        if isinstance(record, r.GroupFailed):
            self._need(self.failed is not None, f"group {record.group} failed for want of it, and it had not failed")
            self._need(record.group == self.start.group, f"it is of group {self.start.group}, not {record.group}")
            self._need(self.group_failed is None, "its group failed twice for the same attempt")
            self._need(bool(record.reason and record.first), "its group failed without a reason")
            self.group_failed = record
            return
        if self.finished is not None or self.failed is not None:
            self._breach(f"a {type(record).__name__} follows after its end")
            return
        match record:
            case r.TokensAppended():
                self._tokens(record)
            case r.TurnVoided():
                self._turn_voided(record)
            case r.ActionIntended():
                self._intended(record)
            case r.ActionCompleted():
                self._completed(record)
            case r.ValueDrawn():
                self._new_step(record.call, "value", record.what)
            case r.CheckpointPublished():
                self._published(record)
            case r.CheckpointSkipped():
                pass
            case r.EnvRestored():
                self._restored(record)
            case r.ContextTruncated():
                self._truncated(record)
            case r.RolloutFinished():
                self._end(record)
            case r.RolloutFailed():
                self._need(bool(record.reason), "it failed without a reason")
                self.failed = record
            case r.RolloutStarted():
                self._breach("it was started twice")

    # -- the model's context -----------------------------------------------------------------------
    def _tokens(self, record: r.TokensAppended) -> None:
        kind = "generate" if record.source == "model" else "observe"
        last = self.steps[-1] if self.steps else None
        goes_on = record.call == len(self.steps) - 1 and last is not None and last.kind == kind == "generate"
        if goes_on:
            assert last is not None
            self._need(not last.ended, f"tokens were added to turn {record.call} after it had ended")
            self._need(last.asked == record.asked, f"turn {record.call} was continued with other sampling")
            step = last
        else:
            step = self._new_step(record.call, kind, record.asked)
        step.ids += record.ids
        self._need(all(token >= 0 for token in record.ids), f"call {record.call} has a negative token id")
        if kind == "observe":
            self._need(not record.logprobs, f"call {record.call} has logprobs for tokens that were not sampled")
            return
        self._need(
            len(record.logprobs) == len(record.ids),
            f"turn {record.call} has {len(record.ids)} tokens and {len(record.logprobs)} logprobs",
        )
        self._need(
            all(math.isfinite(value) and value <= 1e-3 for value in record.logprobs),
            f"turn {record.call} has a logprob that is none",
        )
        self._need(
            not step.versions or record.weights_version >= step.versions[-1],
            f"turn {record.call} went on with older weights ({step.versions[-1:]} then {record.weights_version})",
        )
        step.logprobs += record.logprobs
        step.versions += [record.weights_version] * len(record.ids)
        step.ended = bool(record.finish)

    def _turn_voided(self, record: r.TurnVoided) -> None:
        last = self.steps[-1] if self.steps else None
        open_turn = record.call == len(self.steps) - 1 and last is not None and last.kind == "generate"
        if not open_turn or (last is not None and last.ended):
            self._breach(f"call {record.call} was voided and is no turn under way")
            return
        self.steps.pop()

    def _new_step(self, call: int, kind: str, asked: str) -> Step:
        """A new call of the function; everything before it must be over."""
        self._need(call == len(self.steps), f"call {call} follows after {len(self.steps)} calls")
        if self.steps:
            self._need(self.steps[-1].ended, f"call {call} began before call {len(self.steps) - 1} was over")
        step = Step(kind, asked, ended=kind in ("observe", "value"))
        self.steps.append(step)
        return step

    # -- the environment ---------------------------------------------------------------------------
    def _intended(self, record: r.ActionIntended) -> None:
        done = self.actions()
        self._need(record.k == len(done) + 1, f"action {record.k} was begun after {len(done)} actions")
        self._need(self.must_cut is None, f"action {record.k} was begun on a context that describes another state")
        self._need(
            record.g >= self.generation, f"action {record.k} went to generation {record.g} after {self.generation}"
        )
        if self.environment is Environment.AMBIGUOUS:
            self._breach(f"action {record.k} was sent to an environment in which an action may have run already")
        elif self.environment is Environment.KNOWN:
            self._need(
                self.applied == record.k - 1,
                f"action {record.k} was sent to an environment that has {self.applied} actions",
            )
            self._need(record.g == self.generation, f"action {record.k} went to a generation nobody restored")
        else:
            self._need(record.k == 1, f"action {record.k} was sent to a new environment")
        last = self.steps[-1] if self.steps else None
        if last is not None and last.kind == "action" and not last.ended and record.call == len(self.steps) - 1:
            self._need(last.asked == record.asked, f"action {record.k} was tried again as another action")
            last.k = record.k
        else:
            self._new_step(record.call, "action", record.asked).k = record.k
        self.generation = max(self.generation, record.g)
        self.environment, self.pending = Environment.AMBIGUOUS, record

    def _completed(self, record: r.ActionCompleted) -> None:
        intent = self.pending
        if intent is None or (intent.k, intent.g, intent.call) != (record.k, record.g, record.call):
            self._breach(f"action {record.k} was completed without having been begun")
            return
        step = self.steps[-1]
        step.observed, step.ended = record.observed, True
        self.environment, self.applied, self.pending = Environment.KNOWN, record.k, None

    def _published(self, record: r.CheckpointPublished) -> None:
        if record.id in self.checkpoints:
            self._breach(f"checkpoint {record.id} was published twice")
        self._need(self.pending is None, f"checkpoint {record.id} was published while an action was under way")
        self._need(self.must_cut is None, f"checkpoint {record.id} was published before the context was cut")
        self._need(
            self.environment is not Environment.AMBIGUOUS and record.k == self.applied,
            f"checkpoint {record.id} is of action {record.k}, the environment was at {self.applied}",
        )
        self._need(
            record.g == self.generation or self.environment is Environment.FRESH,
            f"checkpoint {record.id} is of generation {record.g}, not {self.generation}",
        )
        self._need(
            record.context_hash == self.context_hash(record.k),
            f"checkpoint {record.id} does not carry the context of action {record.k}",
        )
        self.checkpoints[record.id] = record

    def _restored(self, record: r.EnvRestored) -> None:
        self._need(record.g > self.generation, f"generation {record.g} was restored after {self.generation}")
        done = len(self.actions())
        self._need(record.k <= done, f"an environment with {record.k} actions was restored, {done} were completed")
        if record.checkpoint:
            found = self.checkpoints.get(record.checkpoint)
            if found is None:
                self._breach(f"the environment was restored from {record.checkpoint}, which was never published")
            else:
                self._need(record.checkpoint not in self.void, f"{record.checkpoint} is of a branch that was cut off")
                self._need(
                    found.k + record.replayed == record.k,
                    f"{record.checkpoint} has {found.k} actions, {record.replayed} were replayed: not {record.k}",
                )
                self._need(
                    found.k > done or found.context_hash == self.context_hash(found.k),
                    f"{record.checkpoint} is not of this context",
                )
        else:
            self._need(record.replayed == record.k, f"{record.replayed} of {record.k} actions were done anew")
        self.generation, self.applied, self.pending = record.g, record.k, None
        self.environment = Environment.KNOWN
        # until the cut the model may go on, for the cut takes that away again; the environment must not
        self.must_cut = record.k + 1 if record.k < done else None
        self.restores += 1

    def _truncated(self, record: r.ContextTruncated) -> None:
        self._need(
            self.environment is Environment.KNOWN and record.k == self.applied + 1,
            f"the context was cut before action {record.k}, the environment has {self.applied}",
        )
        kept, gone = self.steps[: record.call], self.steps[record.call :]
        self._need(bool(gone), f"the context was cut at call {record.call} of {len(self.steps)}")
        actions = [step.k for step in kept if step.kind == "action"]
        self._need(
            actions == list(range(1, record.k)), f"after the cut before action {record.k} the context has {actions}"
        )
        after = max((i + 1 for i, step in enumerate(kept) if step.kind == "action"), default=0)
        self._need(
            all(step.kind in ("observe", "value") for step in kept[after:]),
            f"the context was cut too late: a model turn that asked for action {record.k} is still in it",
        )
        self._need(
            not gone or gone[0].kind in ("generate", "action"), "the context was cut too early: an observation is gone"
        )
        self._need(
            record.position == sum(len(step.ids) for step in kept), f"the cut at {record.position} is somewhere else"
        )
        self.truncated_tokens += sum(len(step.ids) for step in gone)
        self.void |= {found.id for found in self.checkpoints.values() if found.k >= record.k}
        self.steps = kept
        self.must_cut = None

    def _end(self, record: r.RolloutFinished) -> None:
        self._need(self.pending is None, "it finished while an action was under way")
        self._need(all(step.ended for step in self.steps), "it finished in the middle of a call")
        self._need(math.isfinite(record.reward), f"its reward is {record.reward}")
        self.finished = record

    # -- questions ---------------------------------------------------------------------------------
    def actions(self) -> list[Step]:
        """The completed actions that count."""
        return [step for step in self.steps if step.kind == "action" and step.ended]

    def context_hash(self, k: int) -> str:
        """The identity of the context at action `k`, as the format defines it."""
        digest = hashlib.blake2b(digest_size=16)
        if k == 0:
            return digest.hexdigest()
        for step in self.steps:
            digest.update(f"{step.kind}:{step.asked}:{step.observed}:{step.ids}\n".encode())
            if step.kind == "action" and step.k == k:
                return digest.hexdigest()
        return f"no action {k}"

    def delivered(self) -> dict[str, Any]:
        """What a trainer must get of it."""
        ids: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        for step in self.steps:
            length, turn = len(step.ids), step.kind == "generate"
            ids += step.ids
            mask += [int(turn)] * length
            logprobs += step.logprobs if turn else [0.0] * length
            versions += step.versions if turn else [-1] * length
        turns = sum(step.kind == "generate" for step in self.steps)
        return {
            "token_ids": ids,
            "loss_mask": mask,
            "logprobs": logprobs,
            "weights_versions": versions,
            "turns": turns,
        }

    def _need(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self._breach(otherwise)

    def _breach(self, text: str) -> None:
        self.breaches.append(text)
