"""Environment recovery: SIGKILL of a sandbox's init, against making the environment again.

Subject: the time from the signal until the first command has been answered by the fully restored container. Before
every kill the sandbox is changed by one more action and checkpointed, so each sample restores a state of its own, on
top of a chain of restores. After the clock has stopped, files, shell variables, the memory's checksum, background jobs
and servers are compared with what they were at the checkpoint; one difference fails the benchmark.

Baselines, between two kills:
  new_container_replay   a new container, and every action of the workload again, up to the same state
  fs_only_restore        a new container on the checkpoint's file system, and the actions again that made processes and
                         shell state (what a restore without process images needs for the same state)
  podman                 checkpoint and restore by podman, where it is installed
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from belayer.checkpoint.manifest import Manifest
from belayer.config import load_config
from belayer.ownership import RunLabel
from belayer.ownership.reap import live_labels
from belayer.sandbox import ExecResult, Sandbox, Sandboxes, _btrfs, images

SAMPLES = {True: (3, 7), False: (5, 15)}  # quick: (at least, at most) per workload
BUDGET_S = {True: 7.0, False: 60.0}  # per workload; past it no further sample begins
MEMORY_BYTES = 100 << 20
FILES = 20_000
READY_S = 30.0
IMAGE_PREFIX = "bench-"

# memory that can be made again exactly, and says its checksum into a file when asked by a signal
_MEMORY = f"""
import hashlib, os, signal
data = hashlib.shake_128(b"belayer").digest({MEMORY_BYTES})
def tell(*_):
    with open("/tmp/memory.new", "w") as file:
        file.write(hashlib.sha256(data).hexdigest())
    os.rename("/tmp/memory.new", "/tmp/memory")
signal.signal(signal.SIGUSR1, tell)
open("/tmp/memory-ready", "w").close()
while True:
    signal.pause()
"""
# counts in memory how often it was asked
_SERVER = """
import http.server
asked = 0
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global asked
        asked += 1
        body = str(asked).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""
_ASK = "exec 9<>/dev/tcp/127.0.0.1/8000 && printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&9 && cat <&9"
_MAKE_FILES = f"""
import os
for number in range({FILES}):
    if number % 200 == 0:
        folder = f"/data/tree/{{number // 200}}"
        os.makedirs(folder)
    with open(f"{{folder}}/{{number}}", "wb") as file:
        file.write(number.to_bytes(4, "little") * 512)
"""
_TEST = """
import unittest, calculator
class Add(unittest.TestCase):
    def test_add(self):
        self.assertEqual(calculator.add(2, 2), 4)
"""


@dataclass(frozen=True)
class Action:
    """One action of a workload. `files_only`: its whole effect is in the file system."""

    command: str
    files_only: bool = False


@dataclass(frozen=True)
class Workload:
    """`setup` is done once; `digest` is a command whose output describes the files."""

    name: str
    setup: list[Action]
    digest: str = "cat /data/* 2>/dev/null"
    has_memory: bool = False
    has_server: bool = False


