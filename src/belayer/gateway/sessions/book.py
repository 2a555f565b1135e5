"""All sessions of a run directory, and how a request finds its turn."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from belayer.engine import GenerationRequest, Sampling
from belayer.errors import BelayerError
from belayer.events import EventSink
from belayer.gateway.dialects._fields import finite
from belayer.gateway.generation import Generation, Runner
from belayer.gateway.problems import Problem, bad
from belayer.gateway.sessions.session import Branch, Session, Turn, ended
from belayer.gateway.upstream import Upstream
from belayer.journal import Call, Journal
from belayer.seeds import derive_seed
from belayer.trajectory import columns

MOST_TASK_BYTES = 1 << 20
_MOST_GROUP, _MOST_REASON = 1024, 1 << 16  # characters
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")


class Sessions:
    """Sessions are made by their first request. What the journal holds of them is loaded at the start."""

    def __init__(self, journal: Journal, upstream: Upstream, runner: Runner, seed: int, sink: EventSink) -> None:
        self._journal = journal
        self._upstream = upstream
        self._runner = runner
        self._seed = seed
        self._sink = sink
        self._sessions: dict[str, Session] = {}
        self.retries = 0
        for rollout, history in list(journal.histories.items()):
            if history.started is not None:
                id = rollout.partition("~")[0]
                self._sessions.setdefault(id, Session(id, journal, sink)).load(history)
        for session in self._sessions.values():
            session.loaded()
            if session.state == "deleted":
                session.forget()

    def announce(self) -> None:
        """Tell the sink of every rollout that goes on, once somebody listens."""
        for session in self._sessions.values():
            session.announce()

    def __len__(self) -> int:
        return len(self._sessions)

    def all(self) -> list[Session]:
        return list(self._sessions.values())

    def get(self, id: str) -> Session:
        """Raises `Problem` (404) for one that nobody has used."""
        if (session := self._sessions.get(id)) is None:
            raise Problem(404, f"there is no session {id!r}", code="no_such_session")
        return session

    def create(self, id: str, group: str = "", task: Any = None, seed: int | None = None) -> tuple[Session, bool]:
        """The session `id`, and whether it is new. Raises `Problem` for an id that is none, or is another session."""
        _check(id, group, task)
        if (session := self._sessions.get(id)) is not None:
            session.need_kept()
            started = session.started
            for name, mine, theirs in (("group", group, started.group), ("task", task, started.task)):
                if mine and msgspec.json.encode(mine) != msgspec.json.encode(theirs):
                    raise Problem(409, f"session {id} exists with another {name}", param=name, code="session_exists")
            if seed is not None and seed != started.seed:
                raise Problem(409, f"session {id} exists with another seed", param="seed", code="session_exists")
            return session, False
        session = Session(id, self._journal, self._sink)
        session.add_branch(group or id, task, derive_seed(self._seed, id) if seed is None else seed)
        self._sessions[id] = session
        return session, True

    def turn(
        self,
        id: str,
        prompt_ids: list[int],
        sampling: Sampling,
        *,
        seeded: bool,
        key: str = "",
        strict: bool = False,
        retry: bool = False,
        admit: Callable[[], None] = lambda: None,
    ) -> tuple[Turn, Generation]:
        """The turn of session `id` that answers this request, and its completion, which is under way or complete.

        A repeated request is answered by the turn that it repeats: from the journal as far as that goes, from the
        engine after that. `admit` is called before the engine gets work, and may raise. Raises `Problem`,
        `BelayerError`; a request that is refused leaves no trace, and no session that was not there.
        """
        _check(id)
        session = self._sessions.get(id)
        turn = None
        if session is not None:
            session.need_open()
            turn = session.known(prompt_ids, sampling, seeded, key, strict, retry)
        repeated = turn is not None
        if turn is None:
            try:
                admit()
                self._upstream.check(GenerationRequest(id="", prompt_ids=prompt_ids, sampling=sampling))
            except (Problem, BelayerError):
                if session is not None:
                    session.turned_away(prompt_ids, sampling, seeded)
                raise
            session, _ = self.create(id)
            turn = session.begin(prompt_ids, sampling, seeded, key)
        else:
            self.retries += 1
        assert session is not None
        turn.answered = False
        generation = session.generation(turn, whole=self._upstream.version_policy == "restart_turn")
        if not generation.done and not self._runner.is_running(generation):
            if repeated:
                admit()
            self._runner.start(generation)
        return turn, generation

    async def finish(self, session: Session, reward: Any) -> None:
        """Journal the reward; a second time with the same one changes nothing."""
        if finite(reward) is None:
            raise bad("reward must be a finite number", "reward")
        if session.state == "finished":
            given = next(branch.history.reward for branch in session.branches if branch.history.finished)
            if given != float(reward):
                raise Problem(409, f"session {session.id} was finished with reward {given}", code="session_over")
            return
        session.need_open()
        if not any(turn.finish for turn in session.turns):
            raise Problem(
                409,
                f"session {session.id} has no complete turn: a reward would be about nothing; "
                'send {"failed": "why"} instead, or delete it',
                code="nothing_to_finish",
            )
        await self._end(session, "finished", lambda: session.finish(float(reward)))

    async def fail(self, session: Session, reason: Any) -> None:
        """Journal that the rollout failed: it will have no reward."""
        if not isinstance(reason, str) or not reason:
            raise bad("failed must say why", "failed")
        if len(reason) > _MOST_REASON:
            raise bad(f"failed must have no more than {_MOST_REASON} characters", "failed")
        if session.state == "failed":
            return
        session.need_open()
        await self._end(session, "failed", lambda: session.fail("ReportedByClient", reason))

    async def rest(self, id: str) -> bool:
        """Its client makes no more requests: new weights need not wait for it. Returns whether it is known."""
        session = self._sessions.get(id)
        if session is not None:
            await self._upstream.end_trajectory(session.trajectory)
        return session is not None

    async def delete(self, session: Session) -> None:
        """End it for good; of a finished one this says that its trajectory was used."""
        if session.state == "deleted":
            return
        await self._end(session, "deleted", session.delete)

    async def _end(self, session: Session, state: str, record: Callable[[], None]) -> None:
        """Tell whoever waits for a completion of it that it is over, stop what is under way, then journal the end."""
        over = session.ending = ended(session.id, state)
        try:
            stopping = [turn.generation for turn in session.turns if turn.generation is not None]
            for generation in stopping:
                generation.fail(over)
            for generation in stopping:
                await self._runner.cancel(generation)
            if state != "deleted":
                session.need_open_state()  # another client may have ended it meanwhile
            record()
        finally:
            session.ending = None
        await self._upstream.end_trajectory(session.trajectory)


def _check(id: str, group: str = "", task: Any = None) -> None:
    """Raises `Problem` for what a session cannot be made of: all of it must fit into the journal."""
    if not _ID.fullmatch(id):
        raise bad("a session id has up to 128 letters, digits and . _ : @ -", "session_id")
    if len(group) > _MOST_GROUP:
        raise bad(f"group must have no more than {_MOST_GROUP} characters", "group")
    if task is None:
        return
    try:
        size = len(msgspec.msgpack.encode(task))
    except (OverflowError, RecursionError, ValueError) as error:
        raise bad(f"task cannot be journalled: {error}", "task") from None
    if size > MOST_TASK_BYTES:
        raise bad(f"task must have no more than {MOST_TASK_BYTES} bytes; keep large things elsewhere", "task")


def describe(session: Session, *, tokens: bool = True) -> dict[str, Any]:
    """A session as `GET /sessions/{id}` shows it."""
    state = session.state
    about = {
        "id": session.id,
        "state": state,
        "group": session.started.group,
        "task": session.started.task,
        "turns": len(session.turns),
        "reward": next((b.history.reward for b in session.branches if b.history.finished), None),
    }
    if tokens:
        about["trajectories"] = [] if state == "deleted" else [_trajectory(branch) for branch in session.branches]
    return about


def _trajectory(branch: Branch) -> dict[str, Any]:
    """The complete turns of a branch in the form of `belayer.Trajectory`, and each turn by itself."""
    calls: list[Call] = []
    prompt_tokens = 0
    turns: list[dict[str, Any]] = []
    failed = branch.history.failed
    for turn in branch.turns:
        call = turn.call
        made = call is not None and bool(call.finish)
        calls.append(branch.history.calls[turn.number - 1])
        prompt_tokens += len(calls[-1].ids)
        about: dict[str, Any] = {"request": turn.intent.turn, "key": turn.intent.key, "answered": turn.answered}
        about |= {"prompt_tokens": prompt_tokens, "finish_reason": turn.finish or None}
        about["completion_tokens"] = len(call.ids) if call is not None else 0
        turns.append(about)
        if made:
            assert call is not None
            calls.append(call)
            prompt_tokens += len(call.ids)
    return {
        "rollout_id": branch.history.rollout,
        "attempt": branch.history.attempt,
        "failed": None if failed is None else f"{failed.error}: {failed.reason}",
        **columns(calls)._asdict(),
        "turns": turns,
    }
