"""The C program of the sandbox: built once per version of its sources, kept in the cache folder.

A wheel may carry it prebuilt beside the sources (`native/belayer-sandbox`); it is then used as it is.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from belayer.errors import SandboxUnavailable
from belayer.ownership import cache_dir

SOURCES = Path(__file__).parent / "native"
FILES = (
    "main.c",
    "util.c",
    "seccomp.c",
    "devices.c",
    "launch.c",
    "criu.c",
    "keeper.c",
    "init.c",
    "request.c",
    "jobs.c",
    "run.c",
    "copy.c",
    "shell.c",
    "tree.c",
    "guest.c",
    "gate.c",
)
FLAGS = ("-static", "-O2", "-std=gnu17", "-Wall", "-Wextra", "-s")


def native_program(*, build: bool = True) -> Path:
    """Path of the program that matches the sources, built first if need be (about 2 s).

    Raises `SandboxUnavailable` when it is not there and cannot be built.
    """
    prebuilt = SOURCES / "belayer-sandbox"
    if prebuilt.is_file():
        return prebuilt
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for name in (*FILES, "belayer.h", "init.h"):
        digest.update((SOURCES / name).read_bytes())
    folder = cache_dir() / "native"
    program = folder / f"belayer-sandbox-{digest.hexdigest()[:16]}"
    if program.is_file():
        return program
    if not build:
        raise SandboxUnavailable("the sandbox's program is not built", next_step="run `make setup`")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise SandboxUnavailable("no C compiler to build the sandbox's program", next_step="install gcc and libc6-dev")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        target = Path(work) / "program"
        command = [compiler, *FLAGS, "-o", str(target), *(str(SOURCES / name) for name in FILES)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise SandboxUnavailable(f"the sandbox's program does not compile:\n{done.stderr[-2000:]}")
        os.replace(target, program)  # two builders at once: both write the same program
    return program