_SHELL = [
    Action("mkdir -p /data && echo begun > /data/log", files_only=True),
    Action("cd /data && export MODE=bench && words='two words' && list=(1 2 3)"),
    Action('step() { turn=$1; echo "$words $1" >> /data/log; }'),
    Action("(while sleep 0.2; do :; done) & job=$!"),
]
_IDLE = Workload("idle shell", _SHELL)
_HEAP = Workload(
    "process with 100 MB",
    [
        *_SHELL,
        Action(f"cat > /data/memory.py <<'END'\n{_MEMORY}\nEND", files_only=True),
        Action(
            "rm -f /tmp/memory-ready; python3 /data/memory.py & memory=$!;"
            " until test -e /tmp/memory-ready; do sleep 0.02; done"
        ),
    ],
    has_memory=True,
)
_HTTP = Workload(
    "HTTP server",
    [
        *_SHELL,
        Action(f"cat > /data/server.py <<'END'\n{_SERVER}\nEND", files_only=True),
        Action(f"python3 /data/server.py & server=$!; until ({_ASK}) >/dev/null 2>&1; do sleep 0.02; done"),
    ],
    has_server=True,
)
_TREE = Workload(
    "20,000 changed files",
    [*_SHELL, Action(f"python3 - <<'END'\n{_MAKE_FILES}\nEND", files_only=True)],
    digest="cat /data/log; find /data/tree -type f | wc -l; cat /data/tree/*/* | sha256sum",
)
_GIT = Workload(
    "git edit and test",
    [
        *_SHELL,
        Action(
            "export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b"
            " GIT_AUTHOR_DATE=2026-01-01T00:00:00Z GIT_COMMITTER_DATE=2026-01-01T00:00:00Z"
        ),
        Action(
            f"git init -q -b main /data/repo && cat > /data/repo/test_calculator.py <<'END'\n{_TEST}\nEND",
            files_only=True,
        ),
        Action("printf 'def add(a, b):\\n    return a - b\\n' > /data/repo/calculator.py", files_only=True),
        Action("(cd /data/repo && git add . && git commit -qm first)", files_only=True),
        Action("! (cd /data/repo && python3 -B -m unittest -q) >/data/before 2>/dev/null", files_only=True),
        Action("sed -i 's/a - b/a + b/' /data/repo/calculator.py", files_only=True),
        Action("(cd /data/repo && python3 -B -m unittest -q) >/data/after 2>/dev/null", files_only=True),
        Action("(cd /data/repo && git commit -qam second)", files_only=True),
    ],
    digest="cat /data/log /data/repo/calculator.py; cd /data/repo && git log --format='%H %s' && git status --short",
)
WORKLOADS = {True: [_IDLE, _HEAP, _HTTP], False: [_IDLE, _HEAP, _HTTP, _TREE, _GIT]}


def bench(quick: bool) -> dict[str, Any]:
    """Run it; the result is in the form of every bench: cells with samples, medians, ratios and checks."""
    cells = asyncio.run(_bench(quick))
    return {"ok": all(_passed(cell["checks"]) for cell in cells), "cells": cells}


def _passed(checks: dict[str, int]) -> bool:
    return checks["restores_checked"] > 0 and not any(n for name, n in checks.items() if name != "restores_checked")


async def _bench(quick: bool) -> list[dict[str, Any]]:
    cells = []
    with RunLabel.new("bench env") as label, tempfile.TemporaryDirectory(prefix="belayer-bench-") as folder:
        manager = await Sandboxes.open(load_config().sandbox, label, checkpoints=Path(folder) / "checkpoints")
        try:
            _remove_images_of_dead_runs(manager)
            for workload in WORKLOADS[quick]:
                cells.append(await _Cell(manager, workload).run(*SAMPLES[quick], BUDGET_S[quick]))
        finally:
            await manager.close()
    return cells


@dataclass
class _State:
    """What a sandbox held at a checkpoint."""

    files: str
    memory: str
    asked: int
    turn: int


