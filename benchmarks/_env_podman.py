"""Podman as its users have it, as a baseline: its own storage and images, `checkpoint --export`, `restore --import`.

Two things are made easier for it than for its users, so that the comparison is about checkpoint and restore. Commands
go to Belayer's init over a socket (0.3 ms) instead of by `podman exec` (some 100 ms each). And CRIU is the one that
Belayer uses, since the distribution's may not work at all. The archive is not compressed: the fastest of its settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from belayer.errors import BelayerError, SandboxLost
from belayer.ownership import cache_dir, labels
from belayer.sandbox import ExecResult, Sandboxes, _loop, images
from belayer.sandbox._session import DEFAULT_ENV, Session
from belayer.sandbox.podman import Podman
from belayer.sandbox.store import Store

IMAGE = "localhost/belayer-bench"
DEADLINE_S = 120.0
_MS_BIND = 4096
_STORE = "bench-podman"


class PlainPodman:
    """Containers of podman from one image. `close` removes everything but the image, which is kept for the next run."""

    def __init__(self, manager: Sandboxes) -> None:
        self._manager = manager
        self._label = manager.label
        self._image_store = _image_store(manager.store, manager.config.image, manager.label.dir / "import")
        # on the store's own file system, so that disks are the same for all; mounted where the reaper looks
        self._disk = manager.store.root / "runs" / manager.label.name / "plain-podman"
        self._disk.mkdir()
        self._folder = manager.label.dir / "plain-root"
        self._folder.mkdir()
        self._agents = manager.store.root / "runs" / manager.label.name / "plain-agents"
        self._agents.mkdir()
        _loop.mount(str(self._disk), self._folder, "", _MS_BIND, "")
        self._podman = Podman(
            self._label.dir / "plain", driver="overlay", storage=self._folder, image_stores=(self._image_store,)
        )
        self._count = 0

    async def create(self) -> PodmanBox:
        """A new container. Raises `BelayerError` with podman's words."""
        name, agent = self._next()
        options = ["--detach", "--name", name, "--hostname", "sandbox", "--network", "none"]
        options += ["--cgroup-parent", f"/belayer/{self._label.name}/plain-podman"]
        options += ["--security-opt", "seccomp=unconfined"]  # the init installs a filter of its own
        options += ["--volume", f"{agent}:/run/agent", IMAGE, "/run/agent/init", "guest"]
        await self._run("run", *options)
        return await self._answering(name, agent)

    async def checkpoint(self, box: PodmanBox, archive: Path) -> float:
        """Write `archive` and let the container run on; returns seconds."""
        begun = time.perf_counter()
        options = ["--export", str(archive), "--compress", "none", "--leave-running"]
        await self._run("container", "checkpoint", *options, "--tcp-established", "--file-locks", box.name)
        return time.perf_counter() - begun

    async def restore(self, box: PodmanBox, archive: Path) -> PodmanBox:
        """The container in `archive` under a new name. Its socket's folder is the same: podman cannot move it."""
        name, _ = self._next()
        (box.agent / "agent.sock").unlink(missing_ok=True)
        options = ["--import", str(archive), "--name", name]
        # without --tcp-established, which podman refuses together with --name: no workload has a connection just then
        await self._run("container", "restore", *options, "--file-locks")
        return await self._answering(name, box.agent)

    async def kill(self, pid: int) -> None:
        """SIGKILL of a container's init; returns when it is dead."""
        fd = os.pidfd_open(pid)
        loop = asyncio.get_running_loop()
        try:
            gone = loop.create_future()
            loop.add_reader(fd, lambda: gone.done() or gone.set_result(None))
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            await asyncio.wait_for(gone, DEADLINE_S)
        finally:
            loop.remove_reader(fd)
            os.close(fd)

    async def remove(self, box: PodmanBox) -> None:
        """Forget a container, dead or alive."""
        await self._run("rm", "--force", "--time", "0", box.name)

    async def close(self) -> None:
        """Remove all containers and the folder. Blocking parts run in a thread."""
        await self._run("rm", "--force", "--time", "0", "--all")
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        for point in [*labels.mounts_below(self._folder), *labels.mounts_below(self._podman.folder)]:
            _loop.unmount(Path(point))
        self._folder.rmdir()
        for folder in (self._disk, self._agents, self._podman.folder):
            shutil.rmtree(folder)

    def _next(self) -> tuple[str, Path]:
        self._count += 1
        name = f"{self._label.name}-{self._count}"
        agent = self._agents / str(self._count)
        agent.mkdir()
        shutil.copy(self._manager.keeper.program, agent / "init")
        return name, agent

    async def _run(self, *arguments: str) -> str:
        # by the keeper: it adopts and reaps what podman leaves running
        code, output = await self._manager.keeper.run(self._podman.command(*arguments), deadline_s=DEADLINE_S)
        if code:
            raise BelayerError(f"podman {' '.join(arguments[:2])} failed: {output[-500:]}")
        return output

    async def _answering(self, name: str, agent: Path) -> PodmanBox:
        session = Session(agent, name)
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                await session.ping()
                break
            except SandboxLost:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.002)
        return PodmanBox(name, agent, session, self._pid)

    def _pid(self, name: str) -> int:
        return int(self._podman.call("inspect", "--format", "{{.State.Pid}}", name))


