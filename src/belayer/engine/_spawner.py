"""Where workers come from: an image where there is a good one, else the nursery."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from belayer import events as ev
from belayer.config import EngineConfig
from belayer.engine._model_folder import ModelFacts
from belayer.engine._wire import Ready, Spec
from belayer.engine.exactness import is_exact
from belayer.engine.images.depot import Depot
from belayer.engine.memory.host import may_lower_nice
from belayer.engine.workers.link import WorkerLink
from belayer.engine.workers.nursery_link import NurseryLink
from belayer.errors import EngineUnavailable
from belayer.ownership import RunLabel

STANDBY_NICE = 10
NURSERY_ATTEMPTS = 2


@dataclass(frozen=True)
class Wanted:
    """What kind of worker is asked for."""

    generation: int
    fill: bool  # it loads the checkpoint into the owner's first epoch
    awaited: bool  # it is to serve at once; otherwise there is time to touch the pages that a promotion will need
    beside: bool  # another one serves meanwhile, and must not lose the processor to it
    owner_socket: str
    policy_version: int


class Spawner:
    """Starts one worker at a time, so that the first comes before its shadow.

    `on_nursery_exit` hears how a nursery ended that was not closed.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelFacts,
        label: RunLabel,
        env: dict[str, str],
        log_dir: Path,
        events: ev.EventSink,
    ) -> None:
        self._config = config
        self._model = model
        self._env = env
        self._log_dir = log_dir
        self.nursery: NurseryLink | None = None  # only where there is no image to start workers from
        self._nurseries = 0
        self._one_at_a_time = asyncio.Lock()
        self._closing = False
        self.images = Depot(config, model, label, env, log_dir, events)
        self.on_nursery_exit: Callable[[str], None]

    async def prepare(self) -> None:
        """Begin the imports at once if they will be needed."""
        if await self.images.find() is None:
            self.nursery = self._new_nursery()

    async def start(self, wanted: Callable[[], Wanted], log: Path, *, once: bool) -> tuple[WorkerLink, Ready | None]:
        """A worker, and its first word if it is ready already (then it came from an image).

        `wanted` is asked for when the worker can be told, which may be a while. `once`: a nursery that fails is not
        tried again. Raises `EngineUnavailable`.
        """
        async with self._one_at_a_time:
            restored = await self.images.start(lambda: self._spec_for_image(wanted()), log)
            if restored is not None:
                return restored
            return await self._fork(lambda: self._spec(wanted()), log, once), None

    async def _fork(self, spec: Callable[[], Spec], log: Path, once: bool) -> WorkerLink:
        reasons: list[str] = []
        for _attempt in range(NURSERY_ATTEMPTS):
            if self.nursery is None or not self.nursery.child.alive:
                self.nursery = self._new_nursery()
            try:
                async with asyncio.timeout(self._config.start_timeout_s / NURSERY_ATTEMPTS):
                    return await WorkerLink.start(self.nursery, spec, log)
            except (OSError, TimeoutError) as error:
                reasons.append(str(error) or "the nursery does not answer")
                await self.nursery.close()
                if once:
                    break
        raise EngineUnavailable(
            f"no worker can be started: {reasons[0]}",
            kept="every journalled token",
            next_step="on a machine that is very busy, raise engine.start_timeout_s; else see nursery-*.log of the run",
        )

    def _new_nursery(self) -> NurseryLink:
        self._nurseries += 1
        nursery = NurseryLink(self._config.backend, self._env, self._log_dir / f"nursery-{self._nurseries}.log")
        nursery.child.on_exit(lambda how: None if self._closing else self.on_nursery_exit(how))
        return nursery

    def watch_for_quiet(self, quiet: bool, wanted: Callable[[], Wanted]) -> None:
        """Tell whether the engine has all its protection and nothing to recover: then an image may be built."""
        self.images.quiet(quiet, lambda: self._spec(wanted()))

    async def build_image(self, wanted: Wanted, timeout_s: float) -> str:
        """Make sure that there is an image to start workers from; returns why there is none, or "" if there is."""
        return await self.images.build_now(self._spec(wanted), timeout_s)

    def _spec(self, wanted: Wanted) -> Spec:
        return Spec(
            generation=wanted.generation,
            backend=self._config.backend,
            model=str(self._model.path),
            dtype=self._config.dtype,
            max_model_len=self._config.max_model_len,
            max_num_seqs=self._config.max_num_seqs,
            kv_bytes=self._config.kv_bytes,
            batch_invariant=is_exact(self._config),
            owner_socket=wanted.owner_socket,
            device=self._config.device,
            fill=wanted.fill,
            adopt_sealed_blocks=self._config.adopt_sealed_blocks,
            policy_version=wanted.policy_version,
            nice=STANDBY_NICE if wanted.beside and may_lower_nice() else 0,
            scrub_s=self._config.scrub_s,
        )

    def _spec_for_image(self, wanted: Wanted) -> Spec:
        # it is there in a moment: no need to be nice
        return msgspec.structs.replace(self._spec(wanted), nice=0, warm=not wanted.awaited)

    async def close(self) -> None:
        """End the nursery, and with it the workers that are left of it, and a build of an image."""
        self._closing = True
        await self.images.close()
        if self.nursery is not None:
            await self.nursery.close()
