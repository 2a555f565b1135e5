"""What user code touches: `Rollout`, its `sandbox`, and the `Turn` of the model.

A rollout function is an async function of one `Rollout`. Every call it makes is answered from the journal if the
journal already has the answer, and otherwise performed, journalled, and then returned. So the function can be run
again from its start at any time: after a crash of the driver, or after the context was truncated.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from belayer import events
from belayer._awaited import LastCall, noticed
from belayer.engine import Engine, GenerationRequest, Sampling, TokenChunk, TokenSink
from belayer.errors import BelayerError, RequestRefused, TurnRestarted
from belayer.faults import failpoints
from belayer.journal import Call, Journal
from belayer.journal.records import TokensAppended, TurnVoided, ValueDrawn
from belayer.recovery import EnvironmentKeeper, RestartFunction
from belayer.recovery.actions import Action, Exec, Exists, Failed, Read, Shell, Write, asked, from_journal, host_file
from belayer.recovery.divergence import diverged
from belayer.sandbox import ExecResult
from belayer.seeds import derive_seed


class Tokenizer(Protocol):
    """The part of a tokenizer that Belayer needs, to let user code speak text instead of token ids."""

    def encode(self, text: str) -> Any: ...

    def decode(self, ids: list[int]) -> str: ...


class Turn(msgspec.Struct, frozen=True):
    """One turn of the model. `text` is empty if the run has no tokenizer; `finish_reason` is "stop" or "length"."""

    token_ids: list[int]
    logprobs: list[float]
    weights_versions: list[int]
    finish_reason: str
    text: str = ""


class RolloutSandbox:
    """The rollout's environment. Every call is journalled; a failure below is repaired before the call returns."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout

    @noticed("sandbox.")
    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        stdin: bytes | str = b"",
    ) -> ExecResult:
        """Run one command in a fresh process. A non-zero exit or a timeout is a result, not an error."""
        stdin = stdin.encode() if isinstance(stdin, str) else stdin
        form = command if isinstance(command, str) else list(command)
        return await self._rollout._act(Exec(command=form, timeout_s=timeout_s, cwd=cwd, env=env, stdin=stdin))

    @noticed("sandbox.")
    async def shell(self, command: str, *, timeout_s: float | None = None) -> ExecResult:
        """Run one command in the persistent shell: its directory, variables, functions and jobs stay."""
        return await self._rollout._act(Shell(command=command, timeout_s=timeout_s))

    @noticed("sandbox.")
    async def read(self, path: str) -> bytes:
        """Content of a file. Raises `FileNotFoundError` and its like where the agent's environment has none."""
        return await self._rollout._file_call(Read(path=path))

    @noticed("sandbox.")
    async def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """Write a file, whole. Raises `OSError` where the agent's environment does not let it be written."""
        await self._rollout._file_call(
            Write(path=path, data=data.encode() if isinstance(data, str) else data, mode=mode)
        )

    @noticed("sandbox.")
    async def exists(self, path: str) -> bool:
        return await self._rollout._file_call(Exists(path=path))

    @noticed("sandbox.")
    async def upload(self, host_path: str, path: str) -> None:
        """Copy one file of the host into the sandbox. Its content goes to the journal, to be replayed."""
        await self.write(path, host_file(host_path))