@dataclass
class PodmanBox:
    """One of them, with what a workload needs."""

    name: str
    agent: Path
    session: Session
    find_pid: Callable[[str], int]

    @property
    def pid(self) -> int:
        return self.find_pid(self.name)

    async def exec(self, command: str, *, timeout_s: float | None = None) -> ExecResult:
        return await self._exec(["/bin/bash", "-c", command], timeout_s)

    async def shell(self, command: str, *, timeout_s: float | None = None) -> ExecResult:
        return await self.session.shell(command, timeout_s=timeout_s or DEADLINE_S, grace_s=5, limit=1 << 20)

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        await self._exec(["write", path, f"{mode:o}"], None, stdin=data, builtin=True)

    async def _exec(
        self, argv: list[str], timeout_s: float | None, stdin: bytes = b"", builtin: bool = False
    ) -> ExecResult:
        return await self.session.exec(
            argv,
            cwd="/" if builtin else "",
            env=DEFAULT_ENV,
            timeout_s=timeout_s or DEADLINE_S,
            grace_s=5,
            limit=1 << 20,
            stdin=stdin,
            builtin=builtin,
        )


def bring_lo_up(pid: int) -> None:
    """Podman restores a container with its loopback interface down. Blocking."""
    subprocess.run(["nsenter", "--target", str(pid), "--net", "ip", "link", "set", "lo", "up"], check=True)


def image_is_there(store: Store, image: str) -> bool:
    """Has an earlier run imported the image already?"""
    return _place(store, image).is_dir()


def _place(store: Store, image: str) -> Path:
    return cache_dir() / _STORE / images.find(store, image).digest.removeprefix("sha256:")[:16]


def _image_store(store: Store, image: str, state: Path) -> Path:
    """Podman's image store with the sandbox image, made by the first run (about 10 s). Blocking."""
    place = _place(store, image)
    if place.is_dir():
        return place
    fresh = place.with_name(f"{place.name}.{os.getpid()}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        podman = Podman(state, driver="overlay", storage=fresh)
        source = images.find(store, image).path
        tar = subprocess.Popen(["tar", "-C", str(source), "-c", "."], stdout=subprocess.PIPE)
        try:
            command = podman.command("import", "--quiet", "-", IMAGE)
            done = subprocess.run(command, check=False, stdin=tar.stdout, capture_output=True, text=True)
        finally:
            if tar.stdout is not None:
                tar.stdout.close()
            tar.wait()
        if done.returncode or tar.returncode:
            raise BelayerError(f"podman cannot import the sandbox image: {done.stderr.strip()[-500:]}")
        with contextlib.suppress(OSError):  # another run was faster
            os.rename(fresh, place)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(state, ignore_errors=True)
    return place
