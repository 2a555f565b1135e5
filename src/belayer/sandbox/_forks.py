"""Several sandboxes that go on from the state of one. Part of `manager`, which holds the sandboxes."""

from __future__ import annotations

import asyncio
import os
import secrets
from typing import TYPE_CHECKING

from belayer.sandbox import _identity
from belayer.sandbox.container import Sandbox

if TYPE_CHECKING:
    from belayer.sandbox.manager import Sandboxes

AT_ONCE_PER_CPU = 2  # more of them wait for each other: for the store's transactions and for locks of the kernel


async def fork(boxes: Sandboxes, sandbox: Sandbox, n: int) -> list[Sandbox]:
    """What `Sandboxes.fork` does."""
    boxes.ground.slots.expect(n)  # made beside the checkpoint, which mostly waits
    manifest = await sandbox.checkpoint(action=0, rollout="fork")
    tag = secrets.token_hex(3)

    some = asyncio.Semaphore(AT_ONCE_PER_CPU * len(os.sched_getaffinity(0)))

    async def one(number: int) -> Sandbox:
        async with some:
            made = await boxes.restore(f"{sandbox.name}-{tag}-{number - 1}", manifest.id)
            await made.rename(_identity.fork_hostname(sandbox.hostname, number))
            await _identity.tell_fork(made, number, n, manifest.id)
            return made

    forks = [one(number) for number in range(1, n + 1)]
    with boxes.checkpoints.pinned(manifest.id):
        done = await asyncio.gather(*forks, return_exceptions=True)
    failed = next((item for item in done if isinstance(item, BaseException)), None)
    if failed is not None:
        for number in range(n):
            await boxes.discard(f"{sandbox.name}-{tag}-{number}")
        raise failed
    return [item for item in done if isinstance(item, Sandbox)]
