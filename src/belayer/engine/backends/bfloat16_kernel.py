"""Building `bfloat16.c`: where it is wanted, and where it can be had. Free of torch, so that the driver may ask."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from belayer.ownership import cache_dir

SOURCE = Path(__file__).with_name("bfloat16.c")
FLAGS = ("-O3", "-std=gnu17", "-mavx2", "-mfma", "-fPIC", "-Wall", "-Wextra")
_OWN_INSTRUCTIONS = {"avx512bw", "avx512_bf16", "amx_bf16", "avx_ne_convert"}  # torch does better with any of these


@functools.cache
def unavailable() -> str:
    """Why this host's bfloat16 products are not our kernel's; empty: they are, and the kernel is built."""
    try:
        build()
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def build() -> Path:
    """The library, compiled at its first use. Raises `ValueError` where it cannot be had or is not wanted."""
    with open("/proc/cpuinfo") as info:
        flags = set(info.read().split())
    if not {"avx2", "fma"} <= flags:
        raise ValueError("the processor has no AVX2")
    if flags & _OWN_INSTRUCTIONS:
        raise ValueError("the processor multiplies bfloat16 itself")
    digest = hashlib.sha256(" ".join(FLAGS).encode() + SOURCE.read_bytes()).hexdigest()
    library = cache_dir() / "native" / f"bfloat16-{digest[:16]}.so"
    if library.is_file():
        return library
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise ValueError("there is no C compiler")
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        parts, target = Path(work) / "kernel.o", Path(work) / "kernel.so"
        # linked without an OpenMP library of its own: two of them would start two sets of threads
        for command in (
            [compiler, *FLAGS, "-fopenmp", "-c", str(SOURCE), "-o", str(parts)],
            [compiler, "-shared", str(parts), "-o", str(target)],
        ):
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                raise ValueError(f"{SOURCE.name} does not compile:\n{done.stderr[-1000:]}")
        os.replace(target, library)  # two builders at once: both write the same library
    return library
