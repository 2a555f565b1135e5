"""One session: the requests of one rollout, in branches that are each one linear context.

A request whose prompt goes on from an earlier one's context joins its branch; another prompt (a rewritten history, a
sub-agent, a second sample) begins a new one. Every branch is a rollout of the journal: the first has the session's id,
the others are called ID~1, ID~2, …
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from belayer import events as ev
from belayer.engine import Sampling, TokenChunk
from belayer.gateway.generation import Generation
from belayer.gateway.problems import Problem
from belayer.gateway.sessions.intent import Intent, fingerprint, read, write
from belayer.journal import Call, History, Journal
from belayer.journal import records as r
from belayer.seeds import derive_seed

DELETED = "SessionDeleted"
GIVEN_UP = "GivenUp"
_TURNED_AWAY = 64  # requests of one session that are remembered as such


def ended(id: str, state: str) -> Problem:
    """What a request for session `id` is told once that is in `state`."""
    if state == "deleted":
        return Problem(410, f"session {id} was deleted; use another id", code="session_deleted")
    return Problem(409, f"session {id} is {state}: it takes no more requests", code="session_over")


class Turn:
    """One request and what came of it. `answered`: the whole answer was handed to a client of this process."""

    def __init__(self, branch: Branch, intent: Intent, number: int) -> None:
        self.branch = branch
        self.intent = intent
        self.number = number  # of the model's call in the branch; the observation is the one before
        self.answered = False
        self.generation: Generation | None = None

    @property
    def call(self) -> Call | None:
        """The model's turn according to the journal, None before its first token."""
        calls = self.branch.history.calls
        return calls[self.number] if self.number < len(calls) else None

    @property
    def finish(self) -> str:
        return self.call.finish if self.call is not None else ""

    @property
    def prompt_ids(self) -> list[int]:
        return self.branch.history.context(self.number)

    def handed_over(self) -> None:
        """A client has the whole answer: the journal's copy of it is enough from now on."""
        self.answered = True
        if self.generation is not None and self.generation.done:
            self.generation = None


