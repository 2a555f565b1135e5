"""Restoring a checkpoint: a root is made of one half, the processes of the other, and both are verified.

Part of `manager`, which holds the sandboxes.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from belayer import events as names
from belayer.errors import CheckpointDamaged, RestoreFailed, SandboxLost, StorageFull
from belayer.events import Event
from belayer.faults import failpoints
from belayer.sandbox import _health, images
from belayer.sandbox._runtime import HOSTNAME
from belayer.sandbox.container import Sandbox

if TYPE_CHECKING:
    from belayer.sandbox.manager import Sandboxes

FREE_SPACE_TIMEOUT_S = 10.0


async def restore(boxes: Sandboxes, name: str, checkpoint_id: str) -> Sandbox:
    """What `Sandboxes.restore` does, with the checkpoint pinned."""
    try:
        with boxes.ground.restoring():
            return await _restore(boxes, name, checkpoint_id)
    except StorageFull:
        if boxes.running(name) is None:
            raise
    # the container that is to be replaced may itself be what fills the store: remove it, and wait for its space
    await boxes.retire_name(name)
    deadline = time.monotonic() + FREE_SPACE_TIMEOUT_S
    while True:
        await boxes.chores.done()
        await asyncio.to_thread(boxes.store.trees.settle)
        try:
            return await _restore(boxes, name, checkpoint_id)
        except StorageFull:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)


async def _restore(boxes: Sandboxes, name: str, checkpoint_id: str) -> Sandbox:
    manifest = boxes.checkpoints.load(checkpoint_id)
    async with boxes.lock_of(name):
        # a sandbox refuses generations below the newest it has seen, also one that is restored under a new name
        boxes.begin_above(name, manifest.generation)
        clock = _Clock()
        # reading the images takes as long as making the root: side by side
        checked = asyncio.create_task(asyncio.to_thread(boxes.checkpoints.verify, manifest))
        try:
            source = boxes.checkpoints.data.snapshots / manifest.id
            async with boxes.new_place(name, source, manifest.id) as (place, slot):
                clock.lap("root_s")
                folder = await checked
                clock.lap("verify_s")
                await boxes.retire_name(name)
                clock.lap("kill_s")
                image = images.of_checkpoint(boxes.store, manifest.image, manifest.image_digest)
                async with _health.looked_at(place, image) as look:
                    failpoints.hit("restore.place", name)
                    if manifest.level == "full":
                        pid = await boxes.runtime.restore(place, images=folder, slot=slot)
                    else:
                        place.environment = image.environment
                        pid = await boxes.runtime.create(place, slot)
                clock.lap("criu_s")
                failpoints.hit("restore.processes", name)
                baseline = look.result()
                sandbox = await boxes.activate(name, place, pid, image, manifest, folder, baseline)
        except SandboxLost as error:
            raise RestoreFailed(f"the restored sandbox {name} does not answer: {error.what}") from error
        except FileNotFoundError as error:
            # no root could be made: the check says which half of the checkpoint is missing
            checked_error = (await asyncio.gather(checked, return_exceptions=True))[0]
            raise (checked_error if isinstance(checked_error, CheckpointDamaged) else error) from None
        finally:
            await asyncio.wait([checked])
        if sandbox.hostname != HOSTNAME and manifest.level != "full":
            await sandbox.rename(sandbox.hostname)  # a fork's own; it is in the process images, and there are none
        clock.lap("answer_s")
        failpoints.hit("restore.answered", name)
        sandbox.restore_phases = clock.laps
        found = sandbox.restored
        if found is not None and not found.complete:
            data = {"id": found.checkpoint, "level": found.level, "reason": found.reason, "lost": list(found.lost)}
            boxes.sink(Event(kind=names.RESTORE_LEVEL, subject=name, data=data))
        return sandbox


class _Clock:
    """Seconds from one step to the next."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now
