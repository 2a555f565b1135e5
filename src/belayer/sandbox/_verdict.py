"""From what a host can do to what runs get there: the level of checkpoints and the kind of store. Pure functions."""

from __future__ import annotations

import msgspec

from belayer.checkpoint.manifest import Level
from belayer.sandbox._trees import StoreKind

CRIU, LEVEL = "checkpoint and restore (CRIU)", "checkpoint level"
BTRFS, OVERLAY = "sandbox store (btrfs)", "sandbox store (overlay)"
CONTAINER = ("sandbox program", "namespaces", "seccomp")  # in the order in which they are tried


class Capability(msgspec.Struct, frozen=True):
    """One thing this host can or cannot do. `required`: nothing works without it."""

    name: str
    ok: bool
    detail: str
    how_to_get: str = ""
    required: bool = False


def verdict(found: list[Capability]) -> Capability:
    """Which level of checkpoints, on which store, follows from all the other lines, and why not more."""
    have = {item.name: item for item in found}
    kind = best_store(found)
    level = best_level(found)
    lacking = [f"{name}: {have[name].detail}" for name in CONTAINER if name in have and not have[name].ok]
    if not level:
        reason = "; ".join([*lacking, *(f"{have[name].detail}" for name in (BTRFS, OVERLAY) if not kind)])
        return Capability(LEVEL, False, f"none: {reason}", "see the lines above", required=True)
    detail = f"{level}, on a store of {kind}"
    if level != "full":
        detail += f"; processes do not come back, since {have[CRIU].detail}"
    if kind != "btrfs":
        detail += f"; snapshots cost what was changed and inode numbers change, since {have[BTRFS].detail}"
    how = f'{have[CRIU].how_to_get}; until then set sandbox.allow_level = "{level}"' if level != "full" else ""
    return Capability(LEVEL, True, detail, how, required=True)


def best_store(found: list[Capability]) -> StoreKind | None:
    """The kind of store that `sandbox.store_kind = "auto"` takes here."""
    have = {item.name: item.ok for item in found}
    return "btrfs" if have.get(BTRFS) else "overlay" if have.get(OVERLAY) else None


def best_level(found: list[Capability]) -> Level | None:
    """The highest level of checkpoints that this host can give."""
    have = {item.name: item.ok for item in found}
    if not all(have.get(name) for name in ("root", *CONTAINER)) or best_store(found) is None:
        return None
    return "full" if have.get(CRIU) else "fs+shell"
