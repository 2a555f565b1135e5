"""What an engine does with images: starts workers from one, refuses it with a reason, has one built when all is quiet.

    image for this key?  ── yes ──► restore, wait for the worker's first word ──► a worker
            │ no                        │ fails: refuse, remove, say why
            ▼                           ▼
         the nursery starts the worker

Once the engine has had all its protection for a while, a process beside it builds the missing image at low priority;
it ends at once when a recovery begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from belayer import events as ev
from belayer.config import EngineConfig
from belayer.engine._model_folder import ModelFacts
from belayer.engine._wire import FromWorker, Ready, Spec
from belayer.engine.images import _criu
from belayer.engine.images._criu import CriuFailed
from belayer.engine.images.builder import Outcome, Request
from belayer.engine.images.key import Key, key_of, unsupported
from belayer.engine.images.restore import Restorer
from belayer.engine.images.store import Image, ImageRefused, ImageStore
from belayer.engine.memory import host
from belayer.engine.workers.child import Child
from belayer.engine.workers.link import WorkerLink
from belayer.errors import BelayerError
from belayer.ownership import RunLabel

QUIET_S = 10.0  # how long an engine must have been protected before an image is built beside it
BUILD_NICE = 19
BUILD_ATTEMPTS = 3  # builds that a recovery cut short
BUSY_S = 0.5  # between two looks at an image that another run builds
RARELY_S = 3600.0
_FENCE_S = 10.0


class Depot:
    """The images of one engine. Belongs to the event loop, and the thread, in which its workers are started."""

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
        self._label = label
        self._env = env
        self._log_dir = log_dir
        self._events = events
        self._store = ImageStore(config.images_bytes)
        self._key: Key | None = None
        self.why_not = "" if config.images else "engine.images is off"
        """Why this engine will never start a worker from an image; empty: it may."""
        self._restores = 0
        self._doubted = False  # the last worker restored from it failed
        self._timer: asyncio.TimerHandle | None = None
        self._builder: Child | None = None
        self._builds = 0
        self._spec: Spec | None = None
        self._closing = False
        self.available = asyncio.Event()
        """There is an image, as far as is known."""
        self.on_change: Callable[[], None] = lambda: None

    # -- workers ------------------------------------------------------------------------------------------------------
    async def find(self) -> Image | None:
        """The image to start workers from, or None; the event says why there is none."""
        if self.why_not:
            return None
        try:
            image = await asyncio.to_thread(self._look)
        except CriuFailed as error:
            self._give_up(error.what)
            return None
        except ImageRefused as error:
            self._say("refused", reason=error.what)
            image = None
        except OSError as error:
            self._give_up(f"the store of images cannot be used: {error}")
            return None
        if image is None:
            self.available.clear()
        else:
            self.available.set()
        return image

    def _look(self) -> Image | None:
        if (why := unsupported(self._config)) is not None:
            raise CriuFailed(why)
        if self._key is None:
            self._key = key_of(self._config, self._env)
        return self._store.find(self._key)

    async def start(self, spec: Callable[[], Spec], log: Path) -> tuple[WorkerLink, Ready] | None:
        """A worker from the image, ready; None if there is no image or it did not become one (an event says why)."""
        image = await self.find()
        if image is None:
            return None
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._restores += 1
        restorer = Restorer(image, self._label, self._label.dir / "engine-image" / str(self._restores))
        try:
            link = await WorkerLink.start(restorer, spec, log)
        except (BelayerError, OSError, TimeoutError) as error:
            await self._refuse(image, error.what if isinstance(error, BelayerError) else str(error))
            return None
        restored = loop.time()
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                first = await _first_word(link)
        except BaseException as error:
            await asyncio.shield(link.fence(_FENCE_S))
            if not isinstance(error, TimeoutError):
                raise
            first = f"it was not ready within {self._config.start_timeout_s:g} s"
        if isinstance(first, Ready):
            self._doubted = False
            self._say("restored", restore_s=restored - began, ready_s=loop.time() - began, pid=link.child.pid)
            return link, first
        await link.fence(_FENCE_S)
        why = f"a worker restored from it failed: {first}"
        if self._doubted:
            await self._refuse(image, why)
        else:
            # it may have been killed, or its owner: only a second failure in a row is the image's
            self._doubted = True
            self._say("doubted", reason=why)
        return None

    async def _refuse(self, image: Image, why: str) -> None:
        """It cannot be trusted: gone, for everybody."""
        self.available.clear()
        await asyncio.to_thread(self._store.discard, image)
        self._say("refused", reason=f"the engine image {image.folder.name} is refused: {why}")

    def _give_up(self, why: str) -> None:
        self.why_not = why
        self.available.clear()
        self._say("none", reason=why)

    def _say(self, state: str, **data: object) -> None:
        self.on_change()
        key = {"key": self._key.name} if self._key is not None else {}
        self._events(ev.Event(kind=ev.ENGINE_IMAGE, subject="image", data={"state": state, **key, **data}))

    # -- building -----------------------------------------------------------------------------------------------------
    def quiet(self, quiet: bool, spec: Callable[[], Spec]) -> None:
        """Tell whether the engine serves with all the protection it shall have. An image is built only meanwhile."""
        if not quiet or self._closing or self.why_not:
            self._stop_building()
        elif self._timer is None and self._builder is None and not self.available.is_set():
            self._spec = spec()
            self._timer = asyncio.get_running_loop().call_later(QUIET_S, self._build)

    def _stop_building(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._builder is not None:
            self._builder.kill()

    def _build(self) -> None:
        self._timer = None
        if self._key is None or self._spec is None or self.available.is_set():
            return
        if (failed := self._store.failure(self._key)) is not None:
            self._give_up(f"no image could be built lately: {failed}")
            return
        log = self._start_builder(self._key, self._spec, BUILD_NICE)
        assert self._builder is not None
        self._builder.on_exit(lambda how: self._built(log, how))

    async def build_now(self, spec: Spec, timeout_s: float) -> str:
        """Have the image built, at full priority, and wait for it. Returns why there is none; empty: there is one."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while await self.find() is None:
            if self.why_not or self._key is None:
                return self.why_not
            log = self._start_builder(self._key, spec, 0)
            assert self._builder is not None
            exited: asyncio.Future[str] = loop.create_future()
            self._builder.on_exit(exited.set_result)
            try:
                async with asyncio.timeout_at(deadline):
                    how = await exited
                    self._builder = None
                    outcome = outcome_of(log)
                    if outcome is not None and outcome.state == "busy":
                        await asyncio.sleep(BUSY_S)
                        continue
            except TimeoutError:
                return f"there is none after {timeout_s:g} s (see {log})"  # `close` ends the builder
            if outcome is None or outcome.state not in ("built", "exists"):
                return f"{outcome.reason if outcome else how} (see {log})"
        return ""

    def _start_builder(self, key: Key, spec: Spec, nice: int) -> Path:
        self._builds += 1
        request = Request(
            key=key.parts,
            spec=msgspec.structs.replace(
                spec, generation=0, owner_socket="", fill=True, nice=0, policy_version=0, warm=False
            ),
            vocab_size=self._model.vocab_size,
            env=self._env,
            store=str(self._store.folder),
            budget_bytes=self._config.images_bytes,
            label=self._label.name,
            work=str(self._label.dir / "engine-image" / f"build-{self._builds}"),
            start_timeout_s=self._config.start_timeout_s,
            nice=nice,
        )
        log = self._log_dir / f"image-{self._builds}.log"
        self._builder = start_builder(request, self._env, log)
        self._say("building")
        return log

    def _built(self, log: Path, how: str) -> None:
        self._builder = None
        if self._closing:
            return
        outcome = outcome_of(log)
        if outcome is None and how.startswith("killed") and self._builds < BUILD_ATTEMPTS:
            return  # a recovery came first: the next quiet time is another try
        match outcome:
            case Outcome("built" | "exists", _, nbytes, phases):
                self.available.set()
                self._say("built", nbytes=nbytes, phases=phases)
            case Outcome("busy"):
                # another run builds it; whoever needs a worker looks again
                self._timer = asyncio.get_running_loop().call_later(RARELY_S, self._build)
            case _:
                self._give_up(f"no image was built: {outcome.reason if outcome else how} (see {log})")

    async def close(self) -> None:
        """End a build, and leave nothing of CRIU's on the host."""
        self._closing = True
        if self._builder is not None:
            family = _family(self._builder.pid)
            self._stop_building()
            await self._builder.gone(_FENCE_S)
            await _all_gone(family, _FENCE_S)
            self._say("cut off")
        self._stop_building()
        if self._restores or self._builds:
            await asyncio.to_thread(_criu.forget_kernel_features)