class Rollout:
    """One conversation between the model and one environment.

    `task` is what the caller asked for, `seed` is the rollout's own, `random` is seeded with it. Calls are made one
    after another; two at once raise `RequestRefused`, because a replay could not tell their order.
    """

    def __init__(
        self,
        rollout_id: str,
        *,
        journal: Journal,
        engine: Engine,
        environment: EnvironmentKeeper,
        tokenizer: Tokenizer | None,
        sink: events.EventSink,
    ) -> None:
        history = journal.history(rollout_id)
        assert history.started is not None
        self.id = rollout_id
        self.last_call = LastCall(rollout_id)
        self.group = history.started.group
        self.attempt = history.attempt
        self.task: Any = history.started.task
        self.seed = history.started.seed
        self.random = random.Random(self.seed)
        self.sandbox = RolloutSandbox(self)
        self.tokenizer = tokenizer
        self._history = history
        self._journal = journal
        self._engine = engine
        self._environment = environment
        self._sink = sink
        self._next = 0
        self._turns = 0
        self._busy = ""
        self._busy_since = time.monotonic()
        self.broken: BaseException | None = None  # an infrastructure error that the user's function has seen

    # -- calls of the user's function -------------------------------------------------------------

    @noticed()
    async def observe(self, tokens: Sequence[int] | str) -> list[int]:
        """Append a prompt or an observation to the context: token ids, or text if the run has a tokenizer."""
        ids = self._encode(tokens) if isinstance(tokens, str) else [int(token) for token in tokens]
        with self._one_call("observe"):
            text = f"observe {hashlib.blake2b(repr(ids).encode(), digest_size=8).hexdigest()} ({len(ids)} tokens)"
            known = self._answered("observe", text, ids)
            if known is None:
                self._record(TokensAppended, source="observation", ids=ids, asked=text)
                self._next += 1
            return ids

    @noticed()
    async def generate(
        self,
        *,
        max_tokens: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        min_tokens: int = 0,
        stop_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
    ) -> Turn:
        """Let the model continue the context by at most `max_tokens` tokens (`belayer.engine.Sampling` explains all).

        Survives the death of engine workers: every token is journalled before it is seen, and a turn that was cut off
        continues at the next position with the same random numbers. Raises `RequestRefused` for what cannot be served
        exactly and `EngineUnavailable` when no worker can be had.
        """
        with self._one_call("generate"):
            sampling = Sampling(
                max_tokens=max_tokens,
                seed=derive_seed(self.seed, f"turn {self._turns}"),
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                min_tokens=min_tokens,
                stop_token_ids=tuple(stop_token_ids),
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
            )
            text = f"generate {msgspec.json.encode(sampling).decode()}"
            call = self._answered("generate", text)
            if call is None or not call.finish:
                call = await self._generate(text, sampling)
            self._turns += 1
            return self._turn(call)

    def now(self) -> float:
        """Wall-clock seconds since the epoch; a re-run function gets the same answer again."""
        with self._one_call("now"):
            call = self._answered("value", "now")
            if call is None:
                self._record(ValueDrawn, what="now", value=time.time())
                call = self._history.calls[self._next]
                self._next += 1
            return call.value

    async def _file_call(self, action: Action) -> Any:
        result = await self._act(action)
        if isinstance(result, Failed):
            # made from the number, it is FileNotFoundError, IsADirectoryError, …
            raise OSError(result.errno, f"{os.strerror(result.errno)} (in the sandbox)", result.path)
        return result

    async def _act(self, action: Action) -> Any:
        with self._one_call("sandbox"):
            call = self._answered("action", asked(action))
            if call is not None and call.done:
                return from_journal(call.result)
            result = await self._environment.act(self._next, action)
            self._next += 1
            return result

    def check_over(self) -> None:
        """The function has returned. Raises `ReplayDivergence` if the journal has calls that it did not make, and
        `RequestRefused` if its last call was never awaited."""
        self.last_call.check("the function returned")
        if self._next < len(self._history.calls):
            raise diverged(self.id, self._next, self._history.calls, "end", "the function returned")

    def standing(self) -> str:
        """Where it is, in a few words, for whoever wonders why nothing happens."""
        doing = f"in {self._busy}" if self._busy else "in its own function"
        for_s = time.monotonic() - self._busy_since
        return (
            f"{self.id}, attempt {self.attempt}: {doing} for {for_s:.0f} s, after {self._next} calls and "
            f"{self._turns} turns; its environment is {self._environment.state.value}"
        )

    # -- how a call is answered -------------------------------------------------------------------

    def _answered(self, kind: str, text: str, ids: Sequence[int] = ()) -> Call | None:
        """The journal's answer to the next call, if it has one; checks that it is the same call."""
        if self._next >= len(self._history.calls):
            return None
        call = self._history.calls[self._next]
        if (call.kind, call.asked) != (kind, text):
            raise diverged(self.id, self._next, self._history.calls, kind, text, ids)
        if kind in ("observe", "value") or call.finish or call.done:
            self._next += 1
        return call

    async def _generate(self, text: str, sampling: Sampling) -> Call:
        number = self._next
        started, begun = time.time(), time.perf_counter()
        failpoints.hit("turn.begin", self.id)
        self._environment.bubble_begins()
        made = 0
        self._void_if_newer(number)
        while True:
            resume = self._resumable(number)
            try:
                await self._engine.generate(self._request(number, sampling, resume), self._journal_first(number, text))
                break
            except TurnRestarted as restarted:
                made += len(self._resumable(number)) - len(resume)
                self._void(number, restarted.what)
        failpoints.hit("turn.end", self.id)
        wall_s = time.perf_counter() - begun
        call = self._history.calls[number]
        self._next = number + 1
        made += len(call.ids) - len(resume)
        self._environment.bubble_ends(wall_s, made)
        self._emit(events.GENERATE, turn=self._turns, tokens=made, start=started, wall_s=wall_s)
        return call

    def _resumable(self, number: int) -> list[int]:
        """What the journal holds of the turn `number`."""
        return list(self._history.calls[number].ids) if number < len(self._history.calls) else []

    def _void_if_newer(self, number: int) -> None:
        """A driver may be started again with weights older than those that began the turn: then it begins anew."""
        if not self._resumable(number):
            return
        begun, serving = max(self._history.calls[number].versions), self._engine.policy_version
        if begun > serving >= 0:  # below 0: an update is under way, and will not go back
            self._void(number, f"it was begun by policy version {begun}, and {serving} serves now")

    def _void(self, number: int, reason: str) -> None:
        if number < len(self._history.calls):  # otherwise it had no token yet
            self._journal.record(TurnVoided(rollout=self.id, attempt=self.attempt, call=number, reason=reason))

    def _request(self, number: int, sampling: Sampling, resume: list[int]) -> GenerationRequest:
        prompt = self._history.context(number)
        if not prompt:
            raise RequestRefused(
                "generate before any observe: the context is empty", next_step="observe a prompt first"
            )
        return GenerationRequest(
            id=f"{self.id}.{self.attempt}.{number}.{self._history.truncations}",
            prompt_ids=prompt,
            sampling=sampling,
            resume_ids=resume,
            resume_version=self._history.calls[number].versions[0] if resume else None,
            trajectory=f"{self.id}.{self.attempt}",
        )

    def _journal_first(self, number: int, text: str) -> TokenSink:
        def journal(chunk: TokenChunk) -> None:
            failpoints.hit("turn.tokens", self.id)
            self._journal.record(
                TokensAppended(
                    rollout=self.id,
                    attempt=self.attempt,
                    call=number,
                    source="model",
                    ids=chunk.token_ids,
                    logprobs=chunk.logprobs,
                    weights_version=chunk.weights_version,
                    asked=text,
                    finish=chunk.finish_reason or "",
                )
            )
            failpoints.hit("turn.journalled", self.id)

        return journal

    def _turn(self, call: Call) -> Turn:
        text = self.tokenizer.decode(call.ids) if self.tokenizer else ""
        return Turn(list(call.ids), list(call.logprobs), list(call.versions), call.finish, text)

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise RequestRefused("text needs a tokenizer", next_step="pass tokenizer= to Run.open, or pass token ids")
        encoded = self.tokenizer.encode(text)
        return list(getattr(encoded, "ids", encoded))

    def _record(self, kind: Callable[..., Any], **fields: Any) -> None:
        self._journal.record(kind(rollout=self.id, attempt=self.attempt, call=self._next, **fields))

    def _emit(self, kind: str, **data: Any) -> None:
        self._sink(events.Event(kind=kind, subject=self.id, data=data))

    def _one_call(self, what: str) -> _OneCall:
        return _OneCall(self, what)


class _OneCall:
    """Refuses a call while another one of the same rollout is under way."""

    def __init__(self, rollout: Rollout, what: str) -> None:
        self._rollout, self._what = rollout, what

    def __enter__(self) -> None:
        if self._rollout.broken is not None:
            raise self._rollout.broken
        if self._rollout._busy:
            raise RequestRefused(
                f"rollout {self._rollout.id}: {self._what} was called while {self._rollout._busy} is under way",
                next_step="await one call before the next; a replay needs their order",
            )
        self._rollout._busy, self._rollout._busy_since = self._what, time.monotonic()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._rollout._busy, self._rollout._busy_since = "", time.monotonic()
        # a function that catches everything must not turn an infrastructure failure into a reward
        fatal = isinstance(error, BelayerError) and not isinstance(error, RequestRefused)
        if fatal or isinstance(error, RestartFunction):
            self._rollout.broken = self._rollout.broken or error
