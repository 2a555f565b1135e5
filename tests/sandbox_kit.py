"""What the sandbox tests share: real sandboxes for the length of a block, and a workload whose state can be checked."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._env_state import ASK, SERVER, ask

from belayer.config import SandboxConfig
from belayer.events import EventSink, ignore
from belayer.ownership import RunLabel, labels, store_dir
from belayer.ownership.reap import Leftover, everything_labelled
from belayer.sandbox import ExecResult, Sandbox, Sandboxes, images
from belayer.sandbox.store import Store


@asynccontextmanager
async def sandboxes(
    checkpoints: Path, label: RunLabel | None = None, *, events: EventSink = ignore, **config: Any
) -> AsyncIterator[Sandboxes]:
    """The sandboxes of one run; afterwards nothing with its label may be left on the host."""
    own = label or RunLabel.new("test")
    try:
        manager = await Sandboxes.open(SandboxConfig(**config), own, checkpoints=checkpoints, events=events)
        try:
            yield manager
        finally:
            await manager.close()
        left = [thing for thing in labelled(own.name) if thing.kind not in OWN_FOLDERS]
        assert not left, f"left behind by close(): {[describe(thing) for thing in left]}"
    finally:
        if label is None:
            own.close()


def overlay_store() -> Path:
    """The default store's folder, with an overlay store in it that has the base image too (5 s, the first time)."""
    folder = store_dir()
    store = Store.open(kind="overlay")
    try:
        found = images.read_info(store, "base")
        if found is None or found.recipe != images.RECIPE or not (store.images / "base").is_dir():
            ours = Store.open(kind="btrfs")
            try:
                images.import_directory(store, "base", images.find(ours, "base").path)
            finally:
                ours.close()
    finally:
        store.close()
    return folder


OWN_FOLDERS = ("shm", "folder")  # of the label itself: gone when the label is closed


def describe(thing: Leftover) -> str:
    """For a failure's message: what a leftover process is."""
    if thing.kind != "process":
        return str(thing)
    try:
        lines = Path(f"/proc/{thing.name}/status").read_text().splitlines()
        where = Path(f"/proc/{thing.name}/cgroup").read_text()
    except OSError:
        return f"{thing} (gone meanwhile)"
    return (
        f"{thing} ({', '.join(line for line in lines if line.split(':')[0] in ('Name', 'State', 'PPid'))}; {where!r})"
    )


def labelled(label: str) -> list[Leftover]:
    """What carries the label, without dead processes that their (foreign) parent has not yet reaped."""
    return [thing for thing in everything_labelled() if thing.label == label and not is_zombie(thing)]


