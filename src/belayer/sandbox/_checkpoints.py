"""All checkpoints of one run: taking them, finding them, keeping within the budgets, forgetting them."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from belayer import events
from belayer.checkpoint.manifest import Level, Manifest, ProcessState, Timings, read_manifest, write_manifest
from belayer.checkpoint.retention import garbage
from belayer.checkpoint.turns import Turn, Turns
from belayer.config import SandboxConfig
from belayer.errors import CheckpointDamaged, CheckpointRefused, CheckpointRefusedForNow, SandboxLost, StorageFull
from belayer.faults import failpoints
from belayer.sandbox import _data, _memory
from belayer.sandbox._here import check_fits, here
from belayer.sandbox._image_files import describe_images, verify_images
from belayer.sandbox._levels import Levels
from belayer.sandbox._lower import take_without_processes
from belayer.sandbox._place import safe_name
from belayer.sandbox._runtime import Runtime
from belayer.sandbox._unchanged import find_still_life
from belayer.sandbox._writer import Writer, describe_failure
from belayer.sandbox.container import Sandbox
from belayer.sandbox.store import remove_tree, storage_errors

KEEP = 2  # newest checkpoints kept of each sandbox
RETRY_AFTER_S = 0.03  # what passes by itself has mostly passed by then
CANCELLED_S = 8.0  # a cancelled command is killed within five
SHM_RESERVE = 64 << 20  # bytes of memory-backed storage that are left to others
_SLACK = 4 << 20  # bytes of images beside the memory itself


class Checkpoints:
    """The published checkpoints of a run, and the one way to make another."""

    def __init__(
        self,
        data: _data.RunData,
        runtime: Runtime,
        config: SandboxConfig,
        chore: Callable[..., None],
        *,
        durable: bool,
        running: Callable[[], Mapping[str, Sandbox]],
        sink: events.EventSink,
        levels: Levels | None = None,
        published: Callable[[Sandbox, Manifest], None] = lambda sandbox, manifest: None,
    ) -> None:
        self.levels = levels or Levels(config.allow_level)
        self.data = data
        self.keep = KEEP
        self.dumping = 0
        self._runtime = runtime
        self._config = config
        self._chore = chore
        self._durable = durable
        self._running = running
        self._published = published
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self.turns = Turns(at_once=config.max_dumps)
        self.writer = Writer(data, self._tell_written, self.turns.writing)
        self._pins: Counter[str] = Counter()
        self._room = threading.Lock()
        self._known: dict[str, list[Manifest]] = {}
        self._orphans: list[Manifest] = []  # to be deleted as soon as nothing needs them
        self._sequence = 0
        for manifest in data.manifests():
            self._sequence = max(self._sequence, manifest.sequence)
            if manifest.images and data.images(manifest.id) is None:
                self._orphans.append(manifest)
                how = f"checkpoint {manifest.id} is lost: its process images are neither in memory nor on disk"
                if manifest.durability == "process":
                    how += "; the host was restarted before they were written there"
                self._emit(manifest, events.FAULT_DETECTED, fault="checkpoint", how=how, checkpoint=manifest.id)
            else:
                self._known.setdefault(manifest.sandbox, []).append(manifest)
        for group in self._known.values() if durable else ():
            if group[-1].durability == "process":
                self.writer.submit(group[-1])

    def of(self, name: str) -> list[Manifest]:
        """Published checkpoints of a sandbox, oldest first."""
        return list(self._known.get(name, []))

    def newest(self) -> list[Manifest]:
        """The newest published checkpoint of every sandbox that has one."""
        return [group[-1] for group in self._known.values() if group]

    async def forget_unreadable(self, names: list[str]) -> None:
        """Delete checkpoints of these sandboxes whose manifests cannot be read: nobody else finds them."""
        mine = tuple(f"{safe_name(name)}-g" for name in names)
        known = {manifest.id for group in self._known.values() for manifest in group}
        for path in self.data.checkpoints.glob("*.json"):
            if path.stem.startswith(mine) and path.stem not in known:
                await asyncio.to_thread(self.data.remove, path.stem)

    def generations(self) -> dict[str, int]:
        """The highest generation of each sandbox of which there was a checkpoint, also one that is lost."""
        found: dict[str, int] = {}
        for manifest in [*(m for group in self._known.values() for m in group), *self._orphans]:
            found[manifest.sandbox] = max(found.get(manifest.sandbox, 0), manifest.generation)
        return found

    def load(self, checkpoint_id: str) -> Manifest:
        """Raises `CheckpointDamaged` when there is no such checkpoint or its manifest is unreadable."""
        return read_manifest(self.data.manifest_path(checkpoint_id))

    async def forget(self, name: str) -> None:
        """Delete every checkpoint of a sandbox."""
        self._orphans += self._known.pop(name, [])
        for manifest in self._take_garbage():
            await asyncio.to_thread(self._remove, manifest)

    @contextmanager
    def pinned(self, checkpoint_id: str) -> Iterator[None]:
        """While the block lasts, the checkpoint is neither deleted nor moved."""
        self._pins[checkpoint_id] += 1
        try:
            yield
        finally:
            self._pins[checkpoint_id] -= 1
            if not self._pins[checkpoint_id]:
                del self._pins[checkpoint_id]
                self.collect()

    def collect(self) -> None:
        """Delete in the background what is not needed any more (see `checkpoint.retention`)."""
        for manifest in self._take_garbage():
            self._chore(self._remove, manifest)

    def drain(self) -> None:
        """Delete what was only waiting for its last user, and end the background writes, within `sandbox.drain_s`.

        Blocking; no sandbox runs any more.
        """
        for manifest in self._orphans:
            self.data.remove(manifest.id)
        left = self.writer.close(self._config.drain_s)
        self.turns.close()
        if left:
            how = f"{len(left)} checkpoints were not written within sandbox.drain_s = {self._config.drain_s:g} s"
            data = {"fault": "checkpoint", "how": how, "checkpoints": left}
            self._sink(events.Event(kind=events.FAULT_DETECTED, subject="sandbox", data=data))

    def verify(self, manifest: Manifest) -> Any:
        """Folder of the process images. Raises `CheckpointDamaged` unless both halves are as captured. Blocking.

        Of the snapshot it is checked that nobody has changed it. That the disk returns what was written to it is for
        the file system to check when it is read (btrfs does, with a checksum per block).
        """
        folder = self.data.images(manifest.id)
        snapshot = self.data.snapshots / manifest.id
        if manifest.level == "full" and manifest.runtime != self._runtime.name:
            raise CheckpointDamaged(
                f"checkpoint {manifest.id} was taken by runtime {manifest.runtime}, this is {self._runtime.name}",
                next_step=f'set sandbox.runtime = "{manifest.runtime}"',
            )
        self.levels.check(manifest)
        check_fits(manifest)
        if folder is None and manifest.images:
            raise CheckpointDamaged(f"the process images of checkpoint {manifest.id} are gone")
        if not snapshot.is_dir():
            raise CheckpointDamaged(f"the file-system snapshot of checkpoint {manifest.id} is gone")
        if self.data.store.trees.identity(snapshot) != manifest.fs_identity:
            raise CheckpointDamaged(f"the file-system snapshot of checkpoint {manifest.id} was changed")
        if folder is not None:
            verify_images(folder, manifest.images)
        return folder or self.data.memory / manifest.id  # `fs`: nothing is read from there

    # -- taking one ----------------------------------------------------------------------------------------------------
    async def capture(
        self,
        sandbox: Sandbox,
        *,
        action: int,
        context_hash: str,
        rollout: str,
        attempt: int | None,
        level: Level | None = None,
        turn: Turn | None = None,
    ) -> Manifest:
        """Capture and publish. The caller keeps everybody else away from the sandbox.

        `turn` is its place in the host's order, for a caller that wants to promote or abandon it meanwhile.
        """
        begun = time.perf_counter()
        asked = level
        level, reason = self.levels.start(asked)
        state = await sandbox.session.ping()
        while state.jobs:  # cancelled a moment ago, and still being killed
            if time.perf_counter() - begun > CANCELLED_S:
                raise CheckpointRefused(f"sandbox {sandbox.name} still runs {state.jobs} commands that were cancelled")
            await asyncio.sleep(0.005)
            state = await sandbox.session.ping()
        self._sequence += 1
        sequence = self._sequence
        checkpoint_id = f"{safe_name(sandbox.name)}-g{sandbox.generation}-{sequence}-{secrets.token_hex(3)}"
        async with self.turns.taken(turn or Turn()), self._undisturbed():
            self.dumping += 1
            try:
                lost: tuple[str, ...] = ()
                netns = 0
                retried = False
                while True:
                    try:
                        if level == "full":
                            times, netns = await self._dump(sandbox, checkpoint_id)
                        else:
                            times, lost = await self._without_processes(sandbox, level, checkpoint_id, state.shell_pid)
                        break
                    except CheckpointRefused as refusal:
                        again = isinstance(refusal, CheckpointRefusedForNow) and not retried
                        if not again:
                            if asked is not None:
                                raise
                            level, reason = self.levels.below(level, refusal), refusal.what
                        netns = 0
                        await asyncio.to_thread(self.data.remove, checkpoint_id)
                        if again:
                            retried = True
                            data = {"reason": refusal.what}
                            self._sink(
                                events.Event(kind=events.CHECKPOINT_RETRIED, subject=rollout or sandbox.name, data=data)
                            )
                            await asyncio.sleep(RETRY_AFTER_S)
                folder = self.data.memory / checkpoint_id
                files = await asyncio.to_thread(describe_images, folder)
                manifest = Manifest(
                    id=checkpoint_id,
                    sandbox=sandbox.name,
                    rollout=rollout,
                    attempt=sandbox.attempt if attempt is None else attempt,
                    generation=sandbox.generation,
                    action=action,
                    context_hash=context_hash,
                    level=level,
                    reason=reason,
                    lost=[*lost, *self.data.store.trees.loses],
                    image=sandbox.image.name,
                    image_digest=sandbox.image.digest,
                    hostname=sandbox.hostname,
                    fs_identity=await asyncio.to_thread(
                        self.data.store.trees.identity, self.data.snapshots / checkpoint_id
                    ),
                    process=ProcessState(state.nonce, state.jobs_started, state.shell_pid),
                    images=files,
                    netns=netns,
                    parent=sandbox.parent,
                    created=time.time(),
                    sequence=sequence,
                    image_bytes=sum(file.size for file in files.values()),
                    timings=Timings(**times, total_s=time.perf_counter() - begun),
                    runtime=self._runtime.name,
                    host=here() if level == "full" else None,
                )
                failpoints.hit("checkpoint.publish.captured", sandbox.name)
                with storage_errors("no manifest could be written"):
                    path = self.data.manifest_path(checkpoint_id)
                    await _to_its_end(write_manifest, path, manifest, durable=self._durable)
            except BaseException:
                # nothing half-made stays, not even when this task is being cancelled
                await asyncio.shield(asyncio.to_thread(self.data.remove, checkpoint_id))
                raise
            finally:
                self.dumping -= 1
        self._known.setdefault(sandbox.name, []).append(manifest)
        if level == "full" and self.data.store.trees.kind == "btrfs":
            find_still_life(sandbox, manifest, folder)
        else:
            sandbox.still = "its newest checkpoint is not one that could be compared with"
        if level != "full":
            self._emit(manifest, events.CHECKPOINT_LEVEL, id=checkpoint_id, level=level, reason=reason, lost=list(lost))
        if self._durable:
            self.writer.submit(manifest)
        self._published(sandbox, manifest)
        self.collect()
        return manifest

    @asynccontextmanager
    async def _undisturbed(self) -> AsyncIterator[None]:
        with self.writer.foreground():
            yield

    async def _dump(self, sandbox: Sandbox, checkpoint_id: str) -> tuple[dict[str, float], int]:
        folder = self.data.memory / checkpoint_id
        snapshot = self.data.snapshots / checkpoint_id
        await asyncio.to_thread(self._make_room_alone, sandbox)
        try:
            netns = os.stat(f"/proc/{sandbox.init_pid}/ns/net").st_ino
            folder.mkdir(mode=0o700)
        except FileNotFoundError as error:
            raise SandboxLost(f"sandbox {sandbox.name} went away before it was checkpointed: {error}") from error

        async def while_frozen() -> None:
            failpoints.hit("checkpoint.frozen", sandbox.name)
            try:
                with storage_errors(f"no snapshot of sandbox {sandbox.name}"):
                    if snapshot.exists():  # the one that was made before CRIU gave files another name
                        await _to_its_end(remove_tree, snapshot)
                    await _to_its_end(self.data.store.trees.snapshot, sandbox.place.tree, snapshot)
            except OSError as error:
                raise CheckpointRefused(
                    f"the file system of sandbox {sandbox.name} cannot be captured: {error}",
                    kept="the sandbox runs on, and its earlier checkpoints are kept",
                ) from error

        try:
            times = await self._runtime.dump(
                sandbox.place,
                init_pid=sandbox.init_pid,
                images=folder,
                netns=netns,
                while_frozen=while_frozen,
                repeatable=self.data.store.trees.instant,
            )
        except TimeoutError as error:
            # a dump that is cut off leaves its own code in the processes: they cannot be trusted any more
            sandbox.condemn("its checkpoint passed its deadline")
            raise SandboxLost(f"sandbox {sandbox.name} is lost: {error}") from error
        except CheckpointRefused as error:
            if sandbox.dead:
                raise SandboxLost(f"sandbox {sandbox.name} died while it was checkpointed") from error
            if "No space left" in error.what or _memory.free_bytes(self.data.memory) < 1 << 20:
                raise StorageFull(
                    f"no room for the process images of sandbox {sandbox.name} in {self.data.memory}",
                    kept="the sandbox and its earlier checkpoints",
                    next_step="free memory or enlarge /dev/shm",
                ) from error
            raise
        if sandbox.dead:
            raise SandboxLost(f"sandbox {sandbox.name} died while it was checkpointed")
        return times, netns

    async def _without_processes(
        self, sandbox: Sandbox, level: Level, checkpoint_id: str, shell_pid: int
    ) -> tuple[dict[str, float], tuple[str, ...]]:
        self.data.store.check_room()
        images, snapshot = self.data.memory / checkpoint_id, self.data.snapshots / checkpoint_id
        images.mkdir(mode=0o700)
        taken = await take_without_processes(
            sandbox, level, self.data.store.trees, images=images, snapshot=snapshot, shell_pid=shell_pid
        )
        if sandbox.dead:
            raise SandboxLost(f"sandbox {sandbox.name} died while it was checkpointed")
        return taken

    def _make_room_alone(self, sandbox: Sandbox) -> None:
        with self._room:
            self._make_room(sandbox)

    def _make_room(self, sandbox: Sandbox) -> None:
        """Keep within the budget of memory-backed images: the oldest ones go to disk. Blocking."""
        self.data.store.check_room()
        everything = [m for group in list(self._known.values()) for m in list(group)] + list(self._orphans)
        held = [manifest for manifest in everything if self.data.in_memory(manifest.id)]
        used = sum(manifest.image_bytes for manifest in held)
        # those that the background writer has copied cost nothing to let go
        held.sort(key=lambda m: (not self.data.on_disk(m.id), m.sequence))
        held = [manifest for manifest in held if manifest.id not in self._pins]
        wanted = sandbox.resident_bytes() + _SLACK
        free = _memory.free_bytes(self.data.memory) - SHM_RESERVE
        while held and (used + wanted > self._config.images_bytes or wanted > free):
            oldest = held.pop(0)
            try:
                self.data.to_disk(oldest.id)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                break  # neither has the disk room
            used -= oldest.image_bytes
            free += oldest.image_bytes
        if wanted > free or wanted > self._config.images_bytes:
            raise StorageFull(
                f"a checkpoint of {sandbox.name} needs up to {wanted >> 20} MB; {self.data.memory} has "
                f"{max(free, 0) >> 20} MB free, and sandbox.images_bytes allows {self._config.images_bytes >> 20} MB",
                kept="the sandbox and its earlier checkpoints",
                next_step="free memory, enlarge /dev/shm or raise sandbox.images_bytes",
            )

    # -- letting go ----------------------------------------------------------------------------------------------------
    def _take_garbage(self) -> list[Manifest]:
        """What is to be deleted now; nobody finds it any more."""
        running = self._running()
        pinned = set(self._pins)
        for sandbox in running.values():
            # a fork, or a restored one, has nothing else to come back from until it has a checkpoint of its own
            own = self._known.get(sandbox.name, [])
            if sandbox.parent and not any(m.generation == sandbox.generation for m in own):
                pinned.add(sandbox.parent)
        dead = garbage(
            self._known, keep=self.keep, pinned=pinned, running=set(running), budget=self._config.checkpoints_bytes
        )
        for manifest in dead:
            self._known[manifest.sandbox].remove(manifest)
        dead += [manifest for manifest in self._orphans if manifest.id not in pinned]
        self._orphans = [manifest for manifest in self._orphans if manifest.id in pinned]
        return dead

    def _remove(self, manifest: Manifest) -> None:
        if not self.data.remove(manifest.id):  # being exported
            self._orphans.append(manifest)

    # -- the background write; its thread calls the first of these -----------------------------------------------------
    def _tell_written(
        self, manifest: Manifest, written: Manifest | None, failure: Exception | None, wall_s: float
    ) -> None:
        with suppress(RuntimeError):  # the loop has ended: nobody waits to hear of it
            self._loop.call_soon_threadsafe(self._written, manifest, written, failure, wall_s)

    def _written(self, manifest: Manifest, written: Manifest | None, failure: Exception | None, wall_s: float) -> None:
        if failure is not None:
            how = describe_failure(manifest, failure)
            self._emit(manifest, events.FAULT_DETECTED, fault="checkpoint", how=how, checkpoint=manifest.id)
        elif written is not None:
            group = self._known.get(manifest.sandbox, [])
            group[:] = [written if m.id == written.id else m for m in group]
            self._emit(manifest, events.CHECKPOINT_DURABLE, id=manifest.id, bytes=manifest.image_bytes, wall_s=wall_s)
            self.collect()

    def _emit(self, manifest: Manifest, kind: str, **data: Any) -> None:
        self._sink(events.Event(kind=kind, subject=manifest.rollout or manifest.sandbox, data=data))


async def _to_its_end(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`to_thread`; when the caller is cancelled it still waits: what the thread makes is then there to be removed."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
