"""Where one generation of a sandbox lives on the host: its root, its agent folder, its cgroups, its working folder."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
from pathlib import Path

from belayer.config import SandboxConfig
from belayer.errors import SandboxLost
from belayer.ownership import RunLabel
from belayer.sandbox import _btrfs, _cgroup, _claims
from belayer.sandbox.store import Store, remove_tree, storage_errors

AGENTS = "agents"


class Places:
    """Makes the places of one run."""

    def __init__(self, store: Store, label: RunLabel, config: SandboxConfig, program: Path) -> None:
        self.roots = store.root / "runs" / label.name
        self.label = label
        self._store = store
        self._config = config
        self.disk_bytes = (config.disk_bytes or store.share_bytes) if store.has_quota else 0
        # the store's own proof of life: another process may see this store without seeing our runtime folder
        self._claim = _claims.claim(self.roots)
        # one copy per run on the store's own file system: each sandbox gets a clone of it, which costs no data
        self._init = self.roots / "init"
        shutil.copy(program, self._init)
        # a subvolume, since it can be deleted whole even when the store is so full that no flag can be changed any more
        _btrfs.create_subvolume(self.roots / AGENTS)

    def prepare(self, name: str, generation: int, source: Path) -> Place:
        """The place of a new generation whose root starts as the subvolume `source`. Blocking, a few milliseconds.

        Raises `StorageFull`.
        """
        self._store.check_room()
        place = Place(self.roots, f"{safe_name(name)}-{generation}", self.label, generation)
        try:
            with storage_errors(f"no room for a root of sandbox {name}"):
                _btrfs.snapshot(source, place.root)
                if self.disk_bytes:
                    _btrfs.limit(place.root, self.disk_bytes)
                place.agent.mkdir()
                _btrfs.clone_file(self._init, place.agent / "init", 0o755)
                # before anything runs there: a restored process is awake before `protect_agent`
                _btrfs.set_immutable(place.agent / "init", True)
            place.work.mkdir(parents=True)
            place.cgroup.make(memory_bytes=self._config.memory_bytes, pids=self._config.pids)
        except BaseException:
            place.remove()
            raise
        return place

    def remove(self) -> None:
        """Remove what is left of the run. Every container must be dead. Blocking."""
        if self._claim >= 0:
            fd, self._claim = self._claim, -1
            _claims.release(self.roots, fd)
        for folder in _cgroup.run_folders(self.label.name):
            _cgroup.remove_folder(folder)


class Place:
    """One generation's folders. `root` and `agent` are in the store: who fills them fills only the store."""

    def __init__(self, roots: Path, key: str, label: RunLabel, generation: int) -> None:
        self.key = key
        self.root = roots / key
        self.agent = roots / AGENTS / key
        self.work = label.dir / key
        self.generation = generation
        self.cgroup = _cgroup.SandboxCgroup(label.name, key)

    def protect_agent(self) -> None:
        """From now on the container can neither remove its socket nor put anything beside it.

        Raises `SandboxLost` if a process of a restored container was faster and has done either.
        """
        _btrfs.set_immutable(self.agent, True)
        found = {entry.name: entry.stat(follow_symlinks=False).st_mode for entry in os.scandir(self.agent)}
        if found.keys() != {"init", "agent.sock"} or not stat.S_ISSOCK(found["agent.sock"]):
            raise SandboxLost(f"a process of sandbox {self.key} has tampered with the folder of its socket")

    def remove(self) -> None:
        """Kill what runs here and delete everything. Safe to call again. Blocking."""
        self.cgroup.kill()
        self.cgroup.remove()
        shutil.rmtree(self.work, ignore_errors=True)
        if self.root.is_dir():
            remove_tree(self.root)
        try:
            for path in (self.agent, self.agent / "init"):
                if os.path.lexists(path):
                    _btrfs.set_immutable(path, False)
            shutil.rmtree(self.agent, ignore_errors=True)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise  # else it goes with the run's subvolume


def safe_name(name: str) -> str:
    """`name` as one part of a path; two names never become the same."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip(".")[:80]
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
