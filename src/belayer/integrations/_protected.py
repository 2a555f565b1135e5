"""Protected sandboxes for trainers and harnesses that keep the model's context themselves.

    host = ProtectedHost.open("runs/harness", Config())      # one per process; `shared_host()` makes a default one
    sandbox = await host.sandbox("task-1")                   # or host.block(host.sandbox("task-1")) without a loop
    result = await sandbox.exec("make test", timeout_s=60)   # or sandbox.blocking.exec(…)
    await sandbox.close(reward=1.0)

Every action is journalled before it is sent and its result before it is returned. Between two actions the sandbox is
checkpointed where the policy finds that it pays: that is when the harness waits for its model. When the sandbox dies,
hangs or is damaged, the newest checkpoint is restored and the actions after it are done again, and what they show is
compared with what the harness was told. If it differs, `ContextDiverged` is raised, and again by every later call: the
harness's context describes a state that exists nowhere any more, and only the harness could cut it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tarfile
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from belayer.errors import BelayerError, ContextDiverged, RequestRefused
from belayer.journal import records as r
from belayer.recovery import EnvironmentKeeper, RestartFunction
from belayer.recovery.actions import (
    Action,
    Exec,
    Exists,
    Failed,
    Interrupted,
    Read,
    Shell,
    Upload,
    Write,
    file_digest,
)
from belayer.sandbox import ExecResult, Sandbox

if TYPE_CHECKING:
    from belayer.integrations._host import ProtectedHost

_T = TypeVar("_T")
_INLINE_BYTES = 1 << 18  # a larger upload is kept as a file beside the journal


class ProtectedSandbox:
    """One environment that outlives its sandboxes. Made by `ProtectedHost.sandbox`.

    Its calls may be awaited on any event loop and are done one after another, in the order in which they were made. A
    non-zero exit or a timeout is a result. Any call may raise `ContextDiverged`, `BudgetSpent`, `RolloutFailed`,
    `CircuitOpen` or `StorageFull`; after that every later call raises the same error (`broken`).
    """

    def __init__(self, host: ProtectedHost, rollout: str, keeper: EnvironmentKeeper) -> None:
        self.id = rollout
        self.host = host
        self.broken: BelayerError | None = None
        self.reward: float | None = None  # journalled in the end, unless `close` is given another one
        self.blocking = BlockingSandbox(self)
        self._keeper = keeper
        self._turn = asyncio.Lock()
        self._calls = 0
        self._idle_since = 0.0
        self._closed = False

    @property
    def restores(self) -> int:
        """How often its sandbox was lost and brought back."""
        return self.host.journal.history(self.id).restores

    @property
    def current(self) -> Sandbox | None:
        """The sandbox that serves right now. To look at only: whatever is done to it here is not journalled."""
        return self._keeper.sandbox

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        stdin: bytes | str = b"",
        user: str | int | None = None,
    ) -> ExecResult:
        """Run one command in a fresh process, a string by `bash -c`; as `user` if that is not root.

        When this call is cancelled, the command is killed and what it did until then stays, sealed by a checkpoint.
        """
        form = command if isinstance(command, str) else list(command)
        if user not in (None, 0, "0", "root"):
            inner = ["bash", "-c", form] if isinstance(form, str) else form
            form = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", *inner]
        stdin = stdin.encode() if isinstance(stdin, str) else stdin
        return await self._act(Exec(command=form, timeout_s=timeout_s, cwd=cwd, env=env, stdin=stdin))

    async def shell(self, command: str, *, timeout_s: float | None = None) -> ExecResult:
        """Run one command in the persistent shell: its directory, variables, functions and jobs stay."""
        return await self._act(Shell(command=command, timeout_s=timeout_s))

    async def read(self, path: str) -> bytes:
        """Content of a file. Raises the `OSError` that the sandbox saw."""
        return await self._act(Read(path=path))

    async def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """Write a file, whole. Raises the `OSError` that the sandbox saw."""
        await self._act(Write(path=path, data=data.encode() if isinstance(data, str) else data, mode=mode))

    async def exists(self, path: str) -> bool:
        return await self._act(Exists(path=path))

    async def upload(self, host_path: str | Path, path: str) -> None:
        """Copy a file, or the content of a folder, to `path`. The run keeps a copy, to be used again in a replay."""
        source = Path(host_path)
        if source.is_file() and source.stat().st_size <= _INLINE_BYTES:
            await self.write(path, source.read_bytes(), mode=source.stat().st_mode & 0o777)
            return
        archive, digest = await asyncio.to_thread(_keep, source, Path(path).name, self.host.directory / "uploads")
        into = path if source.is_dir() else str(Path(path).parent)
        await self._act(Upload(path=into, archive=str(archive), digest=digest))

    async def download(self, path: str, host_path: str | Path) -> None:
        """Copy a file or a folder out of the sandbox. Not journalled: it changes nothing and no replay compares it."""
        await self._look(lambda sandbox: sandbox.download(path, host_path))

    async def close(self, reward: float | None = None) -> None:
        """Remove the sandbox and its checkpoints; `reward` is journalled. Harmless when done twice."""
        await self.host.run(self.end(reward, why="closed by its harness, which keeps the trajectory itself"))

    # -- inside ----------------------------------------------------------------------------------------------------

    async def _act(self, action: Action) -> Any:
        """On the caller's loop: one action, on the host's."""
        if self._closed:
            raise RequestRefused(f"sandbox {self.id} is closed")
        interrupt = asyncio.Event()
        work = asyncio.ensure_future(self.host.run(self._perform(action, interrupt)))
        try:
            result = await asyncio.shield(work)
        except asyncio.CancelledError:
            if not work.cancelled():
                self.host.call(interrupt.set)
                # settled before the caller goes on: what comes next must find a state that is known
                await _settled(work)
            raise
        if isinstance(result, Failed):
            raise OSError(result.errno, f"{os.strerror(result.errno)} (in the sandbox)", result.path)
        return result

    async def _perform(self, action: Action, interrupt: asyncio.Event) -> Any:
        async with self._turn:
            if interrupt.is_set():
                return Interrupted()  # it had not begun
            self._check()
            if self._idle_since:
                self._keeper.bubble_ends(time.monotonic() - self._idle_since)
            with _Guard(self):
                result = await self._keeper.act(self._calls, action, interrupt=interrupt)
                self._calls += 1
                if isinstance(result, Interrupted):
                    await self._keeper.checkpoint("an interrupted command cannot be replayed")
            self._keeper.bubble_begins()
            self._idle_since = time.monotonic()
            return result

    async def _look(self, work: Callable[[Sandbox], Coroutine[Any, Any, _T]]) -> _T:
        async def turn() -> _T:
            async with self._turn:
                self._check()
                with _Guard(self):
                    return await self._keeper.look(work)

        return await self.host.run(turn())

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken

    async def end(self, reward: float | None, *, why: str) -> None:
        """`close`, for the host's loop. `why` is journalled where there is no reward."""
        if self._closed:
            return
        self._closed = True
        self.host.forget(self)
        reward = self.reward if reward is None else reward
        if self.broken is not None:
            self.host.failed(self.id, 0, type(self.broken).__name__, self.broken.what)
        elif reward is None:
            self.host.failed(self.id, 0, "NoReward", why)
        else:
            self.host.journal.record(r.RolloutFinished(rollout=self.id, attempt=0, reward=float(reward)))
        await self._keeper.close(keep_checkpoints=False)


