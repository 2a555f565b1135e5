"""`belayer uninstall`: let go of everything in use on this host, and say how to delete what is left on its disk."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from rich.console import Console

from belayer.cli.doctor import print_reaped
from belayer.ownership import cache_dir, store_dir
from belayer.ownership.labels import RUNTIME_DIR, SHM_DIR, mounts_below
from belayer.ownership.reap import live_labels, reap
from belayer.sandbox import reap as reap_sandboxes

PACKAGES = "debian-packages"  # in the cache folder: what set-up installed, one name per line
console = Console(highlight=False, soft_wrap=True, markup=False)


def uninstall_command() -> int:
    """0 when nothing on this host is in use any more; 1 when a run lives or a store is still mounted."""
    if live := sorted(live_labels()):
        console.print(f"{len(live)} runs are alive ({', '.join(live)}): stop them first. Nothing was touched.")
        return 1
    removed, failed = reap()
    print_reaped(removed, reap_sandboxes(), failed)
    mounted = mounts_below(RUNTIME_DIR)
    for point in mounted:
        console.print(f"still mounted: {point}; a process uses it (`fuser -vm {point}` says which)")
    if mounted or failed:
        return 1
    console.print("Nothing of Belayer runs or is mounted. Nothing on the disk was deleted. What is left there:")
    for line in remains():
        console.print(f"  {line}")
    return 0


def remains() -> list[str]:
    """A line for each thing that set-up has made and that is still there: what removes it, and what it is."""
    cache, store = cache_dir(), store_dir()
    found = []
    if cache.exists():
        found.append(f"rm -rf {_quoted(cache)}  # packages, CRIU, images; other checkouts may use it too")
    if store.exists() and not store.is_relative_to(cache):
        found.append(f"rm -rf {_quoted(store)}  # the sandbox store")
    found += [f"rmdir {_quoted(folder)}" for folder in (RUNTIME_DIR, SHM_DIR) if folder.is_dir()]
    try:
        packages = sorted(set((cache / PACKAGES).read_text().split()))
    except OSError:
        packages = []
    if packages:
        found.append(f"apt-get remove {' '.join(packages)}  # set-up installed them; something else may need them now")
    if Path(sys.prefix, "pyvenv.cfg").is_file():
        found.append(f"rm -rf {_quoted(Path(sys.prefix))}  # or `make clean` in the checkout")
    return [*found, "your run directories, which Belayer does not know"]


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
