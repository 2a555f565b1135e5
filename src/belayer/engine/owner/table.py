"""The owner's whole state: which epoch is clean, which is dirty, and where each lies."""

from __future__ import annotations

from belayer.engine._wire import Epoch
from belayer.engine.weights.layout import Layout

SLOTS = 2


class EpochTable:
    """Which epoch is clean, which is dirty, and in which slot each lies. Pure; no memory behind it."""

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self.clean: Epoch | None = None
        self.dirty: Epoch | None = None
        self._last = 0

    def define(self, layout: Layout) -> None:
        if self.layout is not None and self.layout.hash() != layout.hash():
            raise ValueError("another layout is in use: the model or its dtype changed under a living owner")
        self.layout = layout

    def begin(self, after: int = 0) -> Epoch:
        """A new dirty epoch in the free slot. An older dirty one, whose writer must be gone, is given up."""
        if self.layout is None:
            raise ValueError("no layout is defined yet")
        self._last = max(self._last, after) + 1
        slot = (self.clean.slot + 1) % SLOTS if self.clean else 0
        self.dirty = Epoch(self._last, slot, clean=False)
        return self.dirty

    def commit(self, number: int, digest: str, policy_version: int) -> Epoch:
        if self.dirty is None or self.dirty.number != number:
            raise ValueError(f"epoch {number} is not the one being written")
        if not digest:
            raise ValueError("an epoch without a digest cannot be clean")
        self.clean = Epoch(number, self.dirty.slot, clean=True, policy_version=policy_version, digest=digest)
        self.dirty = None
        return self.clean
