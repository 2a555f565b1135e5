"""Starting the owner and knowing whether it is well."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

from belayer.engine._wire import Epoch
from belayer.engine.owner.client import OwnerClient
from belayer.engine.workers.child import Child
from belayer.errors import OwnerLost, WeightsError
from belayer.ownership import RunLabel


class OwnerProcess:
    """A running owner: its process, the driver's connection to it, and the socket that workers use."""

    def __init__(self, label: RunLabel, number: int, env: dict[str, str], log_dir: Path, device: str = "cpu") -> None:
        self.path = label.dir / f"owner-{number}.sock"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self.child = Child.spawn(
                "belayer.engine.owner.server",
                [str(self.path), str(os.getpid()), str(theirs.fileno()), device],
                [theirs.fileno()],
                env,
                log_dir / f"owner-{number}.log",
            )
        self.client = OwnerClient(ours)

    async def wait_ready(self, timeout_s: float) -> None:
        """Raises `OwnerLost` when it does not answer in time."""
        try:
            await asyncio.to_thread(self.client.state, timeout_s)
        except OwnerLost as error:
            raise OwnerLost(f"{error.what}\n{self.child.log_tail()}") from None

    async def unfit(self, epoch: Epoch | None, writing: bool, timeout_s: float) -> str | None:
        """Why nobody may be promoted onto this owner; None: it is well and `epoch` is its clean epoch.

        While an update is `writing`, a newer clean epoch is in order too: its writer has not heard of the commit yet,
        and until it has, the slot of `epoch` is not touched.
        """
        if not self.child.alive:
            return f"the owner is dead ({self.child.exit_text()})"
        try:
            state = await asyncio.to_thread(self.client.state, timeout_s)
        except (OwnerLost, WeightsError) as error:
            return error.what
        newer = epoch is not None and state.clean is not None and state.clean.number > epoch.number
        if epoch is not None and state.clean != epoch and not (writing and newer):
            return f"the owner's clean epoch is {state.clean}, not {epoch}"
        return None

    async def close(self) -> None:
        self.child.kill()
        await self.child.gone(10.0)
        self.client.close()
        self.path.unlink(missing_ok=True)
