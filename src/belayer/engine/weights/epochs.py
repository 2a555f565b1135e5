"""The driver's hand on the weights: writes an epoch, and can hand its content to a new owner."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from belayer.engine._wire import Epoch
from belayer.engine.memory import Region, Scratch, of
from belayer.engine.owner.client import OwnerClient
from belayer.engine.weights.layout import Layout, digest
from belayer.errors import WeightsError
from belayer.faults.failpoints import hit

if TYPE_CHECKING:
    import torch

HEAD = "lm_head.weight"


class Epochs:
    """Both weights slots of an owner, mapped writable. The mapping outlives the owner."""

    def __init__(self, owner: OwnerClient, layout: Layout, *, tied: bool, device: str = "cpu") -> None:
        self._memory = of(device)
        self.layout = layout
        self.layout_hash = layout.hash()
        self._owner = owner
        self._places = {entry.name: entry for entry in layout.slices}
        self._tied = tied
        self._slots = self._map()
        self._lock = threading.Lock()  # an update runs in a thread, and the slots must not be exchanged under it

    def _map(self) -> list[Region]:
        _state, fds = self._owner.weights(when_clean=False)
        slots: list[Region] = []
        for fd in fds:
            region = self._memory.reserve(self.layout.nbytes, Scratch.NONE)
            region.place(fd, writable=True)
            os.close(fd)
            slots.append(region)
        return slots

    def update(
        self, base: Epoch, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int, budget_s: float
    ) -> Epoch:
        """Write the next epoch: `tensors` over the content of `base`, digest, commit. Blocking.

        Until the commit the epoch is dirty and `base` goes on serving; an exception on the way changes nothing.
        Raises `WeightsError` for an unknown name, a wrong shape, an owner that refuses, or when `budget_s` is over
        before the commit.
        """
        with self._lock:
            end = time.monotonic() + budget_s
            dirty = self._begin(base)
            hit("engine.update.begin")
            target = self._slots[dirty.slot]
            target.copy_from(self._slots[base.slot])
            for name, tensor in _head_last(tensors):
                if time.monotonic() > end:
                    raise WeightsError(f"the update was not written within {budget_s:.1f} s (at {name})")
                self._write(target, name, tensor)
                hit("engine.update.after_shard")
            content = digest(self.layout, target)
            hit("engine.update.before_commit")
            return self._owner.commit(dirty.number, content, policy_version)

    def _begin(self, base: Epoch) -> Epoch:
        dirty = self._owner.begin(base.number)
        if dirty.slot == base.slot:
            raise WeightsError(f"epoch {base.number}, which serves, is not the owner's clean epoch")
        return dirty

    def _write(self, target: Region, name: str, tensor: torch.Tensor) -> None:
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
        destination = target.tensor()[place.offset : place.offset + place.nbytes]
        with torch.no_grad():
            destination.view(getattr(torch, place.dtype)).view(place.shape).copy_(tensor)

    def _check_tied(self, target: Region, head: torch.Tensor) -> None:
        """A state dict names the tied head too. It has no place of its own, so it must say what the embedding says."""
        import torch

        for name, place in self._places.items():
            if name.endswith("embed_tokens.weight") and tuple(head.shape) == place.shape:
                stored = target.tensor()[place.offset : place.offset + place.nbytes]
                embedding = stored.view(getattr(torch, place.dtype)).view(place.shape)
                if torch.equal(embedding, head.detach().to(embedding.device, embedding.dtype)):
                    return
        raise WeightsError(f"{HEAD} differs from the embedding, and the model ties them")

    def move_to(self, owner: OwnerClient, epoch: Epoch) -> Epoch:
        """Fill a new owner with the content of `epoch`, from this process's own mapping, and use it from now on.

        Raises `WeightsError` when the content no longer has the digest it was committed with.
        """
        with self._lock:
            return self._move_to(owner, epoch)

    def refill(self, owner: OwnerClient, epoch: Epoch, tensors: Iterable[tuple[str, torch.Tensor]]) -> Epoch:
        """Fill a new owner with the weights of `epoch` from their source, for what is in memory is damaged.

        Raises `WeightsError` when `tensors` are not all of them, or when together they have another digest.
        """
        with self._lock:
            old, self._owner = self._slots, owner
            owner.define(self.layout)
            self._slots = self._map()
            dirty = owner.begin(epoch.number)
            target = self._slots[dirty.slot]
            for name, tensor in _head_last(tensors):
                self._write(target, name, tensor)
            if digest(self.layout, target) != epoch.digest:
                raise WeightsError(f"the source of the weights gave other ones than those of epoch {epoch.number}")
            clean = owner.commit(dirty.number, epoch.digest, epoch.policy_version)
            for region in old:
                region.close()
            return clean

    def _move_to(self, owner: OwnerClient, epoch: Epoch) -> Epoch:
        source = self._slots[epoch.slot]
        if digest(self.layout, source) != epoch.digest:
            raise WeightsError(f"the content of epoch {epoch.number} is damaged", next_step="start the engine again")
        old, self._owner = self._slots, owner
        owner.define(self.layout)
        self._slots = self._map()
        dirty = owner.begin(epoch.number)
        self._slots[dirty.slot].copy_from(source)
        clean = owner.commit(dirty.number, epoch.digest, epoch.policy_version)
        for region in old:
            region.close()
        return clean

    def close(self) -> None:
        """Unmap; waits for an update that is still writing."""
        with self._lock:
            for region in self._slots:
                region.close()


def _head_last(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """A tied head is compared with the embedding, which must be in place by then."""
    return sorted(tensors, key=lambda entry: entry[0] == HEAD)
