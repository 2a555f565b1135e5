"""The driver's hand on the weights: writes an epoch, and can hand its content to a new owner."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from belayer.engine._wire import Epoch
from belayer.engine.memory.host import Region
from belayer.engine.owner.client import OwnerClient
from belayer.engine.weights.layout import Layout, digest
from belayer.errors import WeightsError

if TYPE_CHECKING:
    import torch

HEAD = "lm_head.weight"


class Epochs:
    """Both weights slots of an owner, mapped writable. The mapping outlives the owner."""

    def __init__(self, owner: OwnerClient, layout: Layout, *, tied: bool) -> None:
        self.layout = layout
        self.layout_hash = layout.hash()
        self._owner = owner
        self._places = {entry.name: entry for entry in layout.slices}
        self._tied = tied
        self._slots = self._map()
        self._lock = threading.Lock()  # an update runs in a thread, and the slots must not be exchanged under it

    def _map(self) -> list[Region]:
        _state, fds = self._owner.weights(when_clean=False)
        slots = []
        for fd in fds:
            region = Region(self.layout.nbytes)
            region.place(fd, writable=True)
            os.close(fd)
            slots.append(region)
        return slots

    def update(self, base: Epoch, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> Epoch:
        """Write the next epoch: `tensors` over the content of `base`, digest, commit. Blocking.

        Until the commit the epoch is dirty and `base` goes on serving; an exception on the way changes nothing.
        Raises `WeightsError` for an unknown name, a wrong shape, or an owner that refuses.
        """
        with self._lock:
            dirty = self._owner.begin(base.number)
            target = self._slots[dirty.slot].view()
            target[:] = self._slots[base.slot].view()
            # a tied head is compared with the embedding, which must be in place by then
            for name, tensor in sorted(tensors, key=lambda entry: entry[0] == HEAD):
                self._write(target, name, tensor)
            return self._owner.commit(dirty.number, digest(self.layout, target), policy_version)

    def _write(self, target: memoryview, name: str, tensor: torch.Tensor) -> None:
        import torch

        place = self._places.get(name)
        if place is None:
            if name in self.layout.aliases:
                return  # the checkpoint had it too, and the model took nothing from it
            if self._tied and name == HEAD:
                self._check_tied(target, tensor)
                return
            raise WeightsError(f"the model has no tensor {name}", next_step="use the names of the model folder")
        if tuple(tensor.shape) != place.shape:
            raise WeightsError(f"{name} has shape {tuple(tensor.shape)}, the model's is {place.shape}")
        destination = torch.frombuffer(target[place.offset : place.offset + place.nbytes], dtype=torch.uint8)
        with torch.no_grad():
            destination.view(getattr(torch, place.dtype)).view(place.shape).copy_(tensor)

    def _check_tied(self, target: memoryview, head: torch.Tensor) -> None:
        """A state dict names the tied head too. It has no place of its own, so it must say what the embedding says."""
        import torch

        for name, place in self._places.items():
            if name.endswith("embed_tokens.weight") and tuple(head.shape) == place.shape:
                stored = torch.frombuffer(target[place.offset : place.offset + place.nbytes], dtype=torch.uint8)
                embedding = stored.view(getattr(torch, place.dtype)).view(place.shape)
                if torch.equal(embedding, head.detach().to(embedding.dtype).cpu()):
                    return
        raise WeightsError(f"{HEAD} differs from the embedding, and the model ties them")

    def move_to(self, owner: OwnerClient, epoch: Epoch) -> Epoch:
        """Fill a new owner with the content of `epoch`, from this process's own mapping, and use it from now on.

        Raises `WeightsError` when the content no longer has the digest it was committed with.
        """
        with self._lock:
            return self._move_to(owner, epoch)

    def _move_to(self, owner: OwnerClient, epoch: Epoch) -> Epoch:
        source = self._slots[epoch.slot]
        if digest(self.layout, source.view()) != epoch.digest:
            raise WeightsError(f"the content of epoch {epoch.number} is damaged", next_step="start the engine again")
        old, self._owner = self._slots, owner
        owner.define(self.layout)
        self._slots = self._map()
        dirty = owner.begin(epoch.number)
        self._slots[dirty.slot].view()[:] = source.view()
        clean = owner.commit(dirty.number, epoch.digest, epoch.policy_version)
        for region in old:
            region.close()
        return clean

    def close(self) -> None:
        """Unmap; waits for an update that is still writing."""
        with self._lock:
            for region in self._slots:
                region.close()
