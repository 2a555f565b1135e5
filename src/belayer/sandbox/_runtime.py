"""What makes containers, dumps them and brings them back: the native runtime, and the protocol it shares with others.

A runtime knows nothing of names, generations, manifests and checkpoints' storage: those are the same for all and lie in
`manager` and `_checkpoints`. It gets a `Place` whose root is ready, and a `Slot`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from belayer.errors import CheckpointRefused, CheckpointRefusedForNow, SandboxUnavailable
from belayer.sandbox import criu
from belayer.sandbox._keeper import Keeper
from belayer.sandbox._place import Place
from belayer.sandbox._slots import Slot
from belayer.sandbox._unseen import what_would_be_lost

HOSTNAME = "sandbox"  # the same for all: what an agent observes must not depend on which container it got
CREATE_TIMEOUT_S = 20.0


class Runtime(Protocol):
    """One way to run containers whose init is `native/init.c`."""

    name: str  # stands in the manifest: images of one runtime are of no use to another

    async def create(self, place: Place, slot: Slot) -> int:
        """Start a container in `place` and `slot`; returns the host's pid of its init. Raises `SandboxUnavailable`."""
        ...

    async def dump(
        self,
        place: Place,
        *,
        init_pid: int,
        images: Path,
        netns: int,
        while_frozen: Callable[[], Awaitable[None]],
        repeatable: bool,
    ) -> dict[str, float]:
        """Write process images into the empty folder `images` and let the container run on.

        `while_frozen` is awaited when the images are complete and every process is still frozen; if it is `repeatable`,
        perhaps before that too, with every process frozen. If it raises, the dump counts as failed and the exception
        passes. Returns seconds: `dump_s`, `frozen_s`, `fs_s`. Raises `CheckpointRefused`, and `TimeoutError`: the
        processes are then in an unknown state.
        """
        ...

    async def restore(self, place: Place, *, images: Path, slot: Slot) -> int:
        """Bring the images back in `place` and `slot`; returns the host's pid of the init. Raises `RestoreFailed`."""
        ...

    def remove(self, place: Place) -> None:
        """Forget what the runtime keeps of a container beside its place. All its processes are dead. Blocking."""
        ...

    async def close(self) -> None:
        """Remove what the runtime itself has on the host. All containers are dead."""
        ...


def refuse_what_would_be_lost(place: Place) -> None:
    """For a runtime that dumps by CRIU, while all is frozen. Raises `CheckpointRefused`. Blocking."""
    if lost := what_would_be_lost(place.cgroup.pids(), place.root):
        refused = CheckpointRefusedForNow if all(loss.passes for loss in lost) else CheckpointRefused
        raise refused(
            f"CRIU would lose a part of this sandbox's state: {'; '.join(loss.what for loss in lost[:4])}",
            kept="the sandbox runs on, and its earlier checkpoints are kept",
            next_step="try again after the next action; see docs/sandbox.md on what is refused",
        )


class NativeRuntime:
    """Belayer's own: the program's `create` role, and CRIU called directly."""

    name = "native"

    def __init__(self, keeper: Callable[[], Keeper]) -> None:
        self._keeper = keeper

    async def create(self, place: Place, slot: Slot) -> int:
        command = ["create", "--root", str(place.root), "--agent", str(place.agent)]
        command += ["--hostname", HOSTNAME]
        for variable, value in place.environment.items():
            command += ["--env", f"{variable}={value}"]
        try:
            code, output = await slot.run(command, CREATE_TIMEOUT_S)
        except TimeoutError:
            raise SandboxUnavailable(f"container {place.key} did not start in {CREATE_TIMEOUT_S:.0f} s") from None
        if code:
            raise SandboxUnavailable(f"container {place.key} cannot be started: {output or f'exit {code}'}")
        return int(output)

    async def dump(
        self,
        place: Place,
        *,
        init_pid: int,
        images: Path,
        netns: int,
        while_frozen: Callable[[], Awaitable[None]],
        repeatable: bool,
    ) -> dict[str, float]:
        return await criu.dump(
            self._keeper(),
            init_pid=init_pid,
            images=images,
            netns=netns,
            while_frozen=while_frozen,
            before_images=lambda: refuse_what_would_be_lost(place),
            repeatable=repeatable,
        )

    async def restore(self, place: Place, *, images: Path, slot: Slot) -> int:
        return await criu.restore(
            slot.run, images=images, root=place.root, agent=place.agent, work=place.work, close_agent=True
        )

    def remove(self, place: Place) -> None:
        """There is nothing beside the place."""

    async def close(self) -> None:
        """Its containers are the keeper's children; it has nothing of its own."""