def is_zombie(thing: Leftover) -> bool:
    if thing.kind != "process":
        return False
    try:
        return Path(f"/proc/{thing.name}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def shell(sandbox: Sandbox, command: str, timeout_s: float = 20.0) -> str:
    """Output of a shell command that must succeed."""
    result = await sandbox.shell(command, timeout_s=timeout_s)
    assert result.exit_code == 0, f"{command!r}: {result}"
    return result.stdout.decode()


async def run(sandbox: Sandbox, command: str, timeout_s: float = 20.0) -> str:
    """Output of a command in a fresh process that must succeed."""
    result = await sandbox.exec(command, timeout_s=timeout_s)
    assert result.exit_code == 0, f"{command!r}: {result}"
    return result.stdout.decode()


def kill_init(sandbox: Sandbox) -> None:
    """SIGKILL of the container's init, as the kernel or an operator would."""
    os.kill(sandbox.init_pid, signal.SIGKILL)


async def died(sandbox: Sandbox, timeout_s: float = 5.0) -> float:
    """Wait for the death notice; seconds until it came."""
    begun = time.monotonic()
    gone = asyncio.Event()
    sandbox.on_death(gone.set)
    await asyncio.wait_for(gone.wait(), timeout_s)
    return time.monotonic() - begun


async def settled(manager: Sandboxes) -> None:
    """Wait until what the manager makes ahead is there: from here on it neither makes nor opens anything by itself."""
    slots = manager.ground.slots
    await eventually("the spare slots are there", lambda: slots._refill is None or slots._refill.done())
    ahead = manager.ground.ahead._spares
    await eventually("the next places are there", lambda: all(x.made is None or x.made.done() for x in ahead.values()))


async def eventually(what: str, check: Any, timeout_s: float = 5.0) -> None:
    """Wait until `check()` (a plain or async function) is true."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = check()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.02)


@dataclass
class State:
    """A sandbox with something of everything in it, and the way to see whether all of it is still there."""

    checksum: str
    asked: int
    job: str
    turn: int

    @classmethod
    async def prepare(cls, sandbox: Sandbox, size: int = 8 << 20) -> State:
        await sandbox.write("/srv/server.py", SERVER.format(data=f"os.urandom({size})").encode())
        await shell(
            sandbox, "mkdir -p '/data/a b' && cd '/data/a b' && export EXPORTED=e; plain='two words'; list=(1 2 3)"
        )
        await shell(sandbox, "greet() { echo \"hello $1 from $PWD\"; }; alias ll='ls -l'; umask 027; set -o noclobber")
        # a job that counts in memory, so that its going on can be told from its being started again
        await shell(sandbox, "(n=0; while sleep 0.05; do n=$((n+1)); echo $n >> /tmp/count; done) & job=$!")
        await shell(sandbox, "python3 /srv/server.py & server=$!")
        await sandbox.write("/data/turn", b"0")

        async def up() -> bool:
            return (await sandbox.exec(ASK)).exit_code == 0

        await eventually("the server listens", up, 15)
        checksum, asked = await ask(sandbox)
        assert checksum
        job = (await shell(sandbox, "echo $job")).strip()
        return cls(checksum, asked, job, 0)

    async def advance(self, sandbox: Sandbox) -> None:
        """Change files, memory and shell state, as an action would."""
        self.turn += 1
        await shell(
            sandbox,
            f"echo {self.turn} >| /data/turn; counter=$((counter+1)); echo {self.turn} > /data/file-{self.turn}",
        )

    def copy(self) -> State:
        return State(self.checksum, self.asked, self.job, self.turn)

    async def check(self, sandbox: Sandbox) -> None:
        """Every part is as it was when this `State` described the sandbox."""
        assert await sandbox.read("/data/turn") == str(self.turn).encode() + (b"\n" if self.turn else b"")
        assert await sandbox.exists(f"/data/file-{self.turn}") == bool(self.turn)
        assert not await sandbox.exists(f"/data/file-{self.turn + 1}")
        said = await shell(
            sandbox, 'echo "$PWD|$EXPORTED|$plain|${list[*]}|$(greet you)|${counter:-0}|$(umask)|$job|$-"'
        )
        pwd, exported, plain, items, greeting, counter, umask, job, options = said.strip().split("|")
        assert (pwd, exported, plain, items) == ("/data/a b", "e", "two words", "1 2 3")
        assert greeting == "hello you from /data/a b"
        assert (counter, umask, job) == (str(self.turn), "0027", self.job)
        assert "C" in options, "noclobber is off"
        assert "ls -l" in await shell(sandbox, "alias ll")
        jobs = await shell(sandbox, "jobs")
        assert jobs.count("Running") == 2, jobs
        checksum, asked = await ask(sandbox)
        self.asked += 1
        assert (checksum, asked) == (self.checksum, self.asked), "the server's memory is not what it was"
        before = await _count(sandbox)

        async def counted() -> bool:
            return await _count(sandbox) > before

        await eventually("the background job goes on", counted)


async def _count(sandbox: Sandbox) -> int:
    """How far the background job has counted. Its numbers have no gap: a job started again would begin at 1."""
    numbers = [int(line) for line in (await run(sandbox, "cat /tmp/count 2>/dev/null; true")).split()]
    assert numbers == list(range(1, len(numbers) + 1)), numbers[-5:]
    return len(numbers)


async def processes_like(sandbox: Sandbox, needle: str) -> list[int]:
    """Host pids inside the sandbox whose command line holds `needle`."""
    found = []
    for pid in sandbox.processes():
        try:
            if needle.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" "):
                found.append(pid)
        except OSError:
            continue
    return found


def no_memory_of(run_id: str) -> bool:
    return not (labels.SHM_DIR / f"data-{run_id}").exists()


def said(result: ExecResult) -> str:
    return result.stdout.decode(errors="replace").strip()
