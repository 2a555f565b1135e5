"""What sandboxes can do on this host, each thing tried for real, for `belayer doctor`.

The trial container has a root file system of its own (a few empty folders below /run/belayer/<label>) and needs neither
the store nor an image, so that each line of the table fails for its own reason only.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from belayer.errors import BelayerError, SandboxUnavailable
from belayer.ownership import RunLabel, cache_dir, store_dir
from belayer.sandbox import _btrfs, _cgroup, _loop, criu, images, podman
from belayer.sandbox._keeper import Keeper
from belayer.sandbox._native import native_program
from belayer.sandbox._netns import fresh_netns
from belayer.sandbox._overlay import check_overlay
from belayer.sandbox._session import InitState, Session
from belayer.sandbox._slots import Slot
from belayer.sandbox._verdict import BTRFS, CONTAINER, CRIU, OVERLAY, Capability, verdict
from belayer.sandbox.store import FILE, Store, existing_kinds

SETUP = "scripts/setup.sh"
BASE_IMAGE = "base"
DISK_ROOM = 4 << 30  # below this many free bytes a run of the default size may fill the disk
SCRATCH_BYTES = 256 << 20  # sparse; mkfs.btrfs refuses less than about 110 MB
STEP_TIMEOUT_S = 5.0
TRIAL_MEMORY, TRIAL_PIDS = 64 << 20, 32
_CAP_SYS_ADMIN = 21


def probe() -> list[Capability]:
    """Try everything that sandboxes need; well below 3 s, and nothing is left behind.

    Blocks. May be called where an event loop runs: the trial has one of its own, in a thread of its own.
    """
    root = _root()
    if not root.ok:
        why = "not tried: needs root"
        names = (*CONTAINER, _image_name(), CRIU, BTRFS, OVERLAY)
        untried = [Capability(name, False, why, "run as root", name not in (CRIU, BTRFS, OVERLAY)) for name in names]
        found = [root, _cgroups(None), *untried, _podman(), _disk()]
    else:
        with RunLabel.new("belayer doctor") as label:
            container = _in_thread(lambda: asyncio.run(_try_container(label)))
            btrfs, overlay = _btrfs_store(label), _overlay_store()
        criu.forget_kernel_features()
        found = [root, *container, btrfs, overlay, _image(), _podman(), _disk()]
    return [*found, verdict(found)]


def _in_thread(work: Callable[[], list[Capability]]) -> list[Capability]:
    result: list[Capability] = []
    failure: list[BaseException] = []

    def do() -> None:
        try:
            result.extend(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=do, name="belayer-doctor")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result


# -- one container, dumped and restored --------------------------------------------------------------------------------
async def _try_container(label: RunLabel) -> list[Capability]:
    """Lines for the native program, namespaces, seccomp, cgroups and CRIU."""
    trial = _Trial(label)
    try:
        await trial.run()
    except (BelayerError, OSError) as error:
        trial.failed(_sentence(error))
    finally:
        await trial.close()
    return [
        trial.line("sandbox program", "install gcc and libc6-dev, then scripts/setup.sh"),
        _cgroups(trial.limits),
        trial.line(
            "namespaces", "a host (or outer container) that lets root make pid, mount, network and ipc namespaces"
        ),
        trial.line("seccomp", "a kernel with CONFIG_SECCOMP_FILTER"),
        trial.line(
            CRIU, "scripts/install_criu.sh builds CRIU 4.2; the kernel needs CHECKPOINT_RESTORE", required=False
        ),
    ]


class _Trial:
    """The steps in their order; the first one that fails leaves the later ones untried."""

    _STEPS = (*CONTAINER, CRIU)

    def __init__(self, label: RunLabel) -> None:
        self.limits: set[str] | None = None
        self._label = label
        self._keeper: Keeper | None = None
        self._cgroup: _cgroup.SandboxCgroup | None = None
        self._session: Session | None = None
        self._good: dict[str, str] = {}
        self._failure = ""
        self._place = label.dir / "probe"
        self._root = self._place / "root"
        self._agent = self._place / "agent"
        self._work = self._place / "work"
        self._images = label.shm / "probe"

    def line(self, name: str, how: str, *, required: bool = True) -> Capability:
        if name in self._good:
            return Capability(name, True, self._good[name], how, required)
        first = next(step for step in self._STEPS if step not in self._good)
        detail = self._failure if name == first else f"not tried: {first} failed"
        return Capability(name, False, detail, how, required)

    def failed(self, why: str) -> None:
        self._failure = why

    async def run(self) -> None:
        program = await asyncio.to_thread(native_program)
        self._good["sandbox program"] = program.name
        _cgroup.make_run(self._label.name)
        folders = _cgroup.run_folders(self._label.name)
        self._keeper = keeper = Keeper.start(program, self._label, cgroups=folders, store=None, on_death=lambda: None)
        self._cgroup = _cgroup.SandboxCgroup(self._label.name, "probe")
        self._cgroup.make(memory_bytes=TRIAL_MEMORY, pids=TRIAL_PIDS)
        self.limits = _limits_in_force(self._cgroup.folders)
        self._make_places(program)
        pid = await self._create(keeper)
        self._session = Session(self._agent, "probe")
        before = await self._session.ping(STEP_TIMEOUT_S)
        self._good["namespaces"] = "pid, mount, network, ipc and uts"
        self._good["seccomp"] = _seccomp(pid)
        self._good[CRIU] = await self._dump_and_restore(keeper, pid, before)

    def _make_places(self, program: Path) -> None:
        self._place.mkdir()
        # many hosts mount /run without devices and programs, and the container needs /dev/null and its init
        _loop.mount("belayer", self._place, "tmpfs", _loop.MS_NOSUID, "size=8m")
        for folder in (self._root, self._agent, self._work, self._images):
            folder.mkdir()
        for name in ("proc", "dev", "dev/pts", "run", "run/agent", "tmp"):
            (self._root / name).mkdir()
        os.mknod(self._root / "dev" / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        shutil.copy(program, self._agent / "init")

    async def _create(self, keeper: Keeper) -> int:
        command = ["create", "--root", str(self._root), "--agent", str(self._agent), "--hostname", "probe"]
        netns = await fresh_netns()
        try:
            code, output = await self._run(keeper, command, netns, STEP_TIMEOUT_S)
        finally:
            os.close(netns)
        if code:
            raise SandboxUnavailable(f"a container cannot be started: {output or f'exit {code}'}")
        return int(output)

    async def _run(self, keeper: Keeper, command: list[str], netns_fd: int, deadline_s: float) -> tuple[int, str]:
        assert self._cgroup is not None
        slot = Slot(os.dup(netns_fd), self._cgroup)
        try:
            await slot.park(keeper)
            return await slot.run(command, deadline_s)
        finally:
            await slot.close()

    async def _dump_and_restore(self, keeper: Keeper, pid: int, before: InitState) -> str:
        assert self._cgroup is not None and self._session is not None
        program = criu.find_criu()
        version = ".".join(map(str, criu.criu_version(program)))
        netns = os.stat(f"/proc/{pid}/ns/net").st_ino
        begun = time.perf_counter()

        async def nothing() -> None:
            """There is no file system to snapshot."""

        await criu.dump(
            keeper, init_pid=pid, images=self._images, netns=netns, while_frozen=nothing, timeout_s=STEP_TIMEOUT_S
        )
        dumped = time.perf_counter()
        await asyncio.to_thread(self._cgroup.kill)
        (self._agent / "agent.sock").unlink(missing_ok=True)
        killed = time.perf_counter()
        netns_fd = await fresh_netns()
        try:
            await criu.restore(
                lambda command, deadline_s: self._run(keeper, command, netns_fd, deadline_s),
                images=self._images,
                root=self._root,
                agent=self._agent,
                work=self._work,
                timeout_s=STEP_TIMEOUT_S,
            )
        finally:
            os.close(netns_fd)
        after = await self._session.ping(STEP_TIMEOUT_S)
        if after.nonce != before.nonce:
            raise SandboxUnavailable(f"CRIU {version} restored another process than it dumped")
        restored = time.perf_counter()
        dump_ms, restore_ms = (dumped - begun) * 1e3, (restored - killed) * 1e3
        return f"CRIU {version}; dump {dump_ms:.0f} ms, restore {restore_ms:.0f} ms, memory intact"

    async def close(self) -> None:
        if self._session is not None:
            self._session.close()
        if self._cgroup is not None:
            await asyncio.to_thread(self._cgroup.kill)
        if self._keeper is not None:
            await self._keeper.close()
        if os.path.ismount(self._place):
            _loop.unmount(self._place)
        for base in _cgroup.hierarchies().bases():
            await asyncio.to_thread(_cgroup.remove_folder, base / self._label.name)


def _seccomp(pid: int) -> str:
    """Says what the container's init runs under. Raises `SandboxUnavailable` when that is no filter."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    if status.get("Seccomp", "").strip() != "2" or status.get("NoNewPrivs", "").strip() != "1":
        raise SandboxUnavailable("the container's init runs without its system-call filter")
    return "filter in force, no new privileges"