@dataclass
class _Cell:
    """All samples of one workload."""

    manager: Sandboxes
    workload: Workload
    subject: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    checkpoints: list[Manifest] = field(default_factory=list)
    replays: list[float] = field(default_factory=list)
    fs_only: list[float] = field(default_factory=list)
    checks: dict[str, int] = field(default_factory=dict)

    async def run(self, least: int, most: int, budget_s: float) -> dict[str, Any]:
        names = ("files_changed", "shell_changed", "memory_changed", "jobs_lost", "http_failed", "baseline_differs")
        self.checks = {"restores_checked": 0, **dict.fromkeys(names, 0)}
        box = await self.manager.create("subject")
        await _perform(box, self.workload.setup)
        end = time.monotonic() + budget_s
        for sample in range(most):
            if sample >= least and time.monotonic() > end:
                break
            await _perform(box, [_turn(sample)])
            state = await self._look(box, sample)
            manifest = await box.checkpoint(action=sample)
            self.checkpoints.append(manifest)
            await _perform(box, [Action("step lost; echo lost > /data/lost; cd /; unset MODE; kill $job")])
            box = await self._kill_and_restore(box, manifest)
            await self._check(box, state)
            await self._baselines(manifest, state)
        await self.manager.discard("subject")
        return self._result()

    async def _kill_and_restore(self, box: Sandbox, manifest: Manifest) -> Sandbox:
        seen = asyncio.get_running_loop().create_future()
        box.on_death(lambda: seen.set_result(time.perf_counter()))
        killed = time.perf_counter()
        os.kill(box.init_pid, signal.SIGKILL)
        detected = await asyncio.wait_for(seen, READY_S)
        fresh = await self.manager.restore(box.name, manifest.id)
        restored = time.perf_counter()
        first = await fresh.exec("true")
        answered = time.perf_counter()
        _must(first, "the first command after the restore")
        self.subject.append(answered - killed)
        # root and verify run side by side, so the phases inside may add up to more than the restore
        inside = {f"restore.{name}": seconds for name, seconds in fresh.restore_phases.items()}
        self.phases.append(
            {
                "detect_s": detected - killed,
                "restore_s": restored - detected,
                **inside,
                "first_exec_s": answered - restored,
            }
        )
        return fresh

    # -- what is there -------------------------------------------------------------------------------------------------
    async def _look(self, box: Sandbox, turn: int) -> _State:
        files = _must(await box.exec(self.workload.digest, timeout_s=READY_S), "looking at the files")
        memory = await _memory(box) if self.workload.has_memory else ""
        asked = await _ask(box) if self.workload.has_server else 0
        return _State(files, memory, asked, turn)

    async def _check(self, box: Sandbox, state: _State) -> None:
        """Compare with the state at the checkpoint, part by part."""
        self.checks["restores_checked"] += 1
        files = await box.exec(self.workload.digest, timeout_s=READY_S)
        self.checks["files_changed"] += files.stdout.decode() != state.files or await box.exists("/data/lost")
        shell = await box.shell('echo "$PWD|$MODE|$words|${list[*]}|$turn|$(type -t step)"')
        wanted = f"/data|bench|two words|1 2 3|{state.turn}|function"
        self.checks["shell_changed"] += shell.stdout.decode().strip() != wanted
        job = await box.shell("kill -0 $job && jobs -r")
        self.checks["jobs_lost"] += b"Running" not in job.stdout
        if self.workload.has_memory:
            self.checks["memory_changed"] += await _memory(box) != state.memory
        if self.workload.has_server:
            # the answer counts on from the checkpoint: the server was not started again
            self.checks["http_failed"] += await _ask(box) != state.asked + 1

    # -- baselines -----------------------------------------------------------------------------------------------------
    async def _baselines(self, manifest: Manifest, state: _State) -> None:
        turns = [_turn(number) for number in range(state.turn + 1)]
        self.replays.append(await self._again(None, [*self.workload.setup, *turns], state))
        with_files = [action for action in [*self.workload.setup] if not action.files_only]
        name = await asyncio.to_thread(_image_of, self.manager, manifest)
        try:
            # the last turn set a variable, and wrote to a file that is there already
            self.fs_only.append(await self._again(name, [*with_files, Action(f"turn={state.turn}")], state))
        finally:
            await asyncio.to_thread(images.remove, self.manager.store, name)

    async def _again(self, image: str | None, actions: list[Action], state: _State) -> float:
        """Seconds for a new container with these actions, which must lead to the files of `state`."""
        begun = time.perf_counter()
        box = await self.manager.create("baseline", image=image)
        await _perform(box, actions)
        _must(await box.exec("true"), "a baseline's first command")
        took = time.perf_counter() - begun
        files = _must(await box.exec(self.workload.digest, timeout_s=READY_S), "looking at a baseline's files")
        shell = _must(
            await box.shell('echo "$PWD|$MODE|$words|${list[*]}|$turn|$(type -t step)"'), "a baseline's shell"
        )
        same = files == state.files and shell.strip() == f"/data|bench|two words|1 2 3|{state.turn}|function"
        if self.workload.has_memory:
            same = same and await _memory(box) == state.memory
        self.checks["baseline_differs"] += not same
        await self.manager.discard("baseline")
        return took

    def _result(self) -> dict[str, Any]:
        def series(samples: list[float]) -> dict[str, Any]:
            return {"median_s": statistics.median(samples), "samples_s": samples}

        def ratio(samples: list[float]) -> float:
            return statistics.median(b / s for b, s in zip(samples, self.subject, strict=True))

        def cost(pick: Callable[[Manifest], float]) -> float:
            return statistics.median(pick(manifest) for manifest in self.checkpoints)

        return {
            "workload": self.workload.name,
            "subject": {
                **series(self.subject),
                "phases_s": {name: statistics.median(p.get(name, 0.0) for p in self.phases) for name in self.phases[0]},
            },
            "checkpoint": {
                "dump_s": cost(lambda m: m.timings.dump_s),
                "frozen_s": cost(lambda m: m.timings.frozen_s),
                "fs_s": cost(lambda m: m.timings.fs_s),
                "total_s": cost(lambda m: m.timings.total_s),
                "image_bytes": cost(lambda m: m.image_bytes),
            },
            "baselines": {
                "new_container_replay": series(self.replays),
                "fs_only_restore": series(self.fs_only),
                "podman": {"skipped": _podman()},
            },
            "ratios": {"new_container_replay": ratio(self.replays), "fs_only_restore": ratio(self.fs_only)},
            "checks": self.checks,
        }


