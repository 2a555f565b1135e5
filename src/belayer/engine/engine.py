"""The rollout engine, as the rest of the program sees it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from belayer import events as ev
from belayer.config import EngineConfig
from belayer.engine import supervisor as sv
from belayer.engine._fleet import Fleet
from belayer.engine._model_folder import ModelFacts, inspect
from belayer.engine._wire import Abort, Epoch, Submit, Tokens, Work
from belayer.engine.request import GenerationRequest, TokenChunk, TokenSink, WeightsEpoch
from belayer.engine.workers.hang import HangDetector
from belayer.engine.workers.link import WorkerLink
from belayer.errors import EngineError, EngineUnavailable, OwnerLost, RequestRefused, WeightsError
from belayer.ownership import RunLabel

if TYPE_CHECKING:
    import torch

__all__ = ["Engine"]

OWNER_ATTEMPTS = 3


class _Flight:
    """A request in flight: the only thing the driver remembers of it is what the caller's sink has been given."""

    def __init__(self, key: str, request: GenerationRequest, sink: TokenSink) -> None:
        self.key = key
        self.request = request
        self.sink = sink
        self.done_ids = list(request.resume_ids)
        self.finished: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def work(self) -> Work:
        return Work(self.key, self.request.prompt_ids, self.done_ids, self.request.sampling)

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids) + len(self.done_ids)


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
        # By a key of their own that no two calls share: a worker that has not heard of a cancellation yet still sends
        # tokens, and they must not be taken for those of a new request with the same id.
        self._flights: dict[str, _Flight] = {}
        self._keys = itertools.count(1)
        self._rebuilding: set[str] = set()
        self._updating = asyncio.Lock()
        self._updates: set[asyncio.Task[WeightsEpoch]] = set()
        self._closed = False
        self._fleet = Fleet(config, model, label, events, log_dir)
        self._fleet.on_tokens = self._on_tokens
        self._fleet.on_route = self._on_route
        self._fleet.on_lost = self._on_lost
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
        log_dir: Path | None = None,
    ) -> Engine:
        """Start owner, worker and shadow and return when the worker serves; the shadow arms in the background.

        `weights` replace the checkpoint's values before the first token; `policy_version` is the number they carry.
        Raises `ConfigError` for a model folder or setting that cannot work, before anything is started, and
        `EngineUnavailable`, with the end of the worker's log, when the worker does not come up.
        """
        model = inspect(config)
        engine = cls(config, model, label, events, log_dir or label.dir / "engine")
        if weights is not None:
            given = weights

            async def before_serving() -> None:
                await engine._write_epoch(given, policy_version)

            engine._fleet.before_serving = before_serving
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
        for task in self._updates:
            task.cancel()
        await self._fleet.close()
        self._on_lost(EngineUnavailable("the engine was closed", kept="every journalled token"))

    # -- requests -----------------------------------------------------------------------------------------------------
    async def generate(self, request: GenerationRequest, on_tokens: TokenSink) -> str:
        """Complete one request and return why it ended: "stop" or "length".

        `on_tokens` is called in this process for every chunk, before anything else sees its tokens: journal there. An
        exception it raises ends the request and comes out here. A worker's death is not visible: generation goes on
        with the very next token. Cancelling the call ends the request in the worker.

        Raises `RequestRefused` before any token for a request that cannot be honoured, `EngineUnavailable` when no
        worker serves any more.
        """
        self._check(request)
        if (reason := _already_finished(request)) is not None:
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
        flight = _Flight(f"{next(self._keys)}:{request.id}", request, on_tokens)
        self._flights[flight.key] = flight
        if (link := self._fleet.serving) is not None:
            link.send(Submit([flight.work()]))
        try:
            return await flight.finished
        except asyncio.CancelledError:
            self._abort(flight.key)
            raise
        finally:
            self._flights.pop(flight.key, None)
            self._has_token(flight.key)

    def _check(self, request: GenerationRequest) -> None:
        if self._closed:
            raise EngineUnavailable("the engine is closed")
        if self._fleet.failure is not None:
            raise self._fleet.failure
        sampling = request.sampling
        problem = None
        if any(flight.request.id == request.id for flight in self._flights.values()):
            problem = "a request with this id is in flight"
        elif not request.prompt_ids:
            problem = "the prompt is empty"
        elif sampling.max_tokens < 1 or sampling.max_tokens < len(request.resume_ids):
            problem = f"max_tokens is {sampling.max_tokens} and {len(request.resume_ids)} tokens are there already"
        elif len(request.prompt_ids) + len(request.resume_ids) >= self._config.max_model_len:
            problem = (
                f"{len(request.prompt_ids)} prompt and {len(request.resume_ids)} resumed tokens leave no room in "
                f"max_model_len {self._config.max_model_len}"
            )
        elif (
            not 0
            <= min(request.prompt_ids + request.resume_ids)
            <= max(request.prompt_ids + request.resume_ids)
            < self._model.vocab_size
        ):
            problem = f"token ids must be in [0, {self._model.vocab_size})"
        elif sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or not 0 <= sampling.min_p <= 1:
            problem = "temperature must be >= 0, top_p in (0, 1], min_p in [0, 1]"
        elif sampling.top_k < 0:
            problem = "top_k must be >= 0"
        elif not 0 <= sampling.seed < 1 << 64:
            problem = "seed must be in [0, 2**64)"
        if problem:
            raise RequestRefused(f"request {request.id}: {problem}")

    def _abort(self, key: str) -> None:
        if (link := self._fleet.serving) is not None:
            link.send(Abort([key]))

    def _has_token(self, key: str) -> None:
        """A request that had to be rebuilt is: it has a token, or nobody waits for one any more."""
        if key in self._rebuilding:
            self._rebuilding.discard(key)
            if not self._rebuilding and self._fleet.supervisor.serving is not None:
                self._fleet.rebuilt(self._fleet.supervisor.serving)

    def _on_tokens(self, message: Tokens) -> None:
        for made in message.chunks:
            key, token_ids, reason = made.id, made.token_ids, made.finish_reason
            flight = self._flights.get(key)
            if flight is None or flight.finished.done():
                continue  # it was cancelled, and the worker had not heard of it yet
            chunk = TokenChunk(
                request_id=flight.request.id,
                start=len(flight.done_ids),
                token_ids=token_ids,
                logprobs=made.logprobs,
                weights_version=message.policy_version,
                finish_reason=reason,
            )
            flight.done_ids += token_ids
            try:
                flight.sink(chunk)
            except Exception as error:
                flight.finished.set_exception(error)
                if reason is None:
                    self._abort(key)
                continue
            self._fleet.clock.first_token()
            self._has_token(key)
            if reason is not None:
                flight.finished.set_result(reason)

    def _on_route(self, link: WorkerLink) -> int:
        """Give a new worker every request in flight, those that need the least prefill first."""
        flights = sorted((f for f in self._flights.values() if not f.finished.done()), key=lambda f: f.length)
        self._rebuilding = {flight.key for flight in flights}
        if flights:
            link.send(Submit([flight.work() for flight in flights]))
        return len(flights)

    def _on_lost(self, error: EngineError) -> None:
        for flight in list(self._flights.values()):
            if not flight.finished.done():
                flight.finished.set_exception(error)

    # -- weights ------------------------------------------------------------------------------------------------------
    async def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> WeightsEpoch:
        """Serve other weights from the next step on, without restarting anything.

        `tensors` carry the names of the model folder; what is not named keeps its value. They are written into the
        next epoch, which is committed with its digest in one step; then worker and shadow switch. A failure before
        the commit leaves the old epoch serving. Requests in flight go on: their KV is rebuilt with the new weights.

        Raises `WeightsError` for an unknown name or a wrong shape, `EngineUnavailable` if no worker serves any more.
        """
        if self._closed or self._fleet.failure is not None:
            raise self._fleet.failure or EngineUnavailable("the engine is closed")
        # Shielded: half an update does not exist, so a caller that is cancelled cannot leave one. `close` ends it.
        task = asyncio.get_running_loop().create_task(self._update(tensors, policy_version))
        self._updates.add(task)
        task.add_done_callback(self._updates.discard)
        return await asyncio.shield(task)

    async def _update(self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> WeightsEpoch:
        began = time.monotonic()
        async with self._updating:
            await self._write_epoch(tensors, policy_version)
            target = self._fleet.clean
            assert target is not None
            await self._switch_all(target)
        if self._fleet.failure is not None:
            raise self._fleet.failure
        wall_s = time.monotonic() - began
        epoch = WeightsEpoch(epoch=target.number, policy_version=policy_version, digest=target.digest, wall_s=wall_s)
        data = {"epoch": target.number, "policy_version": policy_version, "digest": target.digest, "wall_s": wall_s}
        self._events(ev.Event(kind=ev.WEIGHTS_COMMITTED, subject="weights", data=data))
        return epoch

    async def _switch_all(self, target: Epoch) -> None:
        fleet = self._fleet
        for link in list(fleet.links.values()):
            fleet.bring_up_to_date(link)
        try:
            await fleet.wait(lambda: self._switched(target.number), self._config.prefill_hang_s)
        except TimeoutError:
            # one that does not answer is of no use: as a shadow nobody else would notice
            for link in list(fleet.links.values()):
                if link.ready and link.epoch != fleet.clean:
                    fleet.tell(sv.Hung(link.generation, f"worker {link.generation} did not switch its weights"))
            await fleet.wait(lambda: self._switched(target.number), self._config.start_timeout_s)

    def _switched(self, number: int) -> bool:
        """Whether no worker that could make a token still looks at older weights."""
        if self._fleet.failure is not None:
            return True
        return all(
            link.fenced or not link.ready or (link.epoch is not None and link.epoch.number >= number)
            for link in self._fleet.links.values()
        )

    async def _write_epoch(self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        fleet = self._fleet
        content = list(tensors)  # references only; an owner that dies half-way makes it necessary to start over
        if not content:
            raise WeightsError("an update without tensors changes nothing")
        for _attempt in range(OWNER_ATTEMPTS):
            try:
                async with asyncio.timeout(self._config.start_timeout_s):
                    await fleet.owner_usable.wait()
            except TimeoutError:
                break
            assert fleet.epochs is not None and fleet.clean is not None
            base, owner = fleet.clean, fleet.owner
            fleet.writing = True
            try:
                fleet.clean = await asyncio.to_thread(fleet.epochs.update, base, content, policy_version)
                return
            except WeightsError as error:
                kept = f"policy version {base.policy_version} serves on"
                raise WeightsError(error.what, kept=kept, next_step=error.next_step) from None
            except OwnerLost:
                fleet.owner_lost(owner)
            finally:
                fleet.writing = False
        raise WeightsError("no owner can hold new weights", kept="the old policy version serves on")

    # -- watching -----------------------------------------------------------------------------------------------------
    async def wait_standby(self, timeout_s: float) -> None:
        """Wait until a shadow could take over at once. Raises `EngineError` if that takes longer than `timeout_s`."""
        if self._config.standby == "none":
            raise EngineError("this engine has no shadow: engine.standby is none")
        try:
            await self._fleet.wait(
                lambda: self._fleet.failure is not None or self._fleet.supervisor.protected, timeout_s
            )
        except TimeoutError:
            raise EngineError(f"no shadow is ready after {timeout_s:g} s") from None
        if self._fleet.failure is not None:
            raise self._fleet.failure

    def _watched(self) -> WorkerLink | None:
        link = self._fleet.serving
        if link is None:
            return None
        switching = link.epoch is not None and self._fleet.clean is not None and link.epoch != self._fleet.clean
        return link if self._flights or switching else None

    def _on_hang(self, link: WorkerLink, frozen_s: float, doing: str) -> None:
        text = f"worker {link.generation} hangs: no progress for {frozen_s:.1f} s while {doing}"
        self._fleet.report_fault("worker.hang", "step counter", text, True, detect_s=frozen_s)
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
        return self._fleet.owner.child.pid

    @property
    def policy_version(self) -> int:
        """Number of the newest committed weights."""
        return self._fleet.clean.policy_version if self._fleet.clean else -1

    @property
    def worker_generation(self) -> int | None:
        """Fencing token of the serving worker; it rises with every process started."""
        return self._fleet.supervisor.serving

    @property
    def stale_tokens(self) -> int:
        """Tokens that fenced workers had sent and nobody read."""
        return self._fleet.stale_tokens


def _already_finished(request: GenerationRequest) -> str | None:
    """Why a resumed completion is complete, or None."""
    if request.resume_ids and request.resume_ids[-1] in request.sampling.stop_token_ids:
        return "stop"
    if len(request.resume_ids) >= request.sampling.max_tokens:
        return "length"
    return None
