"""This host, as far as process images are concerned."""

from __future__ import annotations

from functools import cache

from belayer.checkpoint.host import Host, misfits, this_host
from belayer.checkpoint.manifest import Manifest
from belayer.errors import CheckpointUnfit
from belayer.sandbox.criu import criu_version, find_criu


@cache
def here() -> Host:
    """Blocking, a few milliseconds the first time. Raises `SandboxUnavailable` without CRIU."""
    return this_host(".".join(map(str, criu_version(find_criu()))))


def check_fits(manifest: Manifest) -> None:
    """Raises `CheckpointUnfit` when its process images cannot be restored on this host."""
    if manifest.host is None or not manifest.images:
        return
    reasons = misfits(manifest.host, here())
    if reasons:
        raise CheckpointUnfit(
            f"checkpoint {manifest.id} does not fit this host: {'; '.join(reasons)}",
            kept="the checkpoint",
            next_step="restore it on a host like the one that made it",
        )