# -- the rest ----------------------------------------------------------------------------------------------------------
def _root() -> Capability:
    how = "run as root or with sudo; an outer container needs --privileged"
    if os.geteuid() != 0:
        return Capability("root", False, f"user {os.geteuid()}", how, required=True)
    effective = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            effective = int(line.split()[1], 16)
    if not effective >> _CAP_SYS_ADMIN & 1:
        return Capability("root", False, "root without CAP_SYS_ADMIN", how, required=True)
    return Capability("root", True, "root with CAP_SYS_ADMIN", how, required=True)


def _cgroups(limits: set[str] | None) -> Capability:
    """`limits`: those that the trial found in force, None when it did not come to that."""
    host = _cgroup.hierarchies()
    detail = host.flavour
    if limits is not None:
        detail += f"; limits: {', '.join(sorted(limits)) or 'none'}"
    how = "mount cgroup2 at /sys/fs/cgroup"
    return Capability("cgroups", bool(host.bases()), detail, how, required=True)


def _limits_in_force(folders: list[Path]) -> set[str]:
    """Which limits of the trial can be read back."""
    found = set()
    for folder in folders:
        for file, kind, value in (
            ("memory.limit_in_bytes", "memory", TRIAL_MEMORY),
            ("memory.max", "memory", TRIAL_MEMORY),
            ("pids.max", "pids", TRIAL_PIDS),
        ):
            if (folder / file).exists() and (folder / file).read_text().strip() == str(value):
                found.add(kind)
    return found


