"""The rollout engine, as the rest of the program sees it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from belayer import events as ev
from belayer.config import EngineConfig, VersionPolicy
from belayer.engine import supervisor as sv
from belayer.engine._fleet import Fleet
from belayer.engine._model_folder import ModelFacts, inspect
from belayer.engine._owner_care import WeightsSource
from belayer.engine._weights_updates import WeightsUpdates
from belayer.engine._wire import Abort, Chunk, Submit, Tokens, pack
from belayer.engine.admission import problem
from belayer.engine.lifecycle import RequestState
from belayer.engine.request import GenerationRequest, TokenChunk, TokenSink, WeightsEpoch
from belayer.engine.requests import Flight, Requests, Verdict
from belayer.engine.stopping import Stopping, StopWatch, already_finished
from belayer.engine.version_gate import VersionGate
from belayer.engine.weights.checkpoint_files import checkpoint_tensors
from belayer.engine.workers.hang import HangDetector
from belayer.engine.workers.link import WorkerLink
from belayer.errors import EngineError, EngineUnavailable, RequestRefused, TurnRestarted, WeightsError
from belayer.ownership import RunLabel

if TYPE_CHECKING:
    import torch

__all__ = ["Engine"]


class Engine:
    """Makes tokens; survives the death of its worker, its shadow and its owner.

    Use `await Engine.start(...)`, then `generate` from as many tasks as you like, and `close` at the end. All calls
    belong to the event loop in which it was started, and that loop to the thread whose end shall end the engine.
    """

    def __init__(self, config: EngineConfig, model: ModelFacts, label: RunLabel, events: ev.EventSink, log_dir: Path):
        """Not for callers: use `start`."""
        self._config = config
        self._model = model
        self._events = events
        self._requests = Requests(time.monotonic)
        self._gate = VersionGate(config.version_policy)
        self._stopping = Stopping(model.path)
        self._closed = False
        self._fleet = Fleet(config, model, label, events, log_dir)
        self._fleet.on_tokens = self._on_tokens
        self._fleet.on_route = self._on_route
        self._fleet.on_fenced = self._requests.take_back
        self._fleet.on_lost = self._on_lost
        self._updates = WeightsUpdates(config, self._fleet, self._gate, self._restart_turns, events)
        self._hangs = HangDetector(config.hang_s, config.prefill_hang_s, self._watched, self._on_hang)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        label: RunLabel,
        *,
        events: ev.EventSink = ev.ignore,
        policy_version: int = 0,
        weights: Iterable[tuple[str, torch.Tensor]] | None = None,
        source: WeightsSource | None = None,
        log_dir: Path | None = None,
    ) -> Engine:
        """Start owner, worker and shadow and return when the worker serves; the shadow arms in the background.

        `weights` replace the checkpoint's values before the first token; `policy_version` is the number they carry.
        `source` is asked for the tensors of the current policy version when those in memory turn out to be damaged;
        without it the engine can only go back to the model folder, as long as that is what it serves.
        Raises `ConfigError` for a model folder or setting that cannot work, before anything is started, and
        `EngineUnavailable`, with the end of the worker's log, when the worker does not come up.
        """
        model = inspect(config)
        engine = cls(config, model, label, events, log_dir or label.dir / "engine")
        fleet = engine._fleet
        if source is not None:
            fleet.owner.source = source
        elif weights is None:
            fleet.owner.source = lambda version: _from_folder(model.path, version, policy_version)
        if weights is not None:
            content = list(weights)

            async def before_serving() -> None:
                await fleet.owner.write(content, policy_version, engine._updates.deadline())

            fleet.before_serving = before_serving
        try:
            await engine._fleet.start(policy_version)
        except BaseException:
            await engine.close()
            raise
        engine._hangs.start()
        return engine

    async def close(self) -> None:
        """End owner, worker and shadow and wait for it. Requests in flight fail. May be called again."""
        if self._closed:
            return
        self._closed = True
        self._hangs.stop()
        self._updates.stop()
        await self._fleet.close()
        self._on_lost(EngineUnavailable("the engine was closed", kept="every journalled token"))

    # -- requests -----------------------------------------------------------------------------------------------------
    async def generate(self, request: GenerationRequest, on_tokens: TokenSink) -> str:
        """Complete one request and return why it ended: "stop" or "length".

        `on_tokens` is called in this process for every chunk, before anything else sees its tokens: journal there. An
        exception it raises ends the request and comes out here. A worker's death is not visible: generation goes on
        with the very next token. Cancelling the call ends the request in the worker.

        Raises `RequestRefused` before any token for a request that cannot be honoured; `TurnRestarted` when new weights
        arrive and the version policy lets no turn span two versions; `EngineUnavailable` when no worker serves.
        """
        self._check(request)
        watch = await self._stopping.watch(request)
        if watch is not None:
            self._check(request)  # time has passed
        if (reason := already_finished(request, watch)) is not None:
            on_tokens(
                TokenChunk(
                    request_id=request.id,
                    start=len(request.resume_ids),
                    token_ids=[],
                    logprobs=[],
                    weights_version=self.policy_version,
                    finish_reason=reason,
                )
            )
            return reason
        trajectory = request.trajectory or request.id
        await self._gate.enter(trajectory)
        try:
            self._check(request)  # much may have happened at the gate
            self._check_resumed_version(request)
            return await self._complete(request, on_tokens, watch)
        finally:
            await self._gate.leave(trajectory, ended=not request.trajectory)

    def _check_resumed_version(self, request: GenerationRequest) -> None:
        version = request.resume_version
        if self._config.version_policy == "allow" or not request.resume_ids or version in (None, self.policy_version):
            return
        raise TurnRestarted(
            f"request {request.id} was begun with policy version {version}; {self.policy_version} serves by now",
            kept="every earlier turn",
            next_step="discard this turn's tokens and generate it again",
        )

    async def _complete(self, request: GenerationRequest, on_tokens: TokenSink, watch: StopWatch | None) -> str:
        flight = self._requests.add(request, on_tokens)
        flight.watch = watch
        outcome = flight.outcome = asyncio.get_running_loop().create_future()
        try:
            if (link := self._fleet.serving) is not None:
                link.send(Submit([self._requests.give(flight, link.generation)]))
            else:
                pack(flight.work())  # what cannot be sent must not wait for the next worker
        except Exception as error:
            self._end(flight, RequestState.FAILED)
            raise RequestRefused(f"request {request.id} cannot be sent to a worker: {error}") from None
        try:
            return await outcome
        except asyncio.CancelledError:
            self._drop(flight, RequestState.CANCELLED)
            raise

    async def end_trajectory(self, name: str) -> None:
        """Say that the trajectory `name` (`GenerationRequest.trajectory`) makes no more requests.

        Under `version_policy = "finish_on_old"` an update of the weights waits for this.
        """
        await self._gate.end(name)

    def check(self, request: GenerationRequest | None = None) -> None:
        """Raise what `generate` would raise for `request` now, before any token; without one, whether it can serve."""
        if self._closed:
            raise EngineUnavailable("the engine is closed")
        if self._fleet.failure is not None:
            raise self._fleet.failure
        if request is not None:
            self._check(request)

    def _check(self, request: GenerationRequest) -> None:
        self.check()
        if self._requests.has(request.id):
            raise RequestRefused(f"request {request.id}: a request with this id is in flight")
        if (reason := problem(request, self._config.max_model_len, self._model.vocab_size)) is not None:
            raise RequestRefused(f"request {request.id}: {reason}")

    def _drop(self, flight: Flight, how: RequestState) -> None:
        """A request ends before its worker is done with it."""
        if flight.generation is not None and (link := self._fleet.serving) is not None:
            link.send(Abort([flight.key]))
        self._end(flight, how)

    def _end(self, flight: Flight, how: RequestState) -> None:
        self._requests.end(flight, how)
        self._check_rebuilt()

    def _check_rebuilt(self) -> None:
        """A request that had to be rebuilt is: it has a token, or nobody waits for one any more."""
        if self._requests.rebuilt and self._fleet.supervisor.serving is not None:
            self._fleet.rebuilt(self._fleet.supervisor.serving)

    def _on_tokens(self, message: Tokens) -> None:
        for made in message.chunks:
            verdict, flight = self._requests.judge(message.generation, message.policy_version, made)
            if flight is None:
                continue  # it was cancelled, and the worker had not heard of it yet
            if verdict is Verdict.BROKEN:
                text = f"worker {message.generation} sent token {made.start} of a request that has {flight.length}"
                self._fleet.news.fault("worker.protocol", "token positions", text, True)
                self._fleet.tell(sv.Refused(message.generation, text))
                return
            self._deliver(flight, made, message.policy_version)

    def _deliver(self, flight: Flight, made: Chunk, policy_version: int) -> None:
        if any(math.isnan(logprob) for logprob in made.logprobs):
            text = f"request {flight.request.id}: the model's logits are not numbers"
            flight.fail(EngineError(text, kept="its tokens so far", next_step="check the weights"))
            self._drop(flight, RequestState.FAILED)
            return
        ends, count = made.finish_reason, len(made.token_ids)
        if flight.watch is not None and (last := flight.watch.feed(made.token_ids)) is not None:
            ends, count = "stop", last + 1
        chunk = TokenChunk(
            request_id=flight.request.id,
            start=made.start,
            token_ids=made.token_ids[:count],
            logprobs=made.logprobs[:count],
            weights_version=policy_version,
            finish_reason=ends,
        )
        try:
            flight.sink(chunk)
        except Exception as error:
            flight.fail(error)
            self._drop(flight, RequestState.FAILED)
            return
        self._fleet.clock.first_token()
        if ends is not None:
            flight.finish(ends)
            (self._end if made.finish_reason is not None else self._drop)(flight, RequestState.FINISHED)
        else:
            self._check_rebuilt()

    def _on_route(self, link: WorkerLink) -> int:
        """Give a new worker every request in flight."""
        work = self._requests.give_all(link.generation)
        if work:
            link.send(Submit(work))
        return len(work)

    def _on_lost(self, error: EngineError) -> None:
        for flight in self._requests:
            flight.fail(error)
            self._requests.end(flight, RequestState.FAILED)

    # -- weights ------------------------------------------------------------------------------------------------------
    async def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> WeightsEpoch:
        """Serve other weights from the next step on, without restarting anything.

        `tensors` carry the names of the model folder; what is not named keeps its value. They are written tensor by
        tensor into the next epoch, which is committed with its digest in one step; then worker and shadow switch. A
        failure before the commit leaves the old epoch serving. What becomes of trajectories that have begun is the
        config's `version_policy`; where requests in flight go on, their KV is rebuilt with the new weights.

        Raises `WeightsError` for an unknown name, a wrong shape, a version that is not newer than the current one, or
        when `update_timeout_s` is over before the commit; `EngineUnavailable` if no worker serves any more.
        """
        if self._closed or self._fleet.failure is not None:
            raise self._fleet.failure or EngineUnavailable("the engine is closed")
        return await self._updates.begin(list(tensors), policy_version)

    def _restart_turns(self, policy_version: int) -> None:
        for flight in self._requests:
            error = TurnRestarted(
                f"{flight.request.id}: policy version {policy_version} came after {len(flight.done_ids)} tokens of it",
                kept="every earlier turn",
                next_step="discard this turn's tokens and generate it again",
            )
            flight.fail(error)
            self._drop(flight, RequestState.RESTARTED)

    # -- watching -----------------------------------------------------------------------------------------------------
    async def wait_standby(self, timeout_s: float) -> None:
        """Wait until a shadow, or its image, could take over at once. Raises `EngineError` after `timeout_s`."""
        if self._config.standby == "none":
            raise EngineError("this engine has no shadow: engine.standby is none")
        fleet = self._fleet
        try:
            await fleet.wait(lambda: fleet.failure is not None or fleet.protected or bool(fleet.no_standby), timeout_s)
        except TimeoutError:
            raise EngineError(f"no shadow is ready after {timeout_s:g} s") from None
        if fleet.failure is not None:
            raise fleet.failure
        if fleet.no_standby:
            raise EngineError(f"no image can stand by: {fleet.no_standby}", next_step="set engine.standby to process")

    def _watched(self) -> WorkerLink | None:
        link = self._fleet.serving
        if link is None:
            return None
        clean = self._fleet.owner.clean
        switching = link.epoch is not None and clean is not None and link.epoch != clean
        return link if len(self._requests) or switching else None

    def _on_hang(self, link: WorkerLink, frozen_s: float, doing: str) -> None:
        text = f"worker {link.generation} hangs: no progress for {frozen_s:.1f} s while {doing}"
        self._fleet.news.fault("worker.hang", "step counter", text, True, detect_s=frozen_s)
        self._fleet.tell(sv.Hung(link.generation, text))

    @property
    def worker_pid(self) -> int | None:
        """Process id of the serving worker, None while there is none."""
        return self._fleet.serving.child.pid if self._fleet.serving else None

    @property
    def shadow_pid(self) -> int | None:
        """Process id of the shadow, None until one is ready."""
        return self._fleet.standby.child.pid if self._fleet.standby else None

    @property
    def owner_pid(self) -> int:
        return self._fleet.owner.process.child.pid

    @property
    def policy_version(self) -> int:
        """Number of the newest committed weights."""
        return self._fleet.owner.clean.policy_version if self._fleet.owner.clean else -1

    @property
    def version_policy(self) -> VersionPolicy:
        """Whether a trajectory may span policy versions, and what happens if not."""
        return self._config.version_policy

    @property
    def worker_generation(self) -> int | None:
        """Fencing token of the serving worker; it rises with every process started."""
        return self._fleet.supervisor.serving

    @property
    def stale_tokens(self) -> int:
        """Tokens of fenced workers and of requests that had ended: sent, and delivered to nobody."""
        return self._fleet.stale_tokens + self._requests.stale_tokens


def _from_folder(folder: Path, version: int, first: int) -> Iterable[tuple[str, torch.Tensor]]:
    if version != first:
        raise WeightsError(f"the model folder has policy version {first}, not {version}")
    return checkpoint_tensors(folder)
