"""The published checkpoints of one run: finding them, keeping within the budgets, forgetting them, making another.

How one is taken is `_capture`'s, whether one can be trusted `_trust`'s.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from belayer import events
from belayer.checkpoint.manifest import Manifest, read_manifest
from belayer.checkpoint.retention import garbage
from belayer.checkpoint.turns import Turns
from belayer.config import SandboxConfig
from belayer.sandbox import _data
from belayer.sandbox._capture import Capture
from belayer.sandbox._levels import Levels
from belayer.sandbox._order import Order
from belayer.sandbox._place import safe_name
from belayer.sandbox._room import make_room
from belayer.sandbox._runtime import Runtime
from belayer.sandbox._trust import verify
from belayer.sandbox._unchanged import find_still_life
from belayer.sandbox._writer import Writer, describe_failure
from belayer.sandbox.container import Sandbox

KEEP = 2  # newest checkpoints kept of each sandbox


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
        sequence = 0
        for manifest in data.manifests():
            sequence = max(sequence, manifest.sequence)
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
        self._capture = Capture(
            data,
            runtime,
            self.levels,
            self.turns,
            self.writer,
            self._make_room,
            sink,
            durable=durable,
            sequence=sequence,
        )

    @property
    def dumping(self) -> int:
        """Checkpoints under way."""
        return self._capture.dumping

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

    def verify(self, manifest: Manifest) -> Path:
        """Folder of the process images. Raises `CheckpointDamaged`, `CheckpointUnfit`; see `_trust`. Blocking."""
        return verify(self.data, self._runtime.name, self.levels, manifest)

    # -- taking one ----------------------------------------------------------------------------------------------------
    async def capture(self, sandbox: Sandbox, order: Order) -> Manifest:
        """Capture and publish. The caller keeps everybody else away from the sandbox."""
        manifest = await self._capture.take(sandbox, order)
        self._known.setdefault(sandbox.name, []).append(manifest)
        if manifest.level == "full" and self.data.store.trees.kind == "btrfs":
            find_still_life(sandbox, manifest, self.data.memory / manifest.id)
        else:
            sandbox.still = "its newest checkpoint is not one that could be compared with"
        if manifest.level != "full":
            about = {"level": manifest.level, "reason": manifest.reason, "lost": manifest.lost}
            self._emit(manifest, events.CHECKPOINT_LEVEL, id=manifest.id, **about)
        if self._durable:
            self.writer.submit(manifest)
        self._published(sandbox, manifest)
        self.collect()
        return manifest

    def _make_room(self, sandbox: Sandbox) -> None:
        with self._room:
            manifests = [m for group in list(self._known.values()) for m in list(group)] + list(self._orphans)
            make_room(self.data, sandbox, manifests, self._pins, self._config.images_bytes)

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
