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
from belayer.sandbox import _cgroup, _claims
from belayer.sandbox._trees import Trees
from belayer.sandbox.store import Store, storage_errors

AGENTS = "agents"


class Places:
    """Makes the places of one run."""

    def __init__(self, store: Store, label: RunLabel, config: SandboxConfig, program: Path) -> None:
        self.roots = store.root / "runs" / label.name
        self.label = label
        self._store = store
        self._config = config
        self.limits = {"memory_bytes": config.memory_bytes, "pids": config.pids}  # of each sandbox's cgroup
        self.disk_bytes = (config.disk_bytes or store.share_bytes) if store.has_quota else 0
        # the store's own proof of life: another process may see this store without seeing our runtime folder
        self._claim = _claims.claim(self.roots)
        # one copy per run on the store's own file system: each sandbox gets a clone of it, which costs no data
        self._init = self.roots / "init"
        shutil.copy(program, self._init)
        # a subvolume, since it can be deleted whole even when the store is so full that no flag can be changed any more
        store.trees.make_folder(self.roots / AGENTS)

    def prepare(self, name: str, generation: int, source: Path) -> Place:
        """The place of a new generation whose root starts as `source`: an image or a snapshot; no cgroup. Blocking.

        Raises `StorageFull`.
        """
        return self.make(f"{safe_name(name)}-{generation}", source, generation)

    def make(self, key: str, source: Path, generation: int = 0) -> Place:
        """`prepare`, under a name of the caller's choice; a place that is made ahead has no generation yet."""
        place = Place(self.roots, key, self.label, generation, self._store.trees)
        try:
            self._store.check_room()
            with storage_errors(f"no room for the root {key} of a sandbox"):
                self._store.trees.make_root(source, place.tree, self.disk_bytes)
                place.agent.mkdir()
                self._store.trees.clone_file(self._init, place.agent / "init", 0o755)
                (place.agent / "mask").touch(mode=0)
                # before anything runs there
                for file in ("init", "mask"):
                    self._store.trees.set_immutable(place.agent / file, True)
            place.work.mkdir(parents=True, exist_ok=True)
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
    """One generation's folders. What `root` and `agent` hold is in the store: who fills them fills only the store."""

    def __init__(self, roots: Path, key: str, label: RunLabel, generation: int, trees: Trees) -> None:
        self.key = key
        self.work = label.dir / key
        self.tree = trees.root(roots / key, self.work)
        self.root = self.tree.path
        self.agent = roots / AGENTS / key
        self._trees = trees
        self.generation = generation
        self.environment: dict[str, str] = {}  # of the init of a new container: what the image sets
        self.cgroup = _cgroup.SandboxCgroup(label.name, key)  # or that of a slot

    def protect_agent(self) -> None:
        """From now on the container can neither remove its socket nor put anything beside it.

        Raises `SandboxLost` if a process of a restored container was faster and has done either.
        """
        self._trees.set_immutable(self.agent, True)
        found = {entry.name: entry.stat(follow_symlinks=False).st_mode for entry in os.scandir(self.agent)}
        if found.keys() != {"init", "mask", "agent.sock"} or not stat.S_ISSOCK(found["agent.sock"]):
            raise SandboxLost(f"a process of sandbox {self.key} has tampered with the folder of its socket")

    def remove(self) -> None:
        """Kill what runs here and delete everything. Safe to call again. Blocking."""
        self.cgroup.kill()
        self.cgroup.remove()
        self._trees.remove_root(self.tree)  # may be mounted below the next one
        shutil.rmtree(self.work, ignore_errors=True)
        try:
            for path in (self.agent, self.agent / "init", self.agent / "mask"):
                if os.path.lexists(path):
                    self._trees.set_immutable(path, False)
            shutil.rmtree(self.agent, ignore_errors=True)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise  # else it goes with the run's subvolume


def safe_name(name: str) -> str:
    """`name` as one part of a path; two names never become the same."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip(".")[:80]
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
