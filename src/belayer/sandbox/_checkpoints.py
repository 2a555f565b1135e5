"""All checkpoints of one run: taking them, finding them, keeping within the budget, forgetting them."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from typing import Any

from belayer.checkpoint.manifest import Manifest, ProcessState, Timings, read_manifest, write_manifest
from belayer.config import SandboxConfig
from belayer.errors import CheckpointDamaged, CheckpointRefused, SandboxLost, StorageFull
from belayer.sandbox import _data
from belayer.sandbox._place import safe_name
from belayer.sandbox._runtime import HOSTNAME, Runtime
from belayer.sandbox.container import Sandbox
from belayer.sandbox.store import storage_errors

KEEP = 2  # newest checkpoints kept of each sandbox
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
    ) -> None:
        self.data = data
        self.keep = KEEP
        self.dumping = 0
        self._runtime = runtime
        self._config = config
        self._chore = chore
        self._durable = durable
        self._turn = asyncio.Semaphore(config.max_dumps)
        self._known: dict[str, list[Manifest]] = {}
        self._sequence = 0
        for manifest in data.manifests():
            self._known.setdefault(manifest.sandbox, []).append(manifest)
            self._sequence = max(self._sequence, manifest.sequence)

    def of(self, name: str) -> list[Manifest]:
        """Published checkpoints of a sandbox, oldest first."""
        return list(self._known.get(name, []))

    def names(self) -> list[str]:
        return list(self._known)

    def load(self, checkpoint_id: str) -> Manifest:
        """Raises `CheckpointDamaged` when there is no such checkpoint or its manifest is unreadable."""
        return read_manifest(self.data.manifest_path(checkpoint_id))

    async def forget(self, name: str) -> None:
        """Delete every checkpoint of a sandbox."""
        for manifest in self._known.pop(name, []):
            await asyncio.to_thread(self.data.remove, manifest.id)

    def verify(self, manifest: Manifest) -> Any:
        """Folder of the process images. Raises `CheckpointDamaged` unless both halves are as captured. Blocking."""
        folder = self.data.images(manifest.id)
        snapshot = self.data.snapshots / manifest.id
        if manifest.runtime != self._runtime.name:
            raise CheckpointDamaged(
                f"checkpoint {manifest.id} was taken by runtime {manifest.runtime}, this is {self._runtime.name}",
                next_step=f'set sandbox.runtime = "{manifest.runtime}"',
            )
        if folder is None:
            raise CheckpointDamaged(f"the process images of checkpoint {manifest.id} are gone")
        if not snapshot.is_dir():
            raise CheckpointDamaged(f"the file-system snapshot of checkpoint {manifest.id} is gone")
        if self.data.store.trees.identity(snapshot) != manifest.fs_identity:
            raise CheckpointDamaged(f"the file-system snapshot of checkpoint {manifest.id} was changed")
        _data.verify_images(folder, manifest.images)
        return folder

    # -- taking one ----------------------------------------------------------------------------------------------------
    async def capture(
        self, sandbox: Sandbox, *, action: int, context_hash: str, rollout: str, attempt: int | None
    ) -> Manifest:
        """Capture and publish. The caller keeps everybody else away from the sandbox."""
        begun = time.perf_counter()
        state = await sandbox.session.ping()
        if state.jobs:
            raise CheckpointRefused(f"sandbox {sandbox.name} still runs {state.jobs} commands that were cancelled")
        self._sequence += 1
        sequence = self._sequence
        checkpoint_id = f"{safe_name(sandbox.name)}-g{sandbox.generation}-{sequence}-{secrets.token_hex(3)}"
        async with self._turn:
            self.dumping += 1
            try:
                times, netns = await self._dump(sandbox, checkpoint_id)
                folder = self.data.memory / checkpoint_id
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
                    image=sandbox.image.name,
                    image_digest=sandbox.image.digest,
                    hostname=HOSTNAME,
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
                )
                with storage_errors("no manifest could be written"):
                    path = self.data.manifest_path(checkpoint_id)
                    await asyncio.to_thread(write_manifest, path, manifest, durable=self._durable)
            except BaseException:
                # nothing half-made stays, not even when this task is being cancelled
                await asyncio.shield(asyncio.to_thread(self.data.remove, checkpoint_id))
                raise
            finally:
                self.dumping -= 1
        known = self._known.setdefault(sandbox.name, [])
        known.append(manifest)
        for old in known[: -self.keep]:
            known.remove(old)
            self._chore(self.data.remove, old.id)
        return manifest

    async def _dump(self, sandbox: Sandbox, checkpoint_id: str) -> tuple[dict[str, float], int]:
        folder = self.data.memory / checkpoint_id
        snapshot = self.data.snapshots / checkpoint_id
        await asyncio.to_thread(self._make_room, sandbox)
        try:
            netns = os.stat(f"/proc/{sandbox.init_pid}/ns/net").st_ino
            folder.mkdir(mode=0o700)
        except FileNotFoundError as error:
            raise SandboxLost(f"sandbox {sandbox.name} went away before it was checkpointed: {error}") from error

        async def while_frozen() -> None:
            with storage_errors(f"no snapshot of sandbox {sandbox.name}"):
                await asyncio.to_thread(self.data.store.trees.snapshot, sandbox.place.tree, snapshot)

        try:
            times = await self._runtime.dump(
                sandbox.place, init_pid=sandbox.init_pid, images=folder, netns=netns, while_frozen=while_frozen
            )
        except TimeoutError as error:
            # a dump that is cut off leaves its own code in the processes: they cannot be trusted any more
            sandbox.condemn("its checkpoint passed its deadline")
            raise SandboxLost(f"sandbox {sandbox.name} is lost: {error}") from error
        except CheckpointRefused as error:
            if sandbox.dead:
                raise SandboxLost(f"sandbox {sandbox.name} died while it was checkpointed") from error
            room = os.statvfs(self.data.memory)
            if "No space left" in error.what or room.f_bavail * room.f_frsize < 1 << 20:
                raise StorageFull(
                    f"no room for the process images of sandbox {sandbox.name} in {self.data.memory}",
                    kept="the sandbox and its earlier checkpoints",
                    next_step="free memory or enlarge /dev/shm",
                ) from error
            raise
        if sandbox.dead:
            raise SandboxLost(f"sandbox {sandbox.name} died while it was checkpointed")
        return times, netns

    def _make_room(self, sandbox: Sandbox) -> None:
        """Keep within the budget of memory-backed images: the oldest ones go to disk. Blocking."""
        self.data.store.check_room()
        everything = sorted((m for group in list(self._known.values()) for m in group), key=lambda m: m.sequence)
        held = [manifest for manifest in everything if (self.data.memory / manifest.id).is_dir()]
        used = sum(manifest.image_bytes for manifest in held)
        wanted = sandbox.resident_bytes() + _SLACK
        room = os.statvfs(self.data.memory)
        free = room.f_bavail * room.f_frsize - SHM_RESERVE
        while held and (used + wanted > self._config.images_bytes or wanted > free):
            oldest = held.pop(0)
            self.data.to_disk(oldest.id)
            used -= oldest.image_bytes
            free += oldest.image_bytes
        if wanted > free or wanted > self._config.images_bytes:
            raise StorageFull(
                f"a checkpoint of {sandbox.name} needs up to {wanted >> 20} MB; {self.data.memory} has "
                f"{max(free, 0) >> 20} MB free, and sandbox.images_bytes allows {self._config.images_bytes >> 20} MB",
                kept="the sandbox and its earlier checkpoints",
                next_step="free memory, enlarge /dev/shm or raise sandbox.images_bytes",
            )