class Branch:
    """One linear context of a session: a rollout of the journal whose calls alternate observe, generate."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.turns: list[Turn] = []
        self.since = time.time()  # when this process first had it

    @property
    def idle(self) -> bool:
        """Whether it can be gone on from: no turn of it is open."""
        return not self.turns or bool(self.turns[-1].finish)

    @property
    def length(self) -> int:
        return sum(len(call.ids) for call in self.history.calls)


class Session:
    """See the module. All of it is in the journal; only who has been answered is not."""

    def __init__(self, id: str, journal: Journal, sink: ev.EventSink = ev.ignore) -> None:
        self.id = id
        self.branches: list[Branch] = []
        self.turns: list[Turn] = []
        self._journal = journal
        self._sink = sink
        self.ending: Problem | None = None
        """What requests are told while it is being ended."""
        self._keys: dict[str, list[Turn]] = {}
        self._turned_away: set[str] = set()

    # -- from the journal ----------------------------------------------------------------------------------------------
    def load(self, history: History) -> None:
        """Take a branch that the journal holds."""
        branch = Branch(history)
        self.branches.append(branch)
        for number, call in enumerate(history.calls):
            if call.kind == "observe":
                self._add(branch, read(history.rollout, call.asked), number + 1)

    def loaded(self) -> None:
        """All branches are there."""
        self.turns.sort(key=lambda turn: turn.intent.turn)

    def announce(self) -> None:
        """Tell the sink of the rollouts that go on."""
        for branch in self.branches:
            if not branch.history.over:
                self._started(branch)

    # -- what it is ----------------------------------------------------------------------------------------------------
    @property
    def started(self) -> r.RolloutStarted:
        started = self.branches[0].history.started
        assert started is not None
        return started

    @property
    def trajectory(self) -> str:
        """The engine's name for it, see `GenerationRequest.trajectory`."""
        return f"{self.id}.0"

    @property
    def state(self) -> str:
        histories = [branch.history for branch in self.branches]
        if any(h.acknowledged or (h.failed is not None and h.failed.error == DELETED) for h in histories):
            return "deleted"
        if all(h.failed is not None for h in histories):
            return "failed"
        return "finished" if any(h.finished for h in histories) else "open"

    def need_open(self) -> None:
        """Raises `Problem` when it takes no more requests."""
        if self.ending is not None:
            raise self.ending
        self.need_open_state()

    def need_open_state(self) -> None:
        if (state := self.state) != "open":
            raise ended(self.id, state)

    def need_kept(self) -> None:
        """Raises `Problem` when it was deleted."""
        if (state := self.state) == "deleted":
            raise ended(self.id, state)

    # -- requests ------------------------------------------------------------------------------------------------------
    def known(
        self, prompt_ids: list[int], sampling: Sampling, seeded: bool, key: str, strict: bool, retry: bool
    ) -> Turn | None:
        """The earlier request that this one repeats, or None: then it is new.

        `key` is the client's name for the request; with `strict` it must not be used for two different ones. `retry`:
        the client says that it asks again.
        """
        mark = fingerprint(prompt_ids, sampling, seeded)
        named = [turn for turn in self._keys.get(key, ()) if turn.finish != "abort"]
        for turn in named:
            if turn.intent.fingerprint == mark:
                return turn
        if named and strict:
            raise Problem(
                422,
                f"the idempotency key {key!r} was used for another request",
                param="Idempotency-Key",
                code="idempotency_key_reused",
            )
        if key and strict:
            return None  # a key of its own: the client says that it is another request
        newest = [branch.turns[-1] for branch in self.branches if branch.turns]
        for last in sorted(newest, key=lambda turn: turn.intent.turn, reverse=True):
            if last.intent.fingerprint != mark or last.finish == "abort":
                continue
            # asked again after it was turned away, it repeats nothing that was answered
            if seeded or (retry and mark not in self._turned_away) or not last.answered:
                return last
        return None

    def turned_away(self, prompt_ids: list[int], sampling: Sampling, seeded: bool) -> None:
        """A new request was refused before it was journalled; its client may well come back with it."""
        if len(self._turned_away) >= _TURNED_AWAY:
            self._turned_away.clear()
        self._turned_away.add(fingerprint(prompt_ids, sampling, seeded))

    def begin(self, prompt_ids: list[int], sampling: Sampling, seeded: bool, key: str) -> Turn:
        """Journal a new request. Where the client chose no seed, the session's own decides."""
        number = len(self.turns)
        if not seeded:
            seed = derive_seed(self.started.seed, f"turn {number}")
            sampling = msgspec.structs.replace(sampling, seed=seed)
        mark = fingerprint(prompt_ids, sampling, seeded)
        self._turned_away.discard(mark)
        intent = Intent(turn=number, fingerprint=mark, sampling=sampling, seeded=seeded, key=key)
        branch = self._branch(prompt_ids)
        call = len(branch.history.calls)
        self._record(
            branch,
            r.TokensAppended,
            call=call,
            source="observation",
            ids=prompt_ids[branch.length :],
            asked=write(intent),
        )
        return self._add(branch, intent, call + 1)

    def generation(self, turn: Turn, *, whole: bool) -> Generation:
        """The completion of `turn`, with what the journal holds of it."""
        if turn.generation is not None and turn.generation.error is None:
            return turn.generation
        branch, number, start = turn.branch, turn.number, time.time()
        asked = f"generate {msgspec.json.encode(turn.intent.sampling).decode()}"

        def journal(chunk: TokenChunk) -> None:
            self._record(
                branch,
                r.TokensAppended,
                call=number,
                source="model",
                ids=chunk.token_ids,
                logprobs=chunk.logprobs,
                weights_version=chunk.weights_version,
                asked=asked,
                finish=chunk.finish_reason or "",
            )
            if chunk.finish_reason:
                tokens = chunk.start + len(chunk.token_ids)
                wall_s = time.time() - start
                self._emit(branch, ev.GENERATE, turn=len(branch.turns), tokens=tokens, start=start, wall_s=wall_s)

        def void(reason: str) -> None:
            if turn.call is not None:
                self._record(branch, r.TurnVoided, call=number, reason=reason)

        made = Generation(
            turn.prompt_ids,
            turn.intent.sampling,
            trajectory=self.trajectory,
            journal=journal,
            voided=void,
            whole=whole,
        )
        if (call := turn.call) is not None:
            made.ids, made.logprobs, made.versions = list(call.ids), list(call.logprobs), list(call.versions)
            made.finish = call.finish
        turn.generation = made
        return made

    def _branch(self, prompt_ids: list[int]) -> Branch:
        """The idle branch with the longest context that `prompt_ids` begin with, or a new one."""
        best: Branch | None = None
        for branch in self.branches:
            fits = branch.idle and (best is None or branch.length >= best.length)
            if fits and prompt_ids[: branch.length] == branch.history.context():
                best = branch
        if best is not None and (best.length or not best.turns):
            return best
        first = self.started
        return self.add_branch(first.group, first.task, first.seed)

    def add_branch(self, group: str, task: Any, seed: int) -> Branch:
        """Journal the start of another branch, the session's first if it has none."""
        number = len(self.branches)
        name = self.id if number == 0 else f"{self.id}~{number}"
        self._journal.record(r.RolloutStarted(rollout=name, group=group, task=task, seed=seed))
        branch = Branch(self._journal.history(name))
        self.branches.append(branch)
        self._started(branch)
        return branch

    def _add(self, branch: Branch, intent: Intent, number: int) -> Turn:
        turn = Turn(branch, intent, number)
        branch.turns.append(turn)
        self.turns.append(turn)
        if intent.key:
            self._keys.setdefault(intent.key, []).append(turn)
        return turn

    # -- the end -------------------------------------------------------------------------------------------------------
    def finish(self, reward: float) -> None:
        """Journal the end of every branch. Nothing of it may be running any more."""
        for branch in self.branches:
            self._drop_open_turn(branch)
            if any(turn.finish for turn in branch.turns):
                self._record(branch, r.RolloutFinished, reward=reward)
                tokens = sum(len(turn.call.ids) for turn in branch.turns if turn.call is not None)
                data = {"reward": reward, "turns": len(branch.turns), "tokens": tokens, "attempt": 0}
                self._emit(branch, ev.ROLLOUT_FINISHED, **data, wall_s=time.time() - branch.since)
            else:
                self._failed(branch, GIVEN_UP, "its client gave its only request up")

    def fail(self, error: str, reason: str) -> None:
        for branch in self.branches:
            if not branch.history.over:
                self._drop_open_turn(branch)
                self._failed(branch, error, reason)

    def delete(self) -> None:
        """Journal that its trajectories were used, or, where it was not finished, that nobody will. Frees memory."""
        for branch in self.branches:
            if branch.history.finished and not branch.history.acknowledged:
                self._record(branch, r.Acknowledged)
                self._emit(branch, ev.ROLLOUT_DELIVERED, attempt=0)
        self.fail(DELETED, "its client deleted the session before it was finished")
        self.forget()

    def forget(self) -> None:
        for branch in self.branches:
            branch.history.calls.clear()
            branch.turns.clear()
        self.turns.clear()
        self._keys.clear()

    def _drop_open_turn(self, branch: Branch) -> None:
        last = branch.turns[-1] if branch.turns else None
        if last is not None and last.call is not None and not last.finish:
            self._record(branch, r.TurnVoided, call=last.number, reason="its client gave it up")

    def _failed(self, branch: Branch, error: str, reason: str) -> None:
        self._record(branch, r.RolloutFailed, error=error, reason=reason)
        self._emit(branch, ev.ROLLOUT_FAILED, reason=reason, failure=error)

    def _started(self, branch: Branch) -> None:
        self._emit(branch, ev.ROLLOUT_STARTED, group=self.started.group, attempt=0)

    def _emit(self, branch: Branch, kind: str, **data: Any) -> None:
        self._sink(ev.Event(kind=kind, subject=branch.history.rollout, data=data))

    def _record(self, branch: Branch, kind: Any, **fields: Any) -> None:
        self._journal.record(kind(rollout=branch.history.rollout, attempt=branch.history.attempt, **fields))