class BlockingSandbox:
    """A `ProtectedSandbox` for callers that block: the same calls, without `await`."""

    def __init__(self, sandbox: ProtectedSandbox) -> None:
        self._sandbox = sandbox

    def exec(self, command: str | Sequence[str], **options: Any) -> ExecResult:
        return self._block(self._sandbox.exec(command, **options))

    def shell(self, command: str, *, timeout_s: float | None = None) -> ExecResult:
        return self._block(self._sandbox.shell(command, timeout_s=timeout_s))

    def read(self, path: str) -> bytes:
        return self._block(self._sandbox.read(path))

    def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        self._block(self._sandbox.write(path, data, mode=mode))

    def exists(self, path: str) -> bool:
        return self._block(self._sandbox.exists(path))

    def upload(self, host_path: str | Path, path: str) -> None:
        self._block(self._sandbox.upload(host_path, path))

    def download(self, path: str, host_path: str | Path) -> None:
        self._block(self._sandbox.download(path, host_path))

    def close(self, reward: float | None = None) -> None:
        self._block(self._sandbox.close(reward))

    def _block(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self._sandbox.host.block(work)


class _Guard:
    """Makes an error that ends the environment stick, and a cut that nobody can make one."""

    def __init__(self, sandbox: ProtectedSandbox) -> None:
        self._sandbox = sandbox

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        sandbox = self._sandbox
        if isinstance(error, RestartFunction):
            history = sandbox.host.journal.history(sandbox.id)
            sandbox.broken = ContextDiverged(
                f"environment {sandbox.id} could not be brought back: done again, an action after the newest "
                f"checkpoint observed something else, and only {len(history.actions())} actions of the context hold",
                first=sandbox._keeper.first_loss or "unknown",
                kept=f"its journal in {sandbox.host.directory}",
                next_step="end this rollout and start it again; commands whose output differs by nature cause this: "
                "`policy.name = always` leaves fewer of them to be done again",
            )
            raise sandbox.broken from None
        if isinstance(error, BelayerError) and not isinstance(error, RequestRefused):
            sandbox.broken = sandbox.broken or error


async def _settled(work: asyncio.Future[Any]) -> None:
    """Wait for `work`, however often the waiting is cancelled. Its error is kept where the next call sees it."""
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            continue
    if not work.cancelled():
        work.exception()


def _keep(source: Path, name: str, folder: Path) -> tuple[Path, str]:
    """A tar archive of `source` in `folder`, named by its digest; of a file, as `name`."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{secrets.token_hex(8)}"
    try:
        with tarfile.open(draft, "w") as archive:
            if source.is_dir():
                for entry in sorted(source.iterdir()):
                    archive.add(entry, entry.name)
            else:
                archive.add(source, name)
        digest = file_digest(draft)
        draft.rename(folder / f"{digest}.tar")
    finally:
        draft.unlink(missing_ok=True)
    return folder / f"{digest}.tar", digest
