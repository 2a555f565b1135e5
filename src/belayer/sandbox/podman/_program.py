"""The podman program with settings, storage and state of Belayer's own.

Nothing of the host's podman is read or written: not its configuration, its storage, its locks in shared memory, its
runtime's state. So no container of the user is ever in reach, and the folder is all there is to remove.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from belayer.errors import BelayerError, SandboxUnavailable
from belayer.sandbox import criu

_PROGRAMS = ("podman", "runc", "conmon")
_PLACES = ("/usr/libexec/podman", "/usr/lib/podman", "/usr/local/lib/podman", "/usr/local/libexec/podman")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# podman's defaults are above what a root without CAP_SYS_RESOURCE may set
LIMITS = ("nofile=10000:20000", "nproc=1000:1000")

_CONTAINERS_CONF = """\
[containers]
log_driver = "none"
pids_limit = 0
default_ulimits = [{limits}]

[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
lock_type = "file"
runtime = "runc"
network_config_dir = "{folder}/networks"
volume_path = "{folder}/volumes"

[network]
network_config_dir = "{folder}/networks"
"""
# read by CRIU itself; its defaults refuse deleted files above 1 MB, and call iptables for every dump and restore
_CRIU_CONF = f"ghost-limit {criu.GHOST_LIMIT}\nnetwork-lock skip\nlink-remap\n"
_STORAGE_CONF = """\
[storage]
driver = "{driver}"
graphroot = "{storage}"
runroot = "{folder}/run"
"""


def missing() -> str | None:
    """Why podman cannot be used here, or None."""
    for name in _PROGRAMS:
        if _find(name) is None:
            return f"{name} is not installed"
    try:
        criu.find_criu()
    except SandboxUnavailable as error:
        return error.what
    return None


def require() -> None:
    """Raises `SandboxUnavailable` where podman cannot be used."""
    if reason := missing():
        raise SandboxUnavailable(reason, next_step='run `make setup-podman`, or set sandbox.runtime = "native"')


class Podman:
    """Podman whose whole state is below `folder`, a path of at most 46 characters: podman's own limit.

    `storage` is for what may be big, default in `folder` too; `driver` is "vfs" where roots are made elsewhere and
    nothing is stored. `image_stores` are further stores, which it only reads.
    """

    def __init__(
        self,
        folder: Path,
        *,
        driver: str = "vfs",
        storage: Path | None = None,
        image_stores: tuple[Path, ...] = (),
    ) -> None:
        require()
        self.folder = folder
        self.driver = driver
        self.storage = storage or folder / "root"
        self._image_stores = image_stores
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        limits = ", ".join(f'"{limit}"' for limit in LIMITS)
        (folder / "containers.conf").write_text(_CONTAINERS_CONF.format(folder=folder, limits=limits))
        text = _STORAGE_CONF.format(folder=folder, storage=self.storage, driver=driver)
        (folder / "storage.conf").write_text(text)
        self.criu_conf = folder / "criu.conf"
        self.criu_conf.write_text(_CRIU_CONF)
        # its runtime looks CRIU up in PATH, and the distribution's may be one that does not work
        self.programs = folder / "bin"
        self.programs.mkdir(exist_ok=True)
        link = self.programs / "criu"
        link.unlink(missing_ok=True)
        link.symlink_to(criu.find_criu())

    def command(self, *arguments: str, programs: Path | None = None) -> list[str]:
        """The command line that runs `podman ARGUMENTS`; programs in `programs` come before all others."""
        variables = {
            "PATH": f"{programs or self.programs}:{self.programs}:{_PATH}",
            "HOME": str(self.folder),
            "CONTAINERS_CONF": str(self.folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
            "TMPDIR": "/var/tmp",
        }
        settings = [f"{name}={value}" for name, value in variables.items()]
        own = ["--root", str(self.storage), "--runroot", f"{self.folder}/run", "--tmpdir", f"{self.folder}/tmp"]
        own += ["--storage-driver", self.driver, "--runtime-flag", f"root={self.folder}/runc"]
        for store in self._image_stores:  # with --root, podman reads no such thing from a file
            own += ["--storage-opt", f"{self.driver}.imagestore={store}"]
        return ["/usr/bin/env", "-i", *settings, str(_find("podman")), *own, *arguments]

    def call(self, *arguments: str, timeout_s: float = 60.0) -> str:
        """Run it and return what it prints. Blocking. Raises `BelayerError` with podman's own words."""
        try:
            done = subprocess.run(
                self.command(*arguments),
                check=False,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            raise BelayerError(f"podman {arguments[0]} did not finish within {timeout_s:.0f} s") from None
        if done.returncode:
            raise BelayerError(f"podman {arguments[0]} failed: {done.stderr.strip()[-600:]}")
        return done.stdout.strip()

    def bundle(self, container: str) -> Path:
        """Where podman keeps a container's specification and its checkpoint."""
        return self.storage / f"{self.driver}-containers" / container / "userdata"

    def exit_file(self, container: str) -> Path:
        """What podman waits for after a container's death; its monitor writes it unless it was killed too."""
        return self.folder / "tmp" / "exits" / container


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_PATH}:{':'.join(_PLACES)}")
