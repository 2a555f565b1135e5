"""Containers of podman and runc: `podman container checkpoint` dumps them, `podman container restore` brings them back.

The container's root is the same as in the native runtime, given to podman by `--rootfs`; its init is the same program
(native/guest.c), so commands, files and the shell go over the same socket. Only the process images are podman's
business. `restore --import` cannot bring back a container with `--rootfs`, so a restore makes a new container,
gives it the images and the specification of the old one, and restores it under its new name.

Everything of podman's lies in /run/belayer/<label>/podman, network namespaces in /run/netns/<label>-…, cgroups below
belayer/<label>: the reaper finds them by these names.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from belayer.errors import BelayerError, CheckpointRefused, RestoreFailed, SandboxLost, SandboxUnavailable
from belayer.ownership import RunLabel, labels
from belayer.ownership.reap import CGROUP_ROOT, NETNS_DIR
from belayer.sandbox import _cgroup, _loop, criu
from belayer.sandbox._keeper import Keeper
from belayer.sandbox._mend import mend_files
from belayer.sandbox._place import Place
from belayer.sandbox._runtime import CREATE_TIMEOUT_S, HOSTNAME, refuse_what_would_be_lost
from belayer.sandbox._session import Session
from belayer.sandbox._slots import Slot
from belayer.sandbox.podman._gate import gate
from belayer.sandbox.podman._program import LIMITS, Podman
from belayer.sandbox.podman._spec import CRIU_CONF, Moved, keep_files, link, prepare_bundle

TIMEOUT_S = 60.0
_CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "NET_BIND_SERVICE", "SETFCAP",
)  # fmt: skip

_MS_BIND = 4096


class PodmanRuntime:
    """See `belayer.sandbox._runtime.Runtime`. Raises `SandboxUnavailable` when podman is not usable here."""

    name = "podman"

    def __init__(self, keeper: Callable[[], Keeper], label: RunLabel) -> None:
        self._keeper = keeper
        self._label = label
        self._podman = Podman(label.dir / "podman")

    # -- the protocol --------------------------------------------------------------------------------------------------
    async def create(self, place: Place, slot: Slot) -> int:
        await asyncio.to_thread(_name_netns, self._netns(place), slot.netns_fd)
        command = self._podman.command("run", "--detach", *self._options(place))
        try:
            code, output = await self._keeper().run(command, deadline_s=CREATE_TIMEOUT_S)
        except TimeoutError:
            raise SandboxUnavailable(f"container {place.key} did not start in {CREATE_TIMEOUT_S:.0f} s") from None
        if code:
            raise SandboxUnavailable(f"podman cannot start container {place.key}: {_words(output, code)}")
        await _listening(place)
        return _pid(place)

    async def dump(
        self,
        place: Place,
        *,
        init_pid: int,
        images: Path,
        netns: int,
        while_frozen: Callable[[], Awaitable[None]],
        repeatable: bool,
    ) -> dict[str, float]:
        container = _id(place)
        bundle = self._podman.bundle(container)
        tag = secrets.token_hex(4)
        begun = time.perf_counter()
        # podman writes to its own folder; here that is the way to ours
        link(bundle / "checkpoint", images)

        async def freeze() -> None:
            mend_files(images)
            await while_frozen()
            keep_files(bundle, images)

        try:
            async with gate(
                self._keeper().program,
                place.root.parent / f"gate-{tag}",
                self._podman.folder / tag,
                before_images=lambda: refuse_what_would_be_lost(place),
                while_frozen=freeze,
            ) as at:
                options = ["--leave-running", "--keep", "--tcp-established", "--file-locks", container]
                command = self._podman.command("container", "checkpoint", *options, programs=at.programs)
                try:
                    code, output = await self._keeper().run(command, deadline_s=TIMEOUT_S)
                except TimeoutError:
                    raise TimeoutError(f"podman did not finish the checkpoint within {TIMEOUT_S:.0f} s") from None
            if at.failure is not None:
                raise at.failure
            if code or not at.reached:
                why = criu.log_errors(bundle / "dump.log") or _words(output, code)
                raise CheckpointRefused(
                    f"podman cannot capture this sandbox: {why}",
                    kept="the sandbox runs on, and its earlier checkpoints are kept",
                )
            took = time.perf_counter() - begun
            frozen_s = criu.frozen_seconds(bundle / "stats-dump")
            return {"dump_s": took - at.seconds, "frozen_s": max(frozen_s, at.seconds), "fs_s": at.seconds}
        finally:
            (bundle / "checkpoint").unlink(missing_ok=True)

    async def restore(self, place: Place, *, images: Path, slot: Slot) -> int:
        await asyncio.to_thread(_name_netns, self._netns(place), slot.netns_fd)
        try:
            await self._podman_step(place, "create", *self._options(place))
            container = _id(place)
            bundle = self._podman.bundle(container)
            moved_to = Moved(
                root=place.root,
                agent=place.agent,
                work=place.work,
                netns=self._netns(place),
                cgroup=self._cgroup(place, container),
                criu_conf=self._podman.criu_conf,
            )
            prepare_bundle(images, bundle, moved_to)
            options = ["--tcp-established", "--file-locks", container]
            await self._podman_step(place, "container", "restore", "--keep", *options)
        except (OSError, ValueError, KeyError) as error:
            raise RestoreFailed(f"podman's images in {images} cannot be used: {error}") from error
        (bundle / "checkpoint").unlink(missing_ok=True)
        return _pid(place)

    def remove(self, place: Place) -> None:
        with contextlib.suppress(OSError):
            container = _id(place)
            # its monitor died with it, and podman would wait for what it has to say
            exit_file = self._podman.exit_file(container)
            exit_file.parent.mkdir(parents=True, exist_ok=True)
            exit_file.write_text("137")
            with contextlib.suppress(BelayerError):  # what is left is in our folder and goes with it
                self._podman.call("rm", "--force", "--time", "0", container)
        _forget_netns(self._netns(place))
        for base in _all_cgroups(self._label.name):
            _cgroup.remove_folder(base / place.key)

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        for point in labels.mounts_below(self._podman.folder):
            _loop.unmount(Path(point))
        shutil.rmtree(self._podman.folder, ignore_errors=True)
        for base in _all_cgroups(self._label.name):
            _cgroup.remove_folder(base)

    # -- inside --------------------------------------------------------------------------------------------------------
    async def _podman_step(self, place: Place, *arguments: str) -> None:
        command = self._podman.command(*arguments)
        try:
            code, output = await self._keeper().run(command, deadline_s=TIMEOUT_S)
        except TimeoutError:
            raise RestoreFailed(f"podman did not finish the restore within {TIMEOUT_S:.0f} s") from None
        if code:
            log = self._podman.bundle(_id(place)) / "restore.log" if (place.work / "id").exists() else place.work
            why = criu.log_errors(log) or _words(output, code)
            raise RestoreFailed(f"podman cannot restore container {place.key}: {why}")

    def _options(self, place: Place) -> list[str]:
        """What `podman run` and `podman create` need for a container in `place`."""
        options = ["--name", place.key, "--hostname", HOSTNAME, "--no-hosts", "--dns", "none"]
        options += ["--cidfile", str(place.work / "id"), "--pidfile", str(place.work / "init.pid")]
        options += ["--cgroup-parent", f"/{_cgroup.ROOT}/{self._label.name}/{place.key}"]
        options += ["--annotation", f"{CRIU_CONF}={self._podman.criu_conf}"]
        options += ["--network", f"ns:{self._netns(place)}", "--ipc", "none", "--systemd", "false"]
        options += ["--security-opt", "no-new-privileges", "--security-opt", "label=disable"]
        options += ["--security-opt", "seccomp=unconfined"]  # the init installs the filter, the same in every runtime
        options += ["--cap-drop", "all", *(f"--cap-add={name}" for name in _CAPABILITIES)]
        options += [f"--ulimit={limit}" for limit in LIMITS]
        options += [f"--env={variable}={value}" for variable, value in place.environment.items()]
        # of the container's own, so that it is among the images; podman's is a mount of the host's
        options += ["--tmpfs", "/dev/shm:rw,nosuid,nodev,mode=1777"]
        options += ["--volume", f"{place.agent}:/run/agent:rprivate,nosuid,nodev,exec"]
        return [*options, "--rootfs", str(place.root), "/run/agent/init", "guest"]

    def _cgroup(self, place: Place, container: str) -> str:
        return f"/{_cgroup.ROOT}/{self._label.name}/{place.key}/libpod-{container}"

    def _netns(self, place: Place) -> Path:
        return NETNS_DIR / f"{self._label.name}-{place.key}"


async def _listening(place: Place) -> None:
    """Wait for the init to serve its socket: podman is done when the program is started."""
    session = Session(place.agent, place.key)
    deadline = time.monotonic() + CREATE_TIMEOUT_S
    try:
        while True:
            try:
                await session.ping()
                return
            except SandboxLost as error:
                if time.monotonic() > deadline:
                    raise SandboxUnavailable(f"container {place.key} was started, but {error.what}") from error
            await asyncio.sleep(0.002)
    finally:
        session.close()


def _name_netns(path: Path, fd: int) -> None:
    """Give a namespace a name in the file system: podman takes no descriptor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    _loop.mount(f"/proc/self/fd/{fd}", path, "", _MS_BIND, "")


def _forget_netns(path: Path) -> None:
    with contextlib.suppress(OSError):
        _loop.unmount(path)
    path.unlink(missing_ok=True)


def _all_cgroups(label: str) -> list[Path]:
    """The run's folder in every hierarchy: podman joins more of them than those that Belayer needs."""
    roots = [CGROUP_ROOT, *(entry for entry in CGROUP_ROOT.iterdir() if entry.is_dir())]
    return [base for root in roots if (base := root / _cgroup.ROOT / label).is_dir()]


def _id(place: Place) -> str:
    return (place.work / "id").read_text().strip()


def _pid(place: Place) -> int:
    return int((place.work / "init.pid").read_text())


def _words(output: str, code: int) -> str:
    return output.strip()[-600:] or f"exit {code}"
