"""`Sandboxes`: all sandboxes of one run on this host. Creates, checkpoints, restores and removes them.

Life of a sandbox's name: created (generation 1) → lost or replaced → restored (generation 2) → … → discarded. At most one
generation of a name runs at a time, and a new one is handed out only after its state was verified.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from belayer import events as event_names
from belayer.checkpoint.manifest import Manifest, ProcessState, Timings, read_manifest, write_manifest
from belayer.config import SandboxConfig
from belayer.errors import (
    CheckpointDamaged,
    CheckpointRefused,
    RestoreFailed,
    SandboxError,
    SandboxLost,
    SandboxUnavailable,
    StorageFull,
)
from belayer.events import Event, EventSink, ignore
from belayer.ownership import RunLabel
from belayer.sandbox import _btrfs, _cgroup, _data, criu, images
from belayer.sandbox._keeper import Keeper
from belayer.sandbox._native import native_program
from belayer.sandbox._session import Session
from belayer.sandbox.container import Sandbox
from belayer.sandbox.store import Store, remove_tree, storage_errors

HOSTNAME = "sandbox"  # the same for all: what an agent observes must not depend on which container it got
KEEP = 2  # newest checkpoints kept of each sandbox
CREATE_TIMEOUT_S = 20.0
SHM_RESERVE = 64 << 20


class Sandboxes:
    """Use `await Sandboxes.open(…)`; close it before the label."""

    def __init__(
        self, config: SandboxConfig, label: RunLabel, store: Store, data: _data.RunData, keeper: Keeper, events: EventSink
    ) -> None:
        self.config = config
        self.label = label
        self.store = store
        self.dumping = 0  # checkpoints under way
        self.keep = KEEP
        self._data = data
        self._keeper = keeper
        self._events = events
        self._sandboxes: dict[str, Sandbox] = {}
        self._manifests: dict[str, list[Manifest]] = {}
        self._generations: dict[str, int] = {}
        self._sequence = 0
        self._dumps = asyncio.Semaphore(config.max_dumps)
        self._names: dict[str, asyncio.Lock] = {}
        self._closed = False
        self._chores: set[asyncio.Task[None]] = set()
        self._roots = store.root / "runs" / label.name
        self._init = self._roots / "init"
        shutil.copy(keeper.program, self._init)
        for manifest in data.manifests():
            self._manifests.setdefault(manifest.sandbox, []).append(manifest)
            self._generations[manifest.sandbox] = max(manifest.generation, self._generations.get(manifest.sandbox, 0))
            self._sequence = max(self._sequence, manifest.sequence)

    @classmethod
    async def open(
        cls, config: SandboxConfig, label: RunLabel, *, checkpoints: Path, events: EventSink = ignore
    ) -> Sandboxes:
        """Open the store, check the image and start the keeper.

        `checkpoints` is a folder of the run's directory: manifests are published there, and a later process that opens
        the same folder can restore from them. Raises `SandboxUnavailable`, `ImageError`, `RunInUse`.
        """
        if os.geteuid() != 0:
            raise SandboxUnavailable("sandboxes need root", next_step="run as root or with sudo")
        program = await asyncio.to_thread(native_program)
        criu.find_criu()
        store = await asyncio.to_thread(Store.open, config.store, config.store_bytes)
        data: _data.RunData | None = None
        try:
            images.find(store, config.image)
            data = _data.RunData(checkpoints, store)
            await asyncio.to_thread(_clean_up, store, data)
            (store.root / "runs" / label.name).mkdir(exist_ok=True)
            folders = _cgroup.run_folders(label.name)
            if not folders:
                raise SandboxUnavailable("no cgroup hierarchy is mounted", next_step="mount cgroup2 at /sys/fs/cgroup")
            mounted = (store.users_fd, store.mount_lock, store.mount_point) if store.mount_lock else None
            holder: list[Sandboxes] = []
            keeper = Keeper.start(
                program,
                label,
                cgroups=folders,
                store=mounted,
                on_death=lambda: [manager._keeper_died() for manager in holder] and None,
            )
        except BaseException:
            if data is not None:
                await asyncio.to_thread(data.close)
            await asyncio.to_thread(store.close)
            raise
        holder.append(cls(config, label, store, data, keeper, events))
        return holder[0]

    # -- the public operations -----------------------------------------------------------------------------------------
    async def create(self, name: str, *, image: str | None = None) -> Sandbox:
        """A new container from `image` (default: the configured one). An older container of that name is removed.

        Raises `ImageError`, `StorageFull`, `SandboxUnavailable`.
        """
        found = images.find(self.store, image or self.config.image)
        async with self._name_lock(name):
            await self._retire_name(name)
            self._check_room(name)
            place = await asyncio.to_thread(self._prepare, name, found.path)
            try:
                command = [str(self._keeper.program), "create", "--root", str(place.root), "--agent", str(place.agent)]
                command += ["--hostname", HOSTNAME]
                for folder in place.cgroup.folders:
                    command += ["--cgroup", str(folder)]
                try:
                    code, output = await self._keeper.run(command, deadline_s=CREATE_TIMEOUT_S)
                except TimeoutError:
                    raise SandboxUnavailable(f"container {name} did not start in {CREATE_TIMEOUT_S:.0f} s") from None
                if code:
                    raise SandboxUnavailable(f"container {name} cannot be started: {output or f'exit {code}'}")
                return await self._activate(
                    place, int(output), name=name, image=found.name, digest=found.digest, attempt=0, parent=None
                )
            except BaseException:
                await self._abandon(place)
                raise

    async def restore(self, name: str, checkpoint_id: str) -> Sandbox:
        """The checkpointed container, under `name`, as the next generation; what runs under `name` is killed first.

        Raises `CheckpointDamaged` (nothing was touched), `RestoreFailed` (the old container is gone, nothing was
        activated), `StorageFull`.
        """
        manifest = read_manifest(self._data.manifest_path(checkpoint_id))
        async with self._name_lock(name):
            folder = await asyncio.to_thread(self._verify, manifest)
            await self._retire_name(name)
            self._check_room(name)
            place = await asyncio.to_thread(self._prepare, name, self._data.snapshots / manifest.id)
            try:
                pid = await criu.restore(
                    self._keeper,
                    images=folder,
                    root=place.root,
                    agent=place.agent,
                    cgroups=place.cgroup.folders,
                    work=place.work,
                )
                return await self._activate(
                    place,
                    pid,
                    name=name,
                    image=manifest.image,
                    digest=manifest.image_digest,
                    attempt=manifest.attempt,
                    parent=manifest.id,
                    expected=manifest.process,
                )
            except SandboxLost as error:
                await self._abandon(place)
                raise RestoreFailed(f"the restored sandbox {name} does not answer: {error.what}") from error
            except BaseException:
                await self._abandon(place)
                raise

    async def fork(self, sandbox: Sandbox, n: int) -> list[Sandbox]:
        """`n` sandboxes that go on from the state of `sandbox`: one checkpoint, restored n times at once."""
        manifest = await sandbox.checkpoint(action=0, rollout="fork")
        tag = secrets.token_hex(3)
        tasks = [asyncio.create_task(self.restore(f"{sandbox.name}-{tag}-{i}", manifest.id)) for i in range(n)]
        done = await asyncio.gather(*tasks, return_exceptions=True)
        failed = next((item for item in done if isinstance(item, BaseException)), None)
        if failed is not None:
            for item in done:
                if isinstance(item, Sandbox):
                    await self.discard(item.name)
            raise failed
        return [item for item in done if isinstance(item, Sandbox)]

    def manifests(self, name: str) -> list[Manifest]:
        """Published checkpoints of a sandbox, oldest first."""
        return list(self._manifests.get(name, []))

    def newest(self, name: str) -> Manifest | None:
        """The newest published checkpoint of a sandbox."""
        found = self._manifests.get(name)
        return found[-1] if found else None

    async def discard(self, name: str) -> None:
        """Remove a sandbox and all its checkpoints."""
        async with self._name_lock(name):
            await self._retire_name(name)
            for manifest in self._manifests.pop(name, []):
                await asyncio.to_thread(self._data.remove, manifest.id)

    async def close(self) -> None:
        """Kill all sandboxes and remove everything of this run from the host.

        Checkpoints of sandboxes that were not discarded stay in the run's directory and the store for a later process.
        """
        if self._closed:
            return
        self._closed = True
        await asyncio.gather(*self._chores, return_exceptions=True)
        for sandbox in list(self._sandboxes.values()):
            await self._retire(sandbox)
        await asyncio.gather(*self._chores, return_exceptions=True)
        await asyncio.to_thread(self._remove_all)
        # the keeper shares our lock on the store and unmounts it if nobody else uses it: nothing of ours is in it now
        await self._keeper.close()
        await asyncio.to_thread(self.store.close)

    def _keeper_died(self) -> None:
        """Nobody would kill the containers if this process died now too: they end at once and count as lost."""
        self._events(
            Event(kind=event_names.FAULT_DETECTED, subject="sandbox", data={"fault": "keeper", "how": "the keeper died"})
        )
        for sandbox in self._sandboxes.values():
            self._chore(sandbox._cgroup.kill)

    # -- checkpoint ----------------------------------------------------------------------------------------------------
    async def _checkpoint(
        self, sandbox: Sandbox, *, action: int, context_hash: str, rollout: str, attempt: int | None
    ) -> Manifest:
        begun = time.perf_counter()
        state = await sandbox._session.ping()
        if state.jobs:
            raise CheckpointRefused(f"sandbox {sandbox.name} still runs {state.jobs} cancelled commands")
        async with self._dumps:
            self.dumping += 1
            try:
                return await self._capture(sandbox, state, begun, action, context_hash, rollout, attempt)
            finally:
                self.dumping -= 1

    async def _capture(
        self, sandbox: Sandbox, state: Any, begun: float, action: int, context_hash: str, rollout: str, attempt: int | None
    ) -> Manifest:
        self._sequence += 1
        sequence = self._sequence
        checkpoint_id = f"{_safe(sandbox.name)}-g{sandbox.generation}-{sequence}-{secrets.token_hex(3)}"
        folder = self._data.memory / checkpoint_id
        snapshot = self._data.snapshots / checkpoint_id
        try:
            await asyncio.to_thread(self._make_room, sandbox.name)
            netns = os.stat(f"/proc/{sandbox.init_pid}/ns/net").st_ino
            await asyncio.to_thread(folder.mkdir)

            async def while_frozen() -> None:
                with storage_errors(f"no snapshot of sandbox {sandbox.name}"):
                    await asyncio.to_thread(_btrfs.snapshot, sandbox.root, snapshot, read_only=True)

            times = await criu.dump(
                self._keeper, init_pid=sandbox.init_pid, images=folder, netns=netns, while_frozen=while_frozen
            )
            files = await asyncio.to_thread(_data.describe_images, folder)
            manifest = Manifest(
                id=checkpoint_id,
                sandbox=sandbox.name,
                rollout=rollout,
                attempt=sandbox.attempt if attempt is None else attempt,
                generation=sandbox.generation,
                action=action,
                context_hash=context_hash,
                level="full",
                image=sandbox.image,
                image_digest=sandbox.image_digest,
                hostname=HOSTNAME,
                fs_identity=await asyncio.to_thread(_btrfs.identity, snapshot),
                process=ProcessState(state.nonce, state.jobs_started, state.shell_pid),
                images=files,
                netns=netns,
                parent=sandbox.parent,
                created=time.time(),
                sequence=sequence,
                image_bytes=sum(file.size for file in files.values()),
                timings=Timings(**times, total_s=time.perf_counter() - begun),
            )
            if sandbox.dead:
                raise SandboxLost(f"sandbox {sandbox.name} died while it was checkpointed")
            with storage_errors("no manifest could be written"):
                await asyncio.to_thread(
                    write_manifest, self._data.manifest_path(checkpoint_id), manifest, durable=False
                )
        except CheckpointRefused as error:
            await asyncio.to_thread(self._data.remove, checkpoint_id)
            if sandbox.dead or not os.path.exists(f"/proc/{sandbox.init_pid}"):
                raise SandboxLost(f"sandbox {sandbox.name} died while it was checkpointed") from error
            if "No space left" in error.what:
                raise StorageFull(
                    f"no room for the process images of sandbox {sandbox.name} in {self._data.memory}",
                    kept="the sandbox and its earlier checkpoints",
                    next_step="lower sandbox.images_bytes or free /dev/shm",
                ) from error
            raise
        except FileNotFoundError as error:
            await asyncio.to_thread(self._data.remove, checkpoint_id)
            raise SandboxLost(f"sandbox {sandbox.name} went away while it was checkpointed: {error}") from error
        except BaseException:
            await asyncio.to_thread(self._data.remove, checkpoint_id)
            raise
        known = self._manifests.setdefault(sandbox.name, [])
        known.append(manifest)
        for old in known[: -self.keep]:
            known.remove(old)
            self._chore(self._data.remove, old.id)
        return manifest

    def _make_room(self, name: str) -> None:
        """Keep within the budget of memory-backed images: the oldest ones go to disk."""
        held = []
        for manifest in sorted((m for group in list(self._manifests.values()) for m in group), key=lambda m: m.sequence):
            if (self._data.memory / manifest.id).is_dir():
                held.append(manifest)
        used = sum(manifest.image_bytes for manifest in held)
        newest = self.newest(name)
        wanted = newest.image_bytes if newest else 16 << 20
        room = os.statvfs(self._data.memory)
        free = room.f_bavail * room.f_frsize - SHM_RESERVE
        while held and (used + wanted > self.config.images_bytes or wanted > free):
            oldest = held.pop(0)
            self._data.to_disk(oldest.id)
            used -= oldest.image_bytes
            free += oldest.image_bytes
        if wanted > free:
            raise StorageFull(
                f"{self._data.memory} has {max(free, 0) >> 20} MB free; a checkpoint of {name} needs about {wanted >> 20} MB",
                kept="the sandbox and its earlier checkpoints",
                next_step="free memory or enlarge /dev/shm",
            )

    def _verify(self, manifest: Manifest) -> Path:
        """Where the images are. Raises `CheckpointDamaged` unless both halves are what the manifest says."""
        folder = self._data.images(manifest.id)
        snapshot = self._data.snapshots / manifest.id
        if folder is None:
            raise CheckpointDamaged(f"the process images of checkpoint {manifest.id} are gone")
        if not snapshot.is_dir():
            raise CheckpointDamaged(f"the file-system snapshot of checkpoint {manifest.id} is gone")
        if _btrfs.identity(snapshot) != manifest.fs_identity:
            raise CheckpointDamaged(f"the file-system snapshot of checkpoint {manifest.id} was changed")
        _data.verify_images(folder, manifest.images)
        return folder

    # -- places --------------------------------------------------------------------------------------------------------
    def _prepare(self, name: str, source: Path) -> _Place:
        """Root, agent folder and cgroup of the next generation. Blocking."""
        generation = self._generations[name] = self._generations.get(name, 0) + 1
        key = f"{_safe(name)}-{generation}"
        place = _Place(self._roots, key, self.label.dir / key, generation)
        with storage_errors(f"no root for sandbox {name}"):
            _btrfs.snapshot(source, place.root)
        try:
            place.work.mkdir(parents=True)
            place.agent.mkdir()
            _btrfs.clone_file(self._init, place.agent / "init", 0o755)
            place.cgroup = _cgroup.SandboxCgroup(_cgroup.run_folders(self.label.name), key)
            place.cgroup.limit(self.config.memory_bytes, self.config.pids)
        except BaseException:
            place.remove()
            raise
        return place

    async def _activate(
        self,
        place: _Place,
        pid: int,
        *,
        name: str,
        image: str,
        digest: str,
        attempt: int,
        parent: str | None,
        expected: ProcessState | None = None,
    ) -> Sandbox:
        session = Session(place.agent, name)
        try:
            state = await session.fence((attempt, place.generation), timeout_s=5.0)
            found = ProcessState(state.nonce, state.jobs_started, state.shell_pid)
            if expected is not None and found != expected:
                raise RestoreFailed(f"sandbox {name} came back in another state than it was checkpointed in")
            place.protect_agent()
            sandbox = Sandbox(
                self,
                name,
                generation=place.generation,
                attempt=attempt,
                init_pid=pid,
                root=place.root,
                work=place.work,
                cgroup=place.cgroup,
                session=session,
                image=image,
                image_digest=digest,
                parent=parent,
            )
        except BaseException:
            session.close()
            raise
        sandbox._place = place
        self._sandboxes[name] = sandbox
        return sandbox

    async def _abandon(self, place: _Place) -> None:
        # also when we are being cancelled: a half-made container must not stay
        await asyncio.shield(asyncio.to_thread(place.remove))

    async def _retire_name(self, name: str) -> None:
        current = self._sandboxes.get(name)
        if current is not None:
            await self._retire(current)

    async def _retire(self, sandbox: Sandbox) -> None:
        """Kill a container now; remove its remains in the background."""
        if self._sandboxes.get(sandbox.name) is sandbox:
            del self._sandboxes[sandbox.name]
        if sandbox.stale:
            return
        sandbox._end()
        await asyncio.to_thread(sandbox._cgroup.kill)
        self._chore(sandbox._place.remove)

    def _chore(self, work: Callable[..., None], *args: Any) -> None:
        async def do() -> None:
            try:
                await asyncio.to_thread(work, *args)
            except OSError as error:
                # a leftover is found again by its label; it must not fail the rollout that is already over
                self._events(Event(kind=event_names.FAULT_DETECTED, subject="sandbox", data={"fault": "clean-up", "how": str(error)}))

        task = asyncio.create_task(do())
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    def _check_room(self, name: str) -> None:
        if self._closed:
            raise SandboxError("this run's sandboxes are closed")
        if len(self._sandboxes) >= self.config.max_running:
            raise SandboxUnavailable(
                f"sandbox {name}: {len(self._sandboxes)} are running already", next_step="raise sandbox.max_running"
            )

    def _name_lock(self, name: str) -> asyncio.Lock:
        return self._names.setdefault(name, asyncio.Lock())

    def _remove_all(self) -> None:
        for base in _cgroup.hierarchies().bases():
            with contextlib.suppress(OSError):
                _cgroup.remove_folder(base / self.label.name)
        remove_tree(self._roots)
        self._data.close()


class _Place:
    """Where one generation lives on the host."""

    cgroup: _cgroup.SandboxCgroup

    def __init__(self, roots: Path, key: str, work: Path, generation: int) -> None:
        self.root = roots / key
        # in the store, like the root: a container that fills it fills nothing but the store
        self.agent = roots / f"{key}.agent"
        self.work = work
        self.generation = generation

    def protect_agent(self) -> None:
        """From now on the container can neither remove its socket nor replace its init."""
        _btrfs.set_immutable(self.agent / "init", True)
        _btrfs.set_immutable(self.agent, True)

    def remove(self) -> None:
        if hasattr(self, "cgroup"):
            self.cgroup.kill()
            self.cgroup.remove()
        shutil.rmtree(self.work, ignore_errors=True)
        if self.agent.is_dir():
            remove_tree(self.agent)
        if self.root.is_dir():
            remove_tree(self.root)


def _clean_up(store: Store, data: _data.RunData) -> None:
    data.collect_garbage()
    _data.settle_store(store)


def _safe(name: str) -> str:
    """`name` as one part of a path."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip(".")[:80]
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
