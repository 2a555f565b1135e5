"""Fingerprint of a sandbox's system folders, seen from the host: has somebody damaged it from outside?

Legitimate work changes these folders all the time (a package install running in the background), so only what cannot be
work is damage: a folder that is missing or was replaced by another, or that lost more than half of its entries.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

_FOLDERS = (
    "", "bin", "sbin", "lib", "lib64", "usr", "usr/bin", "usr/sbin", "usr/lib", "etc", "dev", "proc", "run", "root", "tmp",
)  # fmt: skip

Fingerprint = dict[str, tuple[int, int, int]]


def fingerprint(root: Path) -> Fingerprint:
    """Type, inode and size of each system folder. Never follows a symbolic link that the sandbox made."""
    found: Fingerprint = {}
    for name in _FOLDERS:
        parent = name.rpartition("/")[0]
        if parent and (parent not in found or found[parent][0] != stat.S_IFDIR):
            continue
        try:
            st = os.lstat(root / name)
        except OSError:
            continue
        found[name] = (stat.S_IFMT(st.st_mode), st.st_ino, st.st_size)
    return found


def damage(before: Fingerprint, now: Fingerprint) -> str | None:
    """What is wrong now, in a few words, or None."""
    wrong = []
    for name, (kind, inode, size) in before.items():
        place = f"/{name}"
        if name not in now:
            wrong.append(f"{place} is gone")
        elif now[name][:2] != (kind, inode):
            wrong.append(f"{place} was replaced")
        elif kind == stat.S_IFDIR and now[name][2] * 2 < size:
            wrong.append(f"{place} was emptied")
    if not wrong:
        return None
    return "system folders were damaged: " + ", ".join(wrong[:4]) + (" …" if len(wrong) > 4 else "")
