"""`Sandboxes`: all sandboxes of one run on this host. Creates, restores, forks and removes them.

Life of a sandbox's name: created (generation 1) → lost or replaced → restored (generation 2) → … → discarded. At most
one generation of a name runs at a time, and a new one is handed out only after its state was verified.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from belayer import events as names
from belayer.checkpoint.manifest import Manifest, ProcessState
from belayer.config import SandboxConfig
from belayer.errors import RestoreFailed, SandboxError, SandboxUnavailable
from belayer.events import Event, EventSink, ignore
from belayer.faults import failpoints
from belayer.ownership import RunLabel
from belayer.sandbox import _cgroup, _data, _forks, _health, _restores, criu, images, podman
from belayer.sandbox._checkpoints import Checkpoints
from belayer.sandbox._chores import Chores
from belayer.sandbox._ground import Ground
from belayer.sandbox._keeper import Keeper
from belayer.sandbox._levels import Levels, restored_from
from belayer.sandbox._lower import SHELL_FILE
from belayer.sandbox._native import native_program
from belayer.sandbox._place import Place, Places
from belayer.sandbox._runtime import HOSTNAME, NativeRuntime, Runtime
from belayer.sandbox._session import Session
from belayer.sandbox._shell_state import load_shell
from belayer.sandbox._slots import Slot
from belayer.sandbox.container import Sandbox
from belayer.sandbox.images import Image
from belayer.sandbox.store import Store

ANSWER_TIMEOUT_S = 5.0  # first answer of a new or restored init


class Sandboxes:
    """Use `await Sandboxes.open(…)`; close it before the label."""

    def __init__(
        self,
        config: SandboxConfig,
        label: RunLabel,
        store: Store,
        data: _data.RunData,
        places: Places,
        sink: EventSink,
        durable: bool,
        levels: Levels,
    ) -> None:
        self.config = config
        self.levels = levels
        self.label = label
        self.store = store
        self._places = places
        self.sink = sink
        self._closed = False
        self.chores = Chores(sink)
        self._sandboxes: dict[str, Sandbox] = {}
        self._generations: dict[str, int] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._keeper = self._start_keeper()
        self.runtime = _runtime_of(config, label, lambda: self._keeper)
        self.ground = Ground(places, store, self.runtime, lambda: self._keeper, self.chores, lambda: self.dumping > 0)
        self.checkpoints = Checkpoints(
            data,
            self.runtime,
            config,
            self.chores.do,
            durable=durable,
            running=lambda: self._sandboxes,
            sink=sink,
            levels=levels,
            published=self._published,
        )
        self._generations.update(self.checkpoints.generations())

    @classmethod
    async def open(
        cls,
        config: SandboxConfig,
        label: RunLabel,
        *,
        checkpoints: Path,
        events: EventSink = ignore,
        durable: bool = False,
    ) -> Sandboxes:
        """Open the store, check the image and start the keeper.

        `checkpoints` is a folder of the run's directory: manifests are published there, and a later process that opens
        the same folder can restore from them; `durable` says that manifests survive a reboot. Raises
        `SandboxUnavailable`, `ImageError`, `RunInUse`.
        """
        if os.geteuid() != 0:
            raise SandboxUnavailable("sandboxes need root", next_step="run as root or with sudo")
        await asyncio.to_thread(native_program)
        if config.runtime == "podman":
            await asyncio.to_thread(podman.require)
        levels = await asyncio.to_thread(Levels.here, config.allow_level)
        if not _cgroup.hierarchies().bases():
            raise SandboxUnavailable("no cgroup hierarchy is mounted", next_step="mount cgroup2 at /sys/fs/cgroup")
        store = await asyncio.to_thread(
            Store.open, config.store, config.store_bytes, durable=durable, kind=config.store_kind
        )
        data: _data.RunData | None = None
        try:
            images.find(store, config.image)
            data = await asyncio.to_thread(_data.RunData, checkpoints, store)
            await asyncio.to_thread(data.collect_garbage)
            await asyncio.to_thread(_data.settle_store, store)
            _cgroup.make_run(label.name)
            places = await asyncio.to_thread(Places, store, label, config, native_program())
            return cls(config, label, store, data, places, events, durable, levels)
        except BaseException:
            if data is not None:
                await asyncio.to_thread(data.close)
            await asyncio.to_thread(store.close)
            raise

    # -- the public operations -----------------------------------------------------------------------------------------
    async def create(self, name: str, *, image: str | None = None) -> Sandbox:
        """A new container from `image` (default: the configured one). An older container of that name is removed.

        Raises `ImageError`, `StorageFull`, `SandboxUnavailable`.
        """
        found = images.find(self.store, image or self.config.image)
        async with self.lock_of(name), self.new_place(name, found.path) as (place, slot):
            await self.retire_name(name)
            place.environment = found.environment
            # looked at before anything runs: what happens to its folders from here on is damage
            async with _health.looked_at(place, found) as look:
                failpoints.hit("sandbox.create.place", name)
                pid = await self.runtime.create(place, slot)
            sandbox = await self.activate(name, place, pid, found, baseline=look.result())
            failpoints.hit("sandbox.create.answered", name)
            return sandbox

    async def restore(self, name: str, checkpoint_id: str) -> Sandbox:
        """The checkpointed container, under `name`, as the next generation; what runs under `name` is killed first.

        Raises `CheckpointDamaged` (nothing was touched), `RestoreFailed` (the old container is gone, nothing was
        activated), `StorageFull`.
        """
        with self.checkpoints.pinned(checkpoint_id), self.checkpoints.writer.foreground():
            return await _restores.restore(self, name, checkpoint_id)

    async def fork(self, sandbox: Sandbox, n: int) -> list[Sandbox]:
        """`n` sandboxes that go on from the state of `sandbox`: one checkpoint, restored n times.

        Each has a host name, a network and a seed of its own and was told so; see `_identity`. Either all are made or
        none: raises as `restore` does, and `SandboxError` when a hook in one of them fails.
        """
        return await _forks.fork(self, sandbox, n)

    def manifests(self, name: str) -> list[Manifest]:
        """Published checkpoints of a sandbox, oldest first."""
        return self.checkpoints.of(name)

    def newest(self, name: str) -> Manifest | None:
        """The newest published checkpoint of a sandbox."""
        found = self.checkpoints.of(name)
        return found[-1] if found else None

    def running(self, name: str) -> Sandbox | None:
        """The sandbox of that name, if one is held just now."""
        return self._sandboxes.get(name)

    @property
    def keeper(self) -> Keeper:
        """The process that starts helpers on the host, and ends everything of this run if this process dies."""
        return self._keeper

    def begin_above(self, name: str, generation: int) -> None:
        """The next generation of `name` is above `generation`: what an earlier process has handed out is over."""
        self._generations[name] = max(self._generations.get(name, 0), generation)

    @property
    def dumping(self) -> int:
        """Checkpoints under way."""
        return self.checkpoints.dumping

    async def discard(self, name: str) -> None:
        """Remove a sandbox and all its checkpoints."""
        async with self.lock_of(name):
            await self.retire_name(name)
            self.ground.ahead.drop(name)
            await self.checkpoints.forget(name)
        self._locks.pop(name, None)

    async def close(self) -> None:
        """Kill all sandboxes and remove everything of this run from the host.

        Checkpoints of sandboxes that were not discarded stay in the run's directory and the store for a later process.
        """
        if self._closed:
            return
        self._closed = True
        self.ground.hurry()
        for sandbox in list(self._sandboxes.values()):
            await self.retire(sandbox)
        await self.chores.end()
        failures: list[Exception] = []
        # each of these whatever happened to the ones before. The keeper shares our lock on the store and unmounts it if
        # nobody else uses it, so it goes when nothing of ours is in the store any more
        for step in (
            self.ground.close,
            self.runtime.close,
            lambda: asyncio.to_thread(self._places.remove),
            lambda: asyncio.to_thread(self.checkpoints.drain),
            self._close_data,
            self._keeper.close,
            lambda: asyncio.to_thread(self.store.close),
            lambda: asyncio.to_thread(criu.forget_kernel_features),
        ):
            try:
                await step()
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]

    async def _close_data(self) -> None:
        for how in await asyncio.to_thread(self.checkpoints.data.close):
            data = {"fault": "checkpoint", "how": how}
            self.sink(Event(kind=names.FAULT_DETECTED, subject="sandbox", data=data))

    async def retire(self, sandbox: Sandbox) -> None:
        """Kill one container now; its remains are removed in the background. Its checkpoints stay."""
        if self._sandboxes.get(sandbox.name) is sandbox:
            del self._sandboxes[sandbox.name]
            self._tell_running()
        if sandbox.stale:
            return
        place = sandbox.end()
        await asyncio.shield(asyncio.to_thread(place.cgroup.kill))
        self.chores.start(self.ground.remove_later(place))

    def _published(self, sandbox: Sandbox, manifest: Manifest) -> None:
        source = self.checkpoints.data.snapshots / manifest.id
        self.ground.ahead.want(sandbox.name, manifest.id, source, sandbox.processes)

    # -- for `_restores`, and inside -----------------------------------------------------------------------------------
    @asynccontextmanager
    async def new_place(self, name: str, source: Path, checkpoint: str = "") -> AsyncIterator[tuple[Place, Slot]]:
        """The ground of the next generation of `name`; see `Ground.taken`."""
        if self._closed:
            raise SandboxError("this run's sandboxes are closed")
        if len(self._sandboxes.keys() - {name}) >= self.config.max_running:
            raise SandboxUnavailable(
                f"sandbox {name}: {len(self._sandboxes)} are running already", next_step="raise sandbox.max_running"
            )
        generation = self._generations[name] = self._generations.get(name, 0) + 1
        async with self.ground.taken(name, generation, source, checkpoint) as (place, slot):
            yield place, slot

    async def activate(
        self,
        name: str,
        place: Place,
        pid: int,
        image: Image,
        manifest: Manifest | None = None,
        images: Path | None = None,
        baseline: _health.Fingerprint | None = None,
    ) -> Sandbox:
        attempt = manifest.attempt if manifest else 0
        session = Session(place.agent, name, pid)
        try:
            # first of all: what the container's processes cannot do from here on need not be reckoned with
            await asyncio.to_thread(self._settle_in, place, image)
            state = await session.ping(timeout_s=ANSWER_TIMEOUT_S)
            found = ProcessState(state.nonce, state.jobs_started, state.shell_pid)
            if manifest is not None and manifest.level == "full" and found != manifest.process:
                raise RestoreFailed(f"sandbox {name} came back in another state than it was checkpointed in")
            attempt = max(attempt, state.attempt)
            await session.fence((attempt, place.generation))
            if images is not None and (images / SHELL_FILE).exists():
                await load_shell(session, name, await asyncio.to_thread((images / SHELL_FILE).read_bytes))
            parent = manifest.id if manifest else None
            sandbox = Sandbox(
                self,
                name,
                place=place,
                init_pid=pid,
                session=session,
                image=image,
                attempt=attempt,
                parent=parent,
                baseline=baseline,
            )
        except BaseException:
            session.close()
            raise
        sandbox.restored = restored_from(manifest) if manifest else None
        sandbox.hostname = manifest.hostname if manifest else HOSTNAME
        self._sandboxes[name] = sandbox
        self._tell_running()
        return sandbox

    def _tell_running(self) -> None:
        self.sink(Event(kind=names.SANDBOXES_RUNNING, data={"count": len(self._sandboxes)}))

    def _settle_in(self, place: Place, image: Image) -> None:
        place.protect_agent()
        if self.config.cpus:
            place.cgroup.limit_cpu(self.config.cpus)
        _health.folders_to_watch(image.path, image.digest)  # kept for all sandboxes of this image

    async def retire_name(self, name: str) -> None:
        current = self._sandboxes.get(name)
        if current is not None:
            await self.retire(current)

    def _start_keeper(self) -> Keeper:
        mounted = None
        if self.store.mount_lock is not None and self.store.mount_point is not None:
            mounted = (self.store.users_fd, self.store.mount_lock, self.store.mount_point)
        return Keeper.start(
            native_program(),
            self.label,
            cgroups=_cgroup.run_folders(self.label.name),
            store=mounted,
            on_death=self._keeper_died,
        )

    def _keeper_died(self) -> None:
        """Without it nobody would kill the containers if this process died too: they end now and count as lost."""
        if self._closed:
            return
        self.sink(
            Event(kind=names.FAULT_DETECTED, subject="sandbox", data={"fault": "keeper", "how": "the keeper died"})
        )
        for sandbox in self._sandboxes.values():
            sandbox.condemn("the keeper of this run died")
        self._keeper = self._start_keeper()
        self.chores.start(self.ground.slots.renew())

    def lock_of(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())


def _runtime_of(config: SandboxConfig, label: RunLabel, keeper: Callable[[], Keeper]) -> Runtime:
    if config.runtime == "podman":
        return podman.PodmanRuntime(keeper, label)
    return NativeRuntime(keeper)