def _turn(number: int) -> Action:
    return Action(f"step {number}")


async def _perform(box: Sandbox, actions: list[Action]) -> None:
    for action in actions:
        _must(await box.shell(action.command, timeout_s=READY_S), action.command)


def _must(result: ExecResult, what: str) -> str:
    if not result.ok:
        raise RuntimeError(f"the workload itself failed at {what!r}: {result}")
    return result.stdout.decode()


async def _memory(box: Sandbox) -> str:
    """Checksum of the process's memory, by the process itself; "" when it does not say."""
    asked = await box.shell("rm -f /tmp/memory; kill -USR1 $memory", timeout_s=READY_S)
    deadline = time.monotonic() + READY_S
    while asked.ok and time.monotonic() < deadline:
        if await box.exists("/tmp/memory"):
            return (await box.read("/tmp/memory")).decode()
        await asyncio.sleep(0.01)
    return ""


async def _ask(box: Sandbox) -> int:
    """The server's count, -1 when it does not answer with 200."""
    result = await box.exec(_ASK, timeout_s=READY_S)
    head, _, body = result.stdout.decode(errors="replace").partition("\r\n\r\n")
    return int(body) if result.ok and " 200 " in head and body.isdigit() else -1


def _image_of(manager: Sandboxes, manifest: Manifest) -> str:
    """The checkpoint's file system as an image, by a snapshot: what a store without process images would start from."""
    name = f"{IMAGE_PREFIX}{manager.label.name}"
    images.remove(manager.store, name)
    source = manager.checkpoints.data.snapshots / manifest.id
    _btrfs.snapshot(source, manager.store.images / name, read_only=True)
    info = images.ImageInfo(name, manifest.fs_identity, manifest.id, images.RECIPE, time.time(), 0, 0)
    (manager.store.images / f"{name}.json").write_bytes(msgspec.json.encode(info))
    return name


def _remove_images_of_dead_runs(manager: Sandboxes) -> None:
    """A killed benchmark leaves its image in the store: the next one removes it."""
    alive = live_labels()
    for path in manager.store.images.glob(f"{IMAGE_PREFIX}bly-*"):
        name = path.name.removesuffix(".json")
        if name.removeprefix(IMAGE_PREFIX) not in alive:
            images.remove(manager.store, name)


def _podman() -> str:
    if shutil.which("podman") is None:
        return "podman is not installed"
    return "podman is installed, but this version of the benchmark does not drive it"
