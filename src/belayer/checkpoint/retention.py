"""Which checkpoints of a run are still needed. Pure logic: it is told what exists, and says what may go.

Every checkpoint can be restored on its own: none needs its ancestors. An older one is kept for these reasons only: it
is among the newest few of its sandbox, it is the newest that survives a reboot, or it is pinned (something is being
restored or exported from it, or it is all that a running fork could be restored from).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from belayer.checkpoint.manifest import Manifest


def garbage(
    checkpoints: Mapping[str, Sequence[Manifest]],
    *,
    keep: int,
    pinned: Collection[str],
    running: Collection[str],
    budget: int,
) -> list[Manifest]:
    """What to delete, oldest first.

    `checkpoints`: per sandbox, oldest first; `keep`: newest ones kept of each; `pinned`: ids; `running`: names of
    sandboxes that run. While the rest has more than `budget` bytes of process images, more go: first all that are not
    the newest of their sandbox, then those of sandboxes that do not run. The newest one of a running sandbox stays.
    """
    kept: set[str] = set(pinned)
    last: dict[str, str] = {}
    everything = sorted((m for group in checkpoints.values() for m in group), key=lambda m: m.sequence)
    for name, group in checkpoints.items():
        ordered = sorted(group, key=lambda m: m.sequence)
        kept.update(m.id for m in ordered[-keep:])
        kept.update(m.id for m in [m for m in ordered if m.durability == "host"][-1:])
        if ordered:
            last[name] = ordered[-1].id
    size = sum(m.image_bytes for m in everything if m.id in kept)
    spare = [m for m in everything if m.id in kept and m.id != last[m.sandbox]]
    spare.sort(key=lambda m: m.durability == "host")  # what survives a reboot goes last
    idle = [m for m in everything if m.id in kept and m.id == last[m.sandbox] and m.sandbox not in running]
    for manifest in [*spare, *idle]:
        if size <= budget:
            break
        if manifest.id not in pinned:
            kept.discard(manifest.id)
            size -= manifest.image_bytes
    return [m for m in everything if m.id not in kept]
