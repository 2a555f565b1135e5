"""Fixtures that several suites use."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# how long an example takes says more about the machine than about us
settings.register_profile("belayer", deadline=None)
settings.load_profile("belayer")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # as in a background job of a shell: then everything that the tests start would ignore Ctrl-C too
    signal.signal(signal.SIGINT, signal.default_int_handler)


def is_root() -> bool:
    return os.geteuid() == 0


needs_root = pytest.mark.skipif(not is_root(), reason="needs root: mounts, namespaces and CRIU")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MB that really runs full."""
    if not is_root():
        pytest.skip("needs root to mount a small file system")
    point = tmp_path / "small-disk"
    point.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "belayer-test", str(point)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


def _no_sandboxes() -> str:
    """Why sandboxes cannot work here, or ""."""
    if not is_root():
        return "needs root"
    from belayer.errors import BelayerError
    from belayer.sandbox import probe
    from belayer.sandbox.setup import separate_store

    try:
        separate_store("store-tests")
    except BelayerError as error:
        return error.what
    # the tests want more than the least: process images, on the store that runs use by default
    wanted = ("checkpoint and restore (CRIU)", "sandbox store (btrfs)")
    missing = [f"{x.name}: {x.detail}" for x in probe() if not x.ok and (x.required or x.name in wanted)]
    return "; ".join(missing)


def _lazily(reason: str, check) -> pytest.MarkDecorator:
    return pytest.mark.skipif(bool(why := check()), reason=f"{reason}: {why}")


needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
needs_sandboxes = _lazily("sandboxes do not work here", _no_sandboxes)
