"""Taking one checkpoint: file system and processes of one instant, described, verified later, published at once."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec

from belayer import events
from belayer.checkpoint.manifest import Level, Manifest, ProcessState, Timings, write_manifest
from belayer.checkpoint.turns import Turn, Turns
from belayer.errors import CheckpointRefused, CheckpointRefusedForNow, SandboxLost, StorageFull
from belayer.faults import failpoints
from belayer.sandbox import _data, _memory
from belayer.sandbox._here import here
from belayer.sandbox._image_files import describe_images
from belayer.sandbox._levels import Levels
from belayer.sandbox._lower import take_without_processes
from belayer.sandbox._order import Order
from belayer.sandbox._place import safe_name
from belayer.sandbox._runtime import Runtime
from belayer.sandbox._session import InitState
from belayer.sandbox._writer import Writer
from belayer.sandbox.container import Sandbox
from belayer.sandbox.store import remove_tree, storage_errors

RETRY_AFTER_S = 0.03  # what passes by itself has mostly passed by then
CANCELLED_S = 8.0  # a cancelled command is killed within five


class Taken(msgspec.Struct, kw_only=True):
    """What a dump gave: at which level and why not a higher one, what it leaves out, seconds as `Timings` has them."""

    level: Level
    reason: str
    lost: tuple[str, ...] = ()
    times: dict[str, float] = {}
    netns: int = 0


class Capture:
    """Takes the checkpoints of one run."""

    def __init__(
        self,
        data: _data.RunData,
        runtime: Runtime,
        levels: Levels,
        turns: Turns,
        writer: Writer,
        make_room: Callable[[Sandbox], None],
        sink: events.EventSink,
        *,
        durable: bool,
        sequence: int,
    ) -> None:
        """`make_room` blocks, and raises `StorageFull`. `sequence`: of the newest checkpoint that there is."""
        self.data = data
        self.levels = levels
        self.dumping = 0
        self._runtime = runtime
        self._turns = turns
        self._writer = writer
        self._make_room = make_room
        self._sink = sink
        self._durable = durable
        self._sequence = sequence

    async def take(self, sandbox: Sandbox, order: Order) -> Manifest:
        """Capture and publish. The caller keeps everybody else away from the sandbox."""
        begun = time.perf_counter()
        start, reason = self.levels.start(order.level)
        state = await self._quiet(sandbox, begun)
        self._sequence += 1
        sequence = self._sequence
        checkpoint_id = f"{safe_name(sandbox.name)}-g{sandbox.generation}-{sequence}-{secrets.token_hex(3)}"
        async with self._turns.taken(order.turn or Turn()):
            with self._writer.foreground():
                self.dumping += 1
                try:
                    first = Taken(level=start, reason=reason)
                    taken = await self._highest(sandbox, order, checkpoint_id, state, first)
                    files = await asyncio.to_thread(describe_images, self.data.memory / checkpoint_id)
                    snapshot = self.data.snapshots / checkpoint_id
                    manifest = Manifest(
                        id=checkpoint_id,
                        sandbox=sandbox.name,
                        rollout=order.rollout,
                        attempt=sandbox.attempt if order.attempt is None else order.attempt,
                        generation=sandbox.generation,
                        action=order.action,
                        context_hash=order.context_hash,
                        level=taken.level,
                        reason=taken.reason,
                        lost=[*taken.lost, *self.data.store.trees.loses],
                        image=sandbox.image.name,
                        image_digest=sandbox.image.digest,
                        hostname=sandbox.hostname,
                        fs_identity=await asyncio.to_thread(self.data.store.trees.identity, snapshot),
                        process=ProcessState(state.nonce, state.jobs_started, state.shell_pid),
                        images=files,
                        netns=taken.netns,
                        parent=sandbox.parent,
                        created=time.time(),
                        sequence=sequence,
                        image_bytes=sum(file.size for file in files.values()),
                        timings=Timings(**taken.times, total_s=time.perf_counter() - begun),
                        runtime=self._runtime.name,
                        host=here() if taken.level == "full" else None,
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
        return manifest

    async def _quiet(self, sandbox: Sandbox, begun: float) -> InitState:
        """What the init says once no command runs. Raises `CheckpointRefused`."""
        state = await sandbox.session.ping()
        while state.jobs:  # cancelled a moment ago, and still being killed
            if time.perf_counter() - begun > CANCELLED_S:
                raise CheckpointRefused(f"sandbox {sandbox.name} still runs {state.jobs} commands that were cancelled")
            await asyncio.sleep(0.005)
            state = await sandbox.session.ping()
        return state

    async def _highest(
        self, sandbox: Sandbox, order: Order, checkpoint_id: str, state: InitState, taken: Taken
    ) -> Taken:
        """Take it at the level of `taken`; once more when what was in the way passes; else at the next lower one."""
        retried = False
        while True:
            try:
                if taken.level == "full":
                    taken.times, taken.netns = await self._dump(sandbox, checkpoint_id)
                else:
                    taken.times, taken.lost = await self._without_processes(
                        sandbox, taken.level, checkpoint_id, state.shell_pid
                    )
                return taken
            except CheckpointRefused as refusal:
                again = isinstance(refusal, CheckpointRefusedForNow) and not retried
                if not again:
                    if order.level is not None:
                        raise
                    taken = Taken(level=self.levels.below(taken.level, refusal), reason=refusal.what)
                await asyncio.to_thread(self.data.remove, checkpoint_id)
                if again:
                    retried = True
                    data = {"reason": refusal.what}
                    subject = order.rollout or sandbox.name
                    self._sink(events.Event(kind=events.CHECKPOINT_RETRIED, subject=subject, data=data))
                    await asyncio.sleep(RETRY_AFTER_S)

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


async def _to_its_end(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`to_thread`; when the caller is cancelled it still waits: what the thread makes is then there to be removed."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
