"""One completion while it is being made, for any number of readers; and what drives completions to their end."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Literal

from belayer.engine import GenerationRequest, Sampling, TokenChunk
from belayer.errors import EngineUnavailable, TurnRestarted
from belayer.gateway.upstream import Upstream

PauseMode = Literal["abort", "wait", "keep"]


class Generation:
    """The tokens of one completion so far. `finish` is set once it is complete, `error` if it cannot be completed.

    `journal` is called with every chunk before anybody sees its tokens, `voided` when the tokens do not count any more.
    With `whole` nothing is shown before the completion is complete.
    """

    def __init__(
        self,
        prompt_ids: list[int],
        sampling: Sampling,
        *,
        trajectory: str = "",
        journal: Callable[[TokenChunk], None] | None = None,
        voided: Callable[[str], None] | None = None,
        whole: bool = False,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.names: frozenset[str] = frozenset()  # what clients call it, to abort it
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.trajectory = trajectory
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.finish = ""
        self.error: BaseException | None = None
        self.bells: set[asyncio.Event] = set()
        self._journal = journal
        self._voided = voided
        self._whole = whole

    @property
    def done(self) -> bool:
        return bool(self.finish) or self.error is not None

    @property
    def visible(self) -> int:
        """How many tokens readers may have."""
        return 0 if self._whole and not self.finish else len(self.ids)

    def request(self, number: int) -> GenerationRequest:
        """What to ask an engine for, from here on."""
        return GenerationRequest(
            id=f"{self.id}.{number}",
            prompt_ids=self.prompt_ids,
            sampling=self.sampling,
            resume_ids=list(self.ids),
            resume_version=self.versions[0] if self.versions else None,
            trajectory=self.trajectory,
        )

    def accept(self, chunk: TokenChunk) -> None:
        """The engine's sink. What comes after the end, before the engine has heard of an abort, is nobody's."""
        if self.done:
            return
        if self._journal is not None:
            self._journal(chunk)
        self.ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.versions += [chunk.weights_version] * len(chunk.token_ids)
        self.finish = chunk.finish_reason or ""
        self.ring()

    def void(self, reason: str) -> None:
        if self._voided is not None:
            self._voided(reason)
        self.ids, self.logprobs, self.versions = [], [], []

    def fail(self, error: BaseException) -> None:
        if not self.done:
            self.error = error
            self.ring()

    async def wait(self) -> None:
        """Until it is complete. Raises why, where it cannot be."""
        bell = asyncio.Event()
        self.bells.add(bell)
        try:
            while not self.done:
                bell.clear()
                await bell.wait()
        finally:
            self.bells.discard(bell)
        if self.error is not None:
            raise self.error

    def ring(self) -> None:
        for bell in self.bells:
            bell.set()


class Runner:
    """Drives completions: through pauses, through turns that new weights void, to their end or their deadline."""

    def __init__(self, upstream: Upstream, timeout_s: float) -> None:
        self._upstream = upstream
        self._timeout_s = timeout_s
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: dict[Generation, asyncio.Task[None]] = {}
        self._asking: dict[Generation, asyncio.Task[str]] = {}
        self._closed = False

    @property
    def running(self) -> int:
        return len(self._tasks)

    @property
    def under_way(self) -> list[Generation]:
        return [generation for generation in self._tasks if not generation.done]

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    def start(self, generation: Generation) -> None:
        """Begin, or go on with a completion that holds tokens already."""
        if self._closed:
            raise EngineUnavailable("the gateway is shutting down", next_step="retry: a session goes on where it was")
        task = asyncio.get_running_loop().create_task(self._run(generation), name=f"generation {generation.id}")
        self._tasks[generation] = task
        task.add_done_callback(lambda _: self._tasks.pop(generation, None))

    def is_running(self, generation: Generation) -> bool:
        return generation in self._tasks

    async def cancel(self, generation: Generation) -> None:
        """End it, wherever it is, and wait for that; what it has is kept by whoever keeps it."""
        if (task := self._tasks.get(generation)) is not None:
            task.cancel()
            await asyncio.wait([task])

    def drop(self, generation: Generation) -> None:
        """Nobody wants it any more: end it, if it is under way."""
        if (task := self._tasks.get(generation)) is not None:
            task.cancel()

    async def pause(self, mode: PauseMode) -> int:
        """Hold everything back until `resume`. Returns how many completions were under way.

        "wait" lets them end first, "keep" freezes them at their last token and "abort" ends them there.
        """
        self._open.clear()
        under_way = list(self._tasks)
        if mode == "wait":
            asking = list(self._asking.values())
            if asking:
                await asyncio.wait(asking, timeout=self._timeout_s)
        else:
            for generation in under_way:
                if mode == "abort":
                    self.abort(generation)
            # whoever awaits these asks again once the gate is open
            for task in list(self._asking.values()):
                task.cancel()
        return len(under_way)

    def resume(self) -> None:
        self._open.set()

    def abort(self, generation: Generation) -> None:
        """End a completion where it is: it finishes with the reason "abort"."""
        if generation.done:
            return
        version = generation.versions[-1] if generation.versions else self._upstream.policy_version
        generation.accept(
            TokenChunk(
                request_id=generation.id,
                start=len(generation.ids),
                token_ids=[],
                logprobs=[],
                weights_version=version,
                finish_reason="abort",
            )
        )
        if (task := self._tasks.get(generation)) is not None:
            task.cancel()

    def abort_all(self, named: frozenset[str] | None = None) -> int:
        """End every completion under way, or those that a client calls by one of `named`. Returns how many."""
        under_way = [each for each in self.under_way if named is None or named & each.names]
        for generation in under_way:
            self.abort(generation)
        return len(under_way)

    async def close(self, drain_s: float) -> None:
        """Let completions end for `drain_s` seconds, then cut them off. New ones are refused."""
        self._closed = True
        tasks = list(self._tasks.values())
        if tasks and drain_s > 0 and not self.paused:
            await asyncio.wait(tasks, timeout=drain_s)
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _run(self, generation: Generation) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._to_the_end(generation)
        except asyncio.CancelledError:
            generation.fail(EngineUnavailable("the request was cancelled", next_step="send it again"))
            raise
        except Exception as error:
            generation.fail(error)

    async def _to_the_end(self, generation: Generation) -> None:
        number = 0
        while not generation.done:
            await self._open.wait()
            number += 1
            asking = asyncio.ensure_future(self._upstream.generate(generation.request(number), generation.accept))
            self._asking[generation] = asking
            try:
                await asyncio.wait([asking])
                if not asking.cancelled():
                    asking.result()
                # otherwise it was frozen by a pause
            except TurnRestarted as restarted:
                generation.void(restarted.what)
            finally:
                del self._asking[generation]
                if not asking.done():  # we are being cancelled ourselves
                    asking.cancel()
                    await asyncio.wait([asking])
