"""vLLM and SGLang servers that somebody else runs: when one fails, another goes on after the last token that came.

There is no shadow here, and no owner: a server that goes down takes its weights and KV along. What a completion has is
kept; the rest is asked for with prompt and tokens as the new prompt. Greedy tokens are those of an undisturbed run if
the servers are equal and their arithmetic does not depend on the batch; sampled ones are a valid continuation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from belayer import events as ev
from belayer.config import VersionPolicy
from belayer.engine import GenerationRequest, TokenChunk, TokenSink
from belayer.engine.admission import problem
from belayer.engine.stopping import Stopping, StopWatch, already_finished
from belayer.errors import ConfigError, EngineUnavailable, RequestRefused
from belayer.gateway.problems import Problem
from belayer.gateway.upstream._server import HEALTH_S, Server
from belayer.gateway.upstream._wires import Interrupted, Piece

_ANY_TOKEN = 1 << 31  # the servers know their vocabulary


class ExternalServers:
    """One upstream made of several servers of one model."""

    def __init__(self, servers: list[Server], client: httpx.AsyncClient, folder: Path | None, recover_s: float) -> None:
        """Not for callers: use `start`."""
        self._servers = servers
        self._client = client
        self._stopping = Stopping(folder) if folder is not None else None
        self._recover_s = recover_s
        self._events: ev.EventSink = ev.ignore
        self._changed = asyncio.Event()
        self._homes: dict[str, Server] = {}
        self._version = 0
        self._looking: asyncio.Task[None] | None = None
        known = [server for server in servers if server.model]
        self.model = known[0].model
        self.dtype = ""
        self.max_model_len = min(server.max_model_len for server in known)

    @classmethod
    async def start(
        cls, urls: Sequence[str], folder: Path | None, recover_s: float, *, sink: ev.EventSink = ev.ignore
    ) -> ExternalServers:
        """Wait up to `recover_s` seconds for at least one server. `folder` holds the tokenizer, for stop strings.

        Raises `ConfigError` for a URL that is none or servers of different models, `EngineUnavailable` if none answers.
        """
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5.0), limits=limits, trust_env=False)
        try:
            servers = [Server(url, client) for url in dict.fromkeys(urls)]
            deadline = asyncio.get_running_loop().time() + recover_s
            while True:
                await asyncio.gather(*(server.look() for server in servers))
                if any(server.closed for server in servers):
                    break
                if asyncio.get_running_loop().time() > deadline:
                    told = "; ".join(f"{server.url}: {server.why}" for server in servers)
                    raise EngineUnavailable(f"no server answers: {told}", next_step="start one, or check the URLs")
                await asyncio.sleep(0.2)
            names = sorted({server.model for server in servers if server.model})
            if len(names) > 1:
                raise ConfigError(f"the servers serve different models: {', '.join(names)}")
            made = cls(servers, client, folder, recover_s)
        except BaseException:
            await client.aclose()
            raise
        made._events = sink
        made._looking = asyncio.get_running_loop().create_task(made._look())
        return made

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def version_policy(self) -> VersionPolicy:
        return "allow"

    def check(self, request: GenerationRequest | None = None) -> None:
        if request is None:
            if not any(server.closed for server in self._servers):
                told = "; ".join(f"{server.url}: {server.why}" for server in self._servers)
                raise EngineUnavailable(f"no server answers: {told}")
            return
        sampling = request.sampling
        if sampling.frequency_penalty or sampling.presence_penalty:
            raise RequestRefused(
                "frequency_penalty and presence_penalty are not offered in front of external servers: one that goes on "
                "would count anew",
                next_step="use repetition_penalty, or Belayer's own engine",
            )
        if sampling.stop and self._stopping is None:
            raise RequestRefused("stop strings need a tokenizer", next_step="give --tokenizer FOLDER")
        if (reason := problem(request, self.max_model_len, _ANY_TOKEN)) is not None:
            raise RequestRefused(f"request {request.id}: {reason}")

    async def generate(self, request: GenerationRequest, on_tokens: TokenSink) -> str:
        self.check(request)
        watch = await self._stopping.watch(request) if self._stopping is not None else None
        completion = _Completion(request, on_tokens, watch)
        if (reason := already_finished(request, watch)) is not None:
            completion.deliver(Piece([], [], self._version, reason))
            return reason
        failed: Server | None = None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._recover_s
        while True:
            server = await self._pick(request.trajectory, failed, deadline)
            before = len(completion.made)
            try:
                if (finish := await self._ask(server, request, completion)) is not None:
                    return finish
                raise Interrupted("its stream ended too early")
            except Interrupted as interrupted:
                failed = server
                server.fail(str(interrupted))
                data = {"fault": "server", "how": str(interrupted), "tokens": len(completion.made)}
                self._events(ev.Event(kind=ev.FAULT_DETECTED, subject=server.url, data=data))
                if len(completion.made) > before:
                    deadline = loop.time() + self._recover_s
                elif loop.time() > deadline:
                    raise EngineUnavailable(
                        f"no server got further for {self._recover_s:g} s; the last, {server.url}: {interrupted}",
                        kept=f"{before} tokens of this completion",
                        next_step="look at the servers; in a session the retry goes on from there",
                    ) from None

    async def _ask(self, server: Server, request: GenerationRequest, completion: _Completion) -> str | None:
        stream = server.complete(request, completion.made)
        try:
            while True:
                try:
                    piece = await asyncio.wait_for(anext(stream), self._recover_s)
                except StopAsyncIteration:
                    return None
                except TimeoutError:
                    raise Interrupted(f"no token for {self._recover_s:g} s") from None
                self._version = max(self._version, piece.version)
                if (finish := completion.deliver(piece)) is not None:
                    return finish
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    async def _pick(self, trajectory: str, failed: Server | None, deadline: float) -> Server:
        """The server that a conversation has its prefix on, else the least busy one. Waits while none is usable."""
        while True:
            usable = [server for server in self._servers if server.closed]
            if usable:
                home = self._homes.get(trajectory)
                best = home if home in usable else min(usable, key=lambda s: (s is failed, s.in_flight))
                if trajectory:
                    self._homes[trajectory] = best
                return best
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                self.check()
                continue
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left, HEALTH_S))

    async def _look(self) -> None:
        while True:
            await asyncio.gather(*(server.look() for server in self._servers))
            self._changed.set()
            usable = all(server.closed for server in self._servers)
            await asyncio.sleep(HEALTH_S if usable else HEALTH_S / 8)

    async def end_trajectory(self, name: str) -> None:
        self._homes.pop(name, None)

    async def update_weights(self, folder: Path, policy_version: int | None) -> int:
        raise Problem(501, "weights of external servers are theirs: send them to each server", code="not_offered")

    def state(self) -> dict[str, Any]:
        return {"servers": [server.state() for server in self._servers]}

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking
        await self._client.aclose()


class _Completion:
    """What one completion has, from whichever servers."""

    def __init__(self, request: GenerationRequest, sink: TokenSink, watch: StopWatch | None) -> None:
        self.made = list(request.resume_ids)
        self._request = request
        self._sink = sink
        self._watch = watch

    def deliver(self, piece: Piece) -> str | None:
        """Hand a piece on, cut where the completion ends. Returns why it has ended, if it has."""
        sampling = self._request.sampling
        count, finish = len(piece.ids), piece.finish or None
        for index, token in enumerate(piece.ids):
            stopped = self._watch is not None and self._watch.feed([token]) is not None
            ends = token in sampling.stop_token_ids and len(self.made) + index >= sampling.min_tokens
            if stopped or ends:
                count, finish = index + 1, "stop"
                break
            if len(self.made) + index + 1 == sampling.max_tokens:
                count, finish = index + 1, "length"
                break
        if count == 0 and finish is None:
            return None
        chunk = TokenChunk(
            request_id=self._request.id,
            start=len(self.made),
            token_ids=piece.ids[:count],
            logprobs=piece.logprobs[:count],
            weights_version=piece.version,
            finish_reason=finish,
        )
        self._sink(chunk)
        self.made += chunk.token_ids
        return finish
