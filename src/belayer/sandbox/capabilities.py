"""What sandboxes can do on this host, each thing tried for real, for `belayer doctor`."""

from __future__ import annotations

import msgspec


class Capability(msgspec.Struct, frozen=True):
    """One thing this host can or cannot do. `required`: nothing works without it."""

    name: str
    ok: bool
    detail: str
    how_to_get: str = ""
    required: bool = False


def probe() -> list[Capability]:
    return []
