"""The hand of the joint campaign: arms failpoints in the driver itself, and strikes from there with real blows.

Whatever is struck belongs to this run: processes carry its label, files lie in its own folders. Every blow is written
to the campaign's log before it falls, for the driver may be what it falls on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from belayer.engine import Engine
from belayer.errors import EngineError
from belayer.faults import failpoints
from belayer.faults.engine_strikes import Striker
from belayer.faults.injector import SYSTEM_FOLDERS, damage
from belayer.faults.joint_kinds import ENDS_DRIVER, SANDBOX_KINDS, JointFault
from belayer.ownership.reap import label_of_process
from belayer.recovery import EnvironmentState
from belayer.run import Run
from belayer.sandbox import Sandbox, _cgroup
from belayer.sandbox._place import safe_name

AT_ONCE = 16  # sandbox faults armed side by side, each at another failpoint
ENGINE_AT_ONCE = 4  # the same for the engine, but only one strikes at a time
ENDS_AT_ONCE = 3
PATIENCE_S = 12.0  # for a failpoint to be passed
ENGINE_BACK_S = 90.0
STRIKES_PER_ROLLOUT = 8
STRIKES_PER_ACTION = 2  # the third death during one action sets a rollout aside, as it should
DECLINED = 200
ROOT_IS_NEW = ("restore.processes", "restore.answered", "sandbox.create.answered")


class Log:
    """Appends lines to the campaign's log; each is there when `write` returns, and survives SIGKILL."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, what: str, **data: Any) -> None:
        os.write(self._fd, json.dumps({"what": what, "at": time.time(), **data}).encode() + b"\n")


