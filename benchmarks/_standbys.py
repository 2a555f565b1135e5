"""What recovery costs without Belayer's shadow: a full cold start, and a standby that keeps no weights."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path
from typing import Any

from belayer.config import EngineConfig
from belayer.engine import Engine, GenerationRequest
from belayer.engine._wire import Activate, Activated, FromWorker, Ready, Refusal, Spec, Submit, Tokens, Work
from belayer.engine.exactness import is_exact
from belayer.engine.owner.process import OwnerProcess
from belayer.engine.workers.child import environment
from belayer.engine.workers.link import WorkerLink
from belayer.engine.workers.nursery_link import NurseryLink
from belayer.errors import EngineUnavailable
from belayer.ownership import RunLabel

from ._tape import Tape, Watch, run

START_S = 180.0
FENCE_S = 10.0


def unprotected(config: EngineConfig) -> EngineConfig:
    """The same engine without anything that makes a start quicker."""
    return config.model_copy(update={"standby": "none", "images": False})


async def cold_start(
    config: EngineConfig, requests: list[GenerationRequest], tape: Tape, logs: Path
) -> tuple[float, float]:
    """Spawn processes, import, load the checkpoint, warm up, prefill.

    Seconds until every request has a token, and how many of them the warm-up took: a start that only wants to go on
    could do without it.
    """
    watch = Watch()
    with RunLabel.new("bench worker, cold start") as label:
        began = time.monotonic()
        engine = await Engine.start(unprotected(config), label, events=watch, log_dir=logs)
        try:
            await run(engine, requests, tape)
        finally:
            await engine.close()
    return max(tape.first.values()) - began, watch.warm_up_s


class BareStandby:
    """Processes that have started and imported everything, and hold neither weights nor a warmed-up engine.

    That is what a standby costs where nothing is retained: a takeover forks a worker of the imported process, loads
    the checkpoint into an owner that holds nothing yet, warms up, and prefills.
    """

    def __init__(self, config: EngineConfig, label: RunLabel, logs: Path) -> None:
        """Starts importing; `wait_ready` tells when that is done."""
        self._config = config
        self._label = label
        self._logs = logs
        self._env = environment(label, config.threads, is_exact(config))
        self._nursery = NurseryLink(config.backend, self._env, logs / "nursery.log")
        self._number = 0

    async def wait_ready(self) -> None:
        """The imports are done once a fork is answered; that child sees a closed channel and ends."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        page = os.memfd_create("belayer-bench", os.MFD_CLOEXEC)
        try:
            async with asyncio.timeout(START_S):
                child = await self._nursery.fork(theirs.fileno(), page, self._logs / "probe.log")
        finally:
            ours.close()
            theirs.close()
            os.close(page)
        if not await child.gone(FENCE_S):
            raise EngineUnavailable("the nursery's first child does not end")

    async def take_over(self, requests: list[GenerationRequest], tape: Tape) -> float:
        """Seconds until every request has its next token. Then they are completed, and worker and owner end."""
        self._number += 1
        owner = OwnerProcess(self._label, 1000 + self._number, self._env, self._logs)
        link: WorkerLink | None = None
        try:
            await owner.wait_ready(START_S)
            began = time.monotonic()
            log = self._logs / f"bare-{self._number}.log"
            link = await WorkerLink.start(self._nursery, lambda: self._spec(str(owner.path)), log)
            takeover = _Takeover(link, requests, tape, str(owner.path))
            async with asyncio.timeout(START_S):
                await takeover.finished
            return max(tape.first.values()) - began
        finally:
            if link is not None and await link.fence(FENCE_S) is None:
                raise EngineUnavailable("the baseline's worker could not be killed")
            await owner.close()

    def _spec(self, owner_socket: str) -> Spec:
        given: dict[str, Any] = {
            name: getattr(self._config, name) for name in Spec.__struct_fields__ if hasattr(self._config, name)
        }
        given |= {
            "generation": self._number,
            "model": str(self._config.model),
            "batch_invariant": is_exact(self._config),
            "owner_socket": owner_socket,
            "fill": True,
            "policy_version": 0,
            "nice": 0,
        }
        return Spec(**given)

    async def close(self) -> None:
        await self._nursery.close()


class _Takeover:
    """The driver's part of one takeover, as short as it can be."""

    def __init__(self, link: WorkerLink, requests: list[GenerationRequest], tape: Tape, owner: str) -> None:
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._link = link
        self._requests = requests
        self._tape = tape
        self._owner = owner
        self._open = {request.id for request in requests}
        link.on_message = self._receive
        link.child.on_exit(lambda how: self._fail(f"the baseline's worker ended: {how}\n{link.child.log_tail()}"))

    def _receive(self, message: FromWorker) -> None:
        match message:
            case Ready(_, layout_hash, epoch, _):
                self._link.send(Activate(layout_hash, epoch, self._owner))
            case Activated():
                self._link.send(Submit([Work(r.id, r.prompt_ids, r.resume_ids, r.sampling) for r in self._requests]))
            case Tokens():
                for chunk in message.chunks:
                    self._tape.add(chunk.id, chunk.start, chunk.token_ids, chunk.logprobs)
                    if chunk.finish_reason is not None:
                        self._open.discard(chunk.id)
                if not self._open and not self.finished.done():
                    self.finished.set_result(None)
            case Refusal(_, what, reason):
                self._fail(f"the baseline's worker refused {what}: {reason}")
            case _:
                pass

    def _fail(self, text: str) -> None:
        if not self.finished.done():
            self.finished.set_exception(EngineUnavailable(text))