def _btrfs_store(label: RunLabel) -> Capability:
    how = f"{SETUP} installs btrfs-progs; the kernel needs btrfs and loop devices"
    folder = store_dir()
    try:
        if "btrfs" not in existing_kinds(folder):
            return Capability(BTRFS, True, f"not made yet; {_try_scratch_btrfs(label)}", how)
        store = Store.open(kind="btrfs")
    except (BelayerError, OSError) as error:
        return Capability(BTRFS, False, _sentence(error), how)
    try:
        kind = "on the host's btrfs" if store.mount_point is None else f"file {folder / FILE}, loop-mounted"
        return Capability(BTRFS, True, f"{kind}; {store.free_bytes() >> 30} GB free in it", how)
    finally:
        store.close()


def _overlay_store() -> Capability:
    how = "the kernel needs overlayfs; ext4, XFS and tmpfs can hold such a store"
    folder = store_dir()
    made = "overlay" in existing_kinds(folder)
    try:
        check_overlay(_existing(folder))
    except (BelayerError, OSError) as error:
        return Capability(OVERLAY, False, _sentence(error), how)
    return Capability(OVERLAY, True, f"{folder} can hold one; {'made' if made else 'not made'}", how)


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def _try_scratch_btrfs(label: RunLabel) -> str:
    """Make, mount and use a small btrfs file. Raises `SandboxUnavailable` or `OSError`."""
    program = shutil.which("mkfs.btrfs", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None:
        raise SandboxUnavailable("mkfs.btrfs is missing")
    file, point = label.shm / "scratch.btrfs", label.dir / "scratch"
    with open(file, "wb") as handle:
        handle.truncate(SCRATCH_BYTES)
    point.mkdir()
    try:
        subprocess.run(
            [program, "-q", "-f", str(file)], check=True, capture_output=True, text=True, timeout=STEP_TIMEOUT_S
        )
        _loop.mount_file(file, point)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise SandboxUnavailable(f"mkfs.btrfs failed: {(error.stderr or str(error)).strip()}") from error
    try:
        _btrfs.create_subvolume(point / "a")
        _btrfs.snapshot(point / "a", point / "b", read_only=True)
    finally:
        _loop.unmount(point)
        file.unlink()
    return "a loop-mounted btrfs file works here"


def _image_name() -> str:
    return f"sandbox image {BASE_IMAGE}"


def _image() -> Capability:
    """The base image, in the store that `auto` takes."""
    kinds = existing_kinds(store_dir())
    if not kinds:
        return Capability(_image_name(), False, "not made: there is no store yet", SETUP, required=True)
    try:
        store = Store.open(kind=kinds[0])
    except (BelayerError, OSError) as error:
        return Capability(_image_name(), False, f"its store cannot be opened: {_sentence(error)}", SETUP, required=True)
    try:
        info = images.read_info(store, BASE_IMAGE)
        if info is None or not (store.images / BASE_IMAGE).is_dir():
            return Capability(_image_name(), False, "not made", SETUP, required=True)
        detail = f"{info.files} files, {info.bytes >> 20} MB, {info.digest[:19]}, {info.source.partition(':')[0]}"
        return Capability(_image_name(), True, detail, SETUP, required=True)
    finally:
        store.close()


def _podman() -> Capability:
    reason = podman.missing()
    return Capability(
        "podman runtime (optional)", reason is None, reason or "podman, runc and conmon", "make setup-podman"
    )


def _disk() -> Capability:
    folder = _existing(cache_dir())
    free = shutil.disk_usage(folder).free
    detail = f"{folder}: {free >> 30} GB free"
    return Capability("disk room", free >= DISK_ROOM, detail, f"free at least {DISK_ROOM >> 30} GB below {folder}")


def _sentence(error: BaseException) -> str:
    return error.what if isinstance(error, BelayerError) else str(error) or type(error).__name__