def _family(pid: int) -> list[int]:
    """Pidfds of the processes below `pid`, whose end follows from its end, but a moment later."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            for word in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    found += [os.pidfd_open(int(word)), *_family(int(word))]
    return found


async def _all_gone(pidfds: list[int], timeout_s: float) -> None:
    """Wait for them, not longer than `timeout_s`: they are labelled, so what is left then is found."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            for pidfd in pidfds:
                ended = asyncio.Event()
                loop.add_reader(pidfd, ended.set)
                try:
                    await ended.wait()
                finally:
                    loop.remove_reader(pidfd)
    except TimeoutError:
        pass
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


async def _first_word(link: WorkerLink) -> Ready | str:
    """`Ready`, or in words what came instead."""
    heard: asyncio.Queue[FromWorker | str] = asyncio.Queue()
    link.on_message = heard.put_nowait
    link.child.on_exit(lambda how: heard.put_nowait(f"{how}\n{link.child.log_tail()}"))
    word = await heard.get()
    link.on_message = None
    link.child.on_exit(lambda _how: None)
    return word if isinstance(word, Ready | str) else f"it said {word}"


def start_builder(request: Request, env: dict[str, str], log: Path) -> Child:
    """Start the process that builds an image; from the thread whose end shall end it."""
    fd = host.memfd("belayer-image-request", 0)
    try:
        os.write(fd, msgspec.json.encode(request))
        os.lseek(fd, 0, os.SEEK_SET)
        return Child.spawn("belayer.engine.images.builder", [str(fd), str(os.getpid())], [fd], env, log)
    finally:
        os.close(fd)


def outcome_of(log: Path) -> Outcome | None:
    """What the builder said last, if it came to that."""
    lines = log.read_text(errors="replace").splitlines()
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(lines[-1] if lines else "", type=Outcome)
    return None
