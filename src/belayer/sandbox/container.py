"""`Sandbox`: one generation of one container, and what can be asked of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from belayer.checkpoint.manifest import Level, Manifest
from belayer.checkpoint.turns import Turn
from belayer.errors import SandboxLost, StaleSandbox
from belayer.sandbox import _health, _identity
from belayer.sandbox._attribution import Limits
from belayer.sandbox._file_calls import GRACE_S, FileCalls
from belayer.sandbox._gate import Gate
from belayer.sandbox._levels import Restored
from belayer.sandbox._order import Order
from belayer.sandbox._place import Place
from belayer.sandbox._session import DEFAULT_ENV, ExecResult, Fence, InitState, Session
from belayer.sandbox._unchanged import StillLife, changed
from belayer.sandbox.images import Image

if TYPE_CHECKING:
    from belayer.sandbox.manager import Sandboxes

HEALTH_TIMEOUT_S = 5.0
LOOKS = 5
_DEFAULTS = {f"?{name}": value for name, value in DEFAULT_ENV.items()}  # "?": unless the image sets it


class Sandbox(FileCalls):
    """A running container. Made by `Sandboxes.create` and `Sandboxes.restore`.

    A handle names one generation. After a restore, every call on an older handle raises `StaleSandbox`. Any call may
    raise `SandboxLost` when the container died or stopped answering; what a command does is always an `ExecResult`.
    """

    def __init__(
        self,
        manager: Sandboxes,
        name: str,
        *,
        place: Place,
        init_pid: int,
        session: Session,
        image: Image,
        attempt: int,
        parent: str | None,
        baseline: _health.Fingerprint | None = None,
    ) -> None:
        self.name = name
        self.generation = place.generation
        self.attempt = attempt
        self.init_pid = init_pid
        self.root = place.root
        self.image = image
        self.parent = parent
        self.session = session
        self.hostname = ""  # set by the manager
        self.restored: Restored | None = None  # from what it was restored, and what is missing; None: it was created
        self.restore_phases: dict[str, float] = {}  # seconds of each step of the restore that made it
        self.stale = False
        self.commands = 0  # sent so far, of those that may change something
        self.still: StillLife | str = "it has no checkpoint yet"  # or why its newest one is none
        self._manager = manager
        self._config = manager.config
        self._place = place
        self._why = ""
        self._ambiguous = False  # its death may have been the doing of what ran inside
        self._unheard = b""  # what background jobs said while the shell was asked for its state
        self._callbacks: list[Callable[[], None]] = []
        self._gate = Gate()
        self._shell_turn = asyncio.Lock()
        self._limits = Limits(place)
        self._watched = _health.folders_to_watch(image.path, image.digest)
        self._baseline = baseline or self._fingerprint()  # its system folders as they should be
        self._loop = asyncio.get_running_loop()
        self._ended = False
        self._pidfd = os.pidfd_open(init_pid)
        self._loop.add_reader(self._pidfd, self._init_ended)

    @property
    def dead(self) -> bool:
        """Has its init ended, or is this handle of the past? Asks the kernel, so it is true before any callback ran."""
        if self._ended or self.stale or self._pidfd < 0:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def cause(self) -> str:
        """Why it is lost, as far as that is known; empty while it is well, and when nobody knows."""
        return self._why

    def __repr__(self) -> str:
        state = "stale" if self.stale else "dead" if self.dead else "running"
        return f"<Sandbox {self.name} generation {self.generation}, {state}>"

    # -- commands ------------------------------------------------------------------------------------------------------
    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        fence: Fence | None = None,
        quiet_s: float = 0.0,
    ) -> ExecResult:
        """Run a command in a fresh process; a string runs by `bash -c`.

        Ends when the command's main process does; background processes that it left go on. On a timeout (default
        `sandbox.exec_timeout_s`), after `quiet_s` seconds without output, or when this call is cancelled, everything
        that the command started is killed. `fence` is (attempt, generation): refused with `StaleSandbox` if older than
        what the sandbox has seen.
        """
        argv = ["/bin/bash", "-c", command] if isinstance(command, str) else list(command)
        if not argv:
            raise ValueError("an empty command")
        async with self._in_use():
            result = await self.session.exec(
                argv,
                cwd=cwd or "",  # the init's default: the image's, /root, or / if that is gone
                env={**_DEFAULTS, **(env or {})},
                timeout_s=timeout_s or self._config.exec_timeout_s,
                grace_s=GRACE_S,
                limit=self._config.output_bytes,
                stdin=stdin,
                fence=fence,
                quiet_s=quiet_s,
            )
            return self._limits.explain(result)

    async def shell(
        self, command: str, *, timeout_s: float | None = None, fence: Fence | None = None, quiet_s: float = 0.0
    ) -> ExecResult:
        """Run a command in the persistent shell: directory, variables, functions and jobs stay for the next one.

        Output and error output come together in `stdout`, as on a terminal. A timeout interrupts the command like
        Ctrl-C and keeps the shell's state where bash lets itself be interrupted.
        """
        async with self._in_use(), self._shell_turn:
            result = await self.session.shell(
                command,
                timeout_s=timeout_s or self._config.exec_timeout_s,
                grace_s=GRACE_S,
                limit=self._config.output_bytes,
                fence=fence,
                quiet_s=quiet_s,
            )
            if self._unheard:
                unheard, self._unheard = self._unheard, b""
                fields = {name: getattr(result, name) for name in result.__struct_fields__}
                result = ExecResult(**{**fields, "stdout": unheard + result.stdout})
            return self._limits.explain(result)

    # -- checkpoint and restore ----------------------------------------------------------------------------------------
    async def checkpoint(
        self,
        *,
        action: int,
        context_hash: str = "",
        rollout: str = "",
        attempt: int | None = None,
        level: Level | None = None,
        turn: Turn | None = None,
    ) -> Manifest:
        """Capture file system and processes at one instant and publish the manifest.

        `level`: exactly this one, or the highest that host and state allow. What was taken stands in the manifest, and
        it is never below `sandbox.allow_level`: without processes, a restore starts a new container on the file system.
        Waits for running commands to end and holds new ones back meanwhile. Raises `CheckpointRefused` (the state
        cannot be captured) and `StorageFull`: the sandbox runs on and earlier checkpoints are kept; `SandboxLost`; and
        `CheckpointAbandoned` when `turn`, its place in the host's order of dumps, was given up.
        """
        async with self._gate.exclusive():
            self._check()
            order = Order(
                action=action, context_hash=context_hash, rollout=rollout, attempt=attempt, level=level, turn=turn
            )
            return await self._manager.checkpoints.capture(self, order)

    async def changed_since(self, checkpoint_id: str) -> str:
        """Why it may be in another state than that checkpoint holds; empty: it is in exactly that state.

        Cheap, and cautious: any command but reading counts as a change, as does any process beside the shell.
        """
        for _ in range(LOOKS):
            if isinstance(self.still, str):
                return self.still
            if self.still.checkpoint != checkpoint_id or self.dead:
                return "its newest checkpoint is another one"
            why = changed(self.still, self.processes(), root=self.root, commands=self.commands)
            if not why or self.commands != self.still.commands:
                break
            await asyncio.sleep(0.002)  # the init ends its own helper a moment after it has answered
        return why

    async def restore(self, checkpoint_id: str) -> Sandbox:
        """Replace this container by the checkpointed one: a new handle, with the next generation."""
        return await self._manager.restore(self.name, checkpoint_id)

    async def fork(self, n: int) -> list[Sandbox]:
        """`n` more sandboxes that go on from exactly this state; this one goes on too."""
        return await self._manager.fork(self, n)

    async def rename(self, hostname: str) -> None:
        """Give it another host name, as a fork gets one. Raises `SandboxLost` when it is gone."""
        async with self._gate.shared():
            self._check()
            self.commands += 1
            try:
                await asyncio.to_thread(_identity.set_hostname, self.init_pid, hostname)
            except FileNotFoundError as error:
                raise SandboxLost(f"sandbox {self.name} died before it got its host name") from error
            self.hostname = hostname

    # -- life ----------------------------------------------------------------------------------------------------------
    def on_death(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the container's init ends; at once if it has ended already."""
        if self._ended:
            self._loop.call_soon(callback)
        else:
            self._callbacks.append(callback)

    async def healthy(self) -> str | None:
        """None, or what is wrong: init dead, not answering, or system folders damaged since the last good look."""
        async with self._gate.shared():
            if self.dead and not self.stale:
                return self._why or "the sandbox's init died"
            self._check()
            now = self._fingerprint()
            wrong = _health.damage(self._baseline, now)
            if wrong:
                return wrong
            try:
                await self.session.ping(timeout_s=HEALTH_TIMEOUT_S)
            except SandboxLost as error:
                # it may wake up again, but its caller is told now that it is lost: so it has to be
                self.condemn(error.what)
                return error.what
            self._baseline = now
            return None

    def accept(self) -> None:
        """Take the system folders as they are now for good: it was the agent's own command that changed them."""
        self._baseline = self._fingerprint()

    def condemn(self, why: str) -> None:
        """Give it up because it cannot be trusted any more: kill it; whoever watches it hears of a death."""
        self._why = self._why or why
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def state(self) -> InitState:
        """What the init says of itself."""
        async with self._in_use(changes=False):
            return await self.session.ping()

    async def close(self) -> None:
        """Kill the container and remove everything of it; its checkpoints stay."""
        await self._manager.retire(self)

    def say_later(self, output: bytes) -> None:
        """Output of the shell's background jobs that the next shell command is to report. For `_lower`."""
        self._unheard += output

    @property
    def place(self) -> Place:
        """Where it lives on the host."""
        return self._place

    def processes(self) -> list[int]:
        """Host pids of everything that runs in this container."""
        return self._place.cgroup.pids()

    def resident_bytes(self) -> int:
        """Memory of all its processes; what they share is counted more than once."""
        total = 0
        for pid in self.processes():
            with contextlib.suppress(OSError, IndexError):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return total

    # -- inside --------------------------------------------------------------------------------------------------------
    @asynccontextmanager
    async def _in_use(self, *, changes: bool = True) -> AsyncIterator[None]:
        async with self._gate.shared():
            self._check()
            self.commands += changes
            try:
                yield
            except SandboxLost as error:
                self._find_cause()
                self.condemn(error.what)
                if self._ambiguous:
                    raise SandboxLost(f"{error.what}: {self._why}", ambiguous=True) from error
                raise

    def _fingerprint(self) -> _health.Fingerprint:
        return _health.fingerprint(self.root, self._watched, self._place.tree.upper)

    def _check(self) -> None:
        if self.stale:
            raise StaleSandbox(
                f"this handle of sandbox {self.name} is of generation {self.generation}, which is over",
                next_step="use the handle that the restore returned",
            )
        if self.dead:
            self._find_cause()
            why = self._why or "its init has died"
            raise SandboxLost(
                f"sandbox {self.name} is lost: {why}",
                next_step="restore it from a checkpoint",
                ambiguous=self._ambiguous,
            )

    def _init_ended(self) -> None:
        self._stop_watching()
        self._ended = True
        self._find_cause()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def _find_cause(self) -> None:
        if not self._why and self._limits.ran_out_of_memory():
            self._ambiguous = True
            self._why = "memory ran out in it: its own limit, or the host's"

    def _stop_watching(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def end(self) -> Place:
        """Make this handle stale and let go of what it holds in this process. For the manager."""
        self.stale = True
        self._callbacks.clear()
        self._stop_watching()
        self.session.close()
        return self._place