class Strikes:
    """Works through `faults`; for `lives_s` seconds, none that ends the driver.

    `update()` publishes the same weights as a new version; `fill()` fills the run's disk.
    """

    def __init__(
        self,
        run: Run,
        faults: list[JointFault],
        log: Log,
        *,
        update: Callable[[], Any],
        fill: Callable[[], None],
        lives_s: float,
    ) -> None:
        assert run.engine is not None and run.sandboxes is not None
        self._run = run
        self._engine: Engine = run.engine
        self._log = log
        self._update = update
        self._fill = fill
        self._lives_s = lives_s
        self._boxes = [fault for fault in faults if fault.kind in SANDBOX_KINDS]
        self._engines = [fault for fault in faults if fault.kind not in SANDBOX_KINDS + ENDS_DRIVER]
        self._ends = [fault for fault in faults if fault.kind in ENDS_DRIVER]
        self._striker = Striker(self._engine, lambda pid: label_of_process(pid) == run.label.name)
        self._busy: set[str] = set()  # failpoints that are armed
        self._struck: Counter[str] = Counter()  # by rollout
        self._by_action: Counter[tuple[str, int]] = Counter()
        self._damaged: set[str] = set()
        self._engine_struck = False

    async def run(self) -> None:
        """Until every fault has had its chance; cancel it to stop."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(self._lane(self._boxes))
                for _ in range(ENGINE_AT_ONCE):
                    group.create_task(self._engine_lane())
                for _ in range(ENDS_AT_ONCE):
                    group.create_task(self._end_lane())
        finally:
            for name in self._busy:
                failpoints.disarm(name)

    def _next(self, faults: list[JointFault]) -> JointFault | None:
        """The first one whose failpoint is not armed for another; it is taken off the list."""
        for fault in faults:
            if fault.point not in self._busy:
                faults.remove(fault)
                self._busy.add(fault.point)
                return fault
        return None

    async def _lane(self, faults: list[JointFault]) -> bool:
        """Work through them. True: the last one struck."""
        while faults:
            fault = self._next(faults)
            if fault is None:
                await asyncio.sleep(0.05)
                continue
            if await self._one(fault) and fault.kind not in SANDBOX_KINDS:
                return True
        return False

    async def _engine_lane(self) -> None:
        while await self._lane(self._engines):
            await self._engine_is_back()
            with contextlib.suppress(EngineError):
                await self._engine.wait_standby(ENGINE_BACK_S)
            self._engine_struck = False

    async def _end_lane(self) -> None:
        await asyncio.sleep(self._lives_s)
        await self._lane(self._ends)

    async def _one(self, fault: JointFault) -> bool:
        """Arm, wait, and say what came of it: whether it struck."""
        done = threading.Event()
        declined = 0

        def blow() -> None:
            nonlocal declined
            about = self._rollout_of(failpoints.subject())
            if not done.is_set() and not self._strike(fault, about):
                declined += 1
                if declined < DECLINED:
                    failpoints.arm(fault.point, blow, skip=1)
                return
            done.set()

        failpoints.arm(fault.point, blow, skip=fault.skip)
        try:
            updating = fault.point.startswith("engine.update.")
            until = time.monotonic() + PATIENCE_S
            while not done.is_set() and time.monotonic() < until:
                if updating:
                    await self._update()
                await asyncio.sleep(0.05)
        finally:
            failpoints.disarm(fault.point)
            self._busy.discard(fault.point)
        if done.is_set():
            return True
        why = f"declined {declined} times: no target" if declined else "the failpoint was not passed"
        self._log.write("missed", index=fault.index, why=why)
        return False

    # -- whom it is about ----------------------------------------------------------------------------------------------
    def _rollout_of(self, subject: str) -> str:
        """A failpoint is about a rollout, or about its sandbox, which is called like it and its attempt."""
        if subject in self._run.keepers or not subject:
            return subject
        name, _, attempt = subject.rpartition(".")
        return name if attempt.isdigit() and name in self._run.keepers else ""

    def _strike(self, fault: JointFault, about: str) -> bool:
        """The blow itself, in whichever thread passed the failpoint. False: not this one."""
        rng = random.Random(fault.draw)
        if fault.kind in SANDBOX_KINDS:
            return self._strike_sandbox(fault, about, rng)
        if fault.kind == "driver.sigkill":
            self._tell(fault, about, "this driver")
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "disk.full":
            self._tell(fault, about, "the run's disk")
            self._fill()
            return True
        role, name = fault.kind.split(".")
        pid = self._striker.pid(role)
        if pid is None or self._engine_struck:
            return False
        self._engine_struck = True
        self._tell(fault, about, f"{role} {pid}")
        self._striker.strike_pid(pid, name)
        return True

    def _tell(self, fault: JointFault, rollout: str, target: str) -> None:
        self._log.write("struck", index=fault.index, point=fault.point, kind=fault.kind, rollout=rollout, target=target)

    # -- sandboxes -----------------------------------------------------------------------------------------------------
    def _strike_sandbox(self, fault: JointFault, about: str, rng: random.Random) -> bool:
        living = sorted(self._run.keepers)
        rollout = about or (rng.choice(living) if living else "")
        keeper = self._run.keepers.get(rollout)
        made = self._root_being_made(keeper.name) if keeper and fault.point in ROOT_IS_NEW else None
        needed = fault.kind in ("sandbox.damage", "checkpoint.damage") and made is None
        if keeper is None or (needed and (keeper.sandbox is None or keeper.sandbox.dead)):
            # the rollout has no environment (any more): another one's is struck at that moment
            others = self._run.living_sandboxes()
            if not others:
                return False
            rollout = rng.choice(others)[0]
            keeper = self._run.keepers[rollout]
        key = (rollout, keeper.completed)
        if self._struck[rollout] >= STRIKES_PER_ROLLOUT or self._by_action[key] >= STRIKES_PER_ACTION:
            return False
        sandbox = keeper.sandbox
        match fault.kind:
            case "sandbox.kill" | "sandbox.freeze":
                number = signal.SIGKILL if fault.kind == "sandbox.kill" else signal.SIGSTOP
                hit = self._signal(fault, rollout, keeper.name, sandbox, number)
            case "sandbox.damage":
                # the same damage twice in one action would pass for the action's own doing
                if rollout in self._damaged:
                    return False
                root = made or (sandbox.root if sandbox is not None and not sandbox.dead else None)
                hit = root is not None and self._damage(fault, rollout, root, rng)
            case _:
                ready = keeper.state is EnvironmentState.READY
                hit = sandbox is not None and self._spoil(fault, rollout, keeper.name, sandbox, rng, ready=ready)
        if hit:
            self._struck[rollout] += 1
            self._by_action[key] += 1
        return hit

    def _signal(
        self, fault: JointFault, rollout: str, name: str, sandbox: Sandbox | None, number: signal.Signals
    ) -> bool:
        """To the init, or, while a container is being made, to whatever runs in it already or soon."""
        if sandbox is not None and not sandbox.dead and not fault.point.startswith(("restore.p", "sandbox.create.p")):
            self._tell(fault, rollout, f"init {sandbox.init_pid}")
            if fault.delay_s:
                threading.Timer(fault.delay_s, _signal_init, (sandbox, number)).start()
            else:
                _signal_init(sandbox, number)
            return True
        if not fault.point.startswith(("restore.", "sandbox.create.", "replay.")):
            return False
        self._tell(fault, rollout, f"everything in {name}")
        threading.Timer(fault.delay_s, self._signal_all, (name, number)).start()
        return True

    def _signal_all(self, name: str, number: signal.Signals) -> None:
        """To all processes of a sandbox that is not a handle yet. A place without any is waited for a moment."""
        prefix = f"{safe_name(name)}-"
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            folders = [
                folder
                for base in _cgroup.run_folders(self._run.label.name)
                if base.is_dir()
                for folder in base.iterdir()
                if folder.name.startswith(prefix) and folder.is_dir()
            ]
            pids = {pid for folder in folders for pid in _pids_below(folder)}
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    if label_of_process(pid) == self._run.label.name:
                        os.kill(pid, number)
            if pids:
                return
            time.sleep(0.002)

    def _root_being_made(self, name: str) -> Path | None:
        """The root of a container that is not a handle yet."""
        assert self._run.sandboxes is not None
        store, label = self._run.sandboxes.store, self._run.label
        prefix = f"{safe_name(name)}-"
        found = [path for path in (store.root / "runs" / label.name).iterdir() if path.name.startswith(prefix)]
        numbered = [path for path in found if path.name.removeprefix(prefix).isdigit()]
        if not numbered:
            return None
        newest = max(numbered, key=lambda path: int(path.name.removeprefix(prefix)))
        return store.trees.root(newest, label.dir / newest.name).path

    def _damage(self, fault: JointFault, rollout: str, root: Path, rng: random.Random) -> bool:
        folders = [name for name in SYSTEM_FOLDERS if (root / name).is_dir()]
        if not folders:
            return False
        folder = rng.choice(folders)
        self._damaged.add(rollout)
        self._tell(fault, rollout, f"rm -rf /{folder}")
        threading.Thread(target=damage, args=(root, folder), daemon=True).start()
        return True

    def _spoil(
        self, fault: JointFault, rollout: str, name: str, sandbox: Sandbox, rng: random.Random, *, ready: bool
    ) -> bool:
        """Damage the newest checkpoint, and kill the sandbox, so that it is wanted."""
        assert self._run.sandboxes is not None
        newest = self._run.sandboxes.newest(name)
        if newest is None or sandbox.dead:
            return False
        data = self._run.sandboxes.checkpoints.data
        images = data.images(newest.id)
        files = sorted(images.iterdir()) if images is not None else []
        # what CRIU may be reading just now is taken away, not falsified: it was verified already
        ways = ["images removed"] + (["byte flipped", "file truncated", "manifest garbled"] if ready else [])
        way = rng.choice(ways) if files else "manifest garbled"
        self._tell(fault, rollout, f"{newest.id}: {way}")
        with contextlib.suppress(OSError):
            match way:
                case "images removed":
                    shutil.rmtree(images or data.memory / newest.id, ignore_errors=True)
                case "byte flipped":
                    _flip(rng.choice([file for file in files if file.stat().st_size] or files), rng)
                case "file truncated":
                    file = max(files, key=lambda path: path.stat().st_size)
                    os.truncate(file, file.stat().st_size // 2)
                case _:
                    data.manifest_path(newest.id).write_bytes(b"{}")
        _signal_init(sandbox, signal.SIGKILL)
        return True

    # -- the engine ----------------------------------------------------------------------------------------------------
    async def _engine_is_back(self) -> None:
        """Serves again after it was struck; a stopped shadow or owner is found out when it is wanted."""
        try:
            async with asyncio.timeout(ENGINE_BACK_S):
                await asyncio.sleep(0.1)
                while self._engine.worker_pid is None:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            self._log.write("hung", why=f"no worker serves {ENGINE_BACK_S:g} s after the engine was struck")


def _signal_init(sandbox: Sandbox, number: signal.Signals) -> None:
    """Through a pidfd, so that no number is mistaken."""
    try:
        fd = os.pidfd_open(sandbox.init_pid)
    except ProcessLookupError:
        return
    try:
        if not sandbox.dead:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, number)
    finally:
        os.close(fd)


def _pids_below(folder: Path) -> list[int]:
    found: list[int] = []
    for place, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            found += map(int, Path(place, "cgroup.procs").read_text().split())
    return found


def _flip(file: Path, rng: random.Random) -> None:
    with open(file, "r+b") as opened:
        size = file.stat().st_size
        place = rng.randrange(max(1, size))
        opened.seek(place)
        byte = opened.read(1) or b"\0"
        opened.seek(place)
        opened.write(bytes([byte[0] ^ 0x10]))
