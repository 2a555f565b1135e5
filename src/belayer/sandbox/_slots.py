"""What a container needs and the kernel is slow to make, made ahead: a network namespace, cgroups, a helper in them.

A restore follows a death, and the kernel takes the dead container's namespace apart just then: making a new one at that
moment waited up to 40 ms for the same locks. The first process that joins a cgroup waits 10 to 17 ms for all processors
(the kernel's lock of all thread groups needs a grace period). So a helper joins them ahead and waits for its command.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import Callable
from contextlib import suppress

from belayer.errors import SandboxUnavailable
from belayer.sandbox import _cgroup
from belayer.sandbox._keeper import Keeper
from belayer.sandbox._netns import fresh_netns

REFILL_DELAY_S = 0.2


class Slot:
    """Room for one container. Whoever takes it uses it once, and calls `close`."""

    def __init__(self, netns_fd: int, cgroup: _cgroup.SandboxCgroup | None) -> None:
        self.netns_fd = netns_fd  # the container's processes hold the namespace from its start on
        self.cgroup = cgroup  # None: the place makes its own
        self._channel: socket.socket | None = None
        self._helper: asyncio.Task[tuple[int, str]] | None = None
        self._used = False

    async def park(self, keeper: Keeper) -> None:
        """Start the helper. What goes wrong in it is told by `run`."""
        assert self.cgroup is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [str(keeper.program), "park"]
        for folder in self.cgroup.folders:
            command += ["--cgroup", str(folder)]
        self._channel = ours
        with theirs:
            work = keeper.run(command, fds=(self.netns_fd, theirs.fileno()), deadline_s=None)
            self._helper = asyncio.create_task(work)
            await asyncio.sleep(0)  # the request takes its own copies of the descriptors

    @property
    def good(self) -> bool:
        """Is nothing known to be wrong with it?"""
        if self._channel is None or self._helper is None:
            return True
        poll = select.poll()
        poll.register(self._channel, select.POLLHUP)
        return not self._helper.done() and not poll.poll(0)

    async def run(self, command: list[str], deadline_s: float) -> tuple[int, str]:
        """Let the helper do `command`, a role of the program and its arguments; returns (exit code, output).

        Past the deadline it is killed: `TimeoutError`. Raises `SandboxUnavailable` when the keeper is gone.
        """
        assert self._helper is not None and self._channel is not None
        self._used = True
        with suppress(ConnectionError):  # it has ended: its output says why
            self._channel.send(b"".join(os.fsencode(part) + b"\0" for part in command))
        async with asyncio.timeout(deadline_s):
            return await self._helper

    async def close(self) -> None:
        """Let go of it. When this returns, no helper joins its cgroups any more."""
        if self._channel is not None:
            self._channel.close()  # one that was given nothing to do leaves
            self._channel = None
        if self.netns_fd >= 0:
            os.close(self.netns_fd)
            self.netns_fd = -1
        if self._helper is not None and not self._used:
            await asyncio.gather(self._helper, return_exceptions=True)

    async def discard(self) -> None:
        """`close` one that nobody has used, and remove its cgroups."""
        await self.close()
        if self.cgroup is not None:
            with suppress(OSError):  # the keeper removes them in the end
                await asyncio.to_thread(self.cgroup.remove)


class Slots:
    """A few slots made ahead."""

    def __init__(
        self, label: str, keeper: Callable[[], Keeper], *, limits: dict[str, int] | None, size: int = 2
    ) -> None:
        """`limits` of each slot's cgroup; None: no cgroups and no helpers."""
        self._label = label
        self._keeper = keeper
        self._limits = limits
        self._size = size
        self._made = 0
        self._spare: list[Slot] = []
        self._coming: list[asyncio.Task[Slot]] = []  # that somebody has said they will take
        self._refill: asyncio.Task[None] | None = None
        self._closed = False

    async def take(self) -> Slot:
        """One that the caller closes. Raises `SandboxUnavailable`."""
        slot = None
        while self._spare and slot is None:
            slot = self._spare.pop()
            if not slot.good:
                await slot.discard()
                slot = None
        if slot is None:
            slot = await self._next_coming() or await self._make()
        if not self._closed and (self._refill is None or self._refill.done()):
            self._refill = asyncio.create_task(self._fill())
        return slot

    def expect(self, n: int) -> None:
        """Begin to make what is missing for `n` that will be taken in a moment."""
        for _ in range(n - len(self._spare) - len(self._coming) if not self._closed else 0):
            self._coming.append(asyncio.create_task(self._make()))

    async def _next_coming(self) -> Slot | None:
        while self._coming:
            task = self._coming.pop()
            try:
                slot = await asyncio.shield(task)
            except SandboxUnavailable:
                continue  # whoever makes one now will say why
            except asyncio.CancelledError:
                self._coming.append(task)
                raise
            if slot.good:
                return slot
            await slot.discard()
        return None

    async def renew(self) -> None:
        """Throw the spare ones away: their keeper is gone."""
        coming, self._coming = self._coming, []
        made = await asyncio.gather(*coming, return_exceptions=True)
        self._spare += [slot for slot in made if isinstance(slot, Slot)]
        spare, self._spare = self._spare, []
        for slot in spare:
            await slot.discard()

    async def close(self) -> None:
        """Let go of the spare ones."""
        self._closed = True
        if self._refill is not None:
            self._refill.cancel()
            await asyncio.gather(self._refill, return_exceptions=True)
        await self.renew()

    async def _make(self) -> Slot:
        self._made += 1
        cgroup = _cgroup.SandboxCgroup(self._label, f"slot-{self._made}") if self._limits is not None else None
        if cgroup is not None and self._limits is not None:
            await asyncio.to_thread(cgroup.make, **self._limits)
        try:
            slot = Slot(await fresh_netns(), cgroup)
        except BaseException:
            if cgroup is not None:
                await asyncio.shield(asyncio.to_thread(cgroup.remove))
            raise
        if cgroup is not None:
            await slot.park(self._keeper())
        return slot

    async def _fill(self) -> None:
        await asyncio.sleep(REFILL_DELAY_S)  # after the restore that took the last one, not beside it
        while len(self._spare) < self._size and not self._closed:
            try:
                self._spare.append(await self._make())
            except SandboxUnavailable:
                return  # the one who needs it will try again, and tell
