"""Filling the first epoch from a checkpoint without the inference engine's loading code: the layout says where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from belayer.engine.memory import Region
from belayer.engine.weights.layout import Layout, Slice
from belayer.errors import WeightsError

if TYPE_CHECKING:
    import torch


def copy_tensors(layout: Layout, target: Region, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write every tensor of a checkpoint to its places in `target`, converted to the places' dtype.

    Names without a place (`Layout.aliases`, heads that are tied) are passed over, as the model's own loading code did
    when the layout was recorded. Raises `WeightsError` for a wrong shape and when a place stays empty.
    """
    import torch

    places: dict[str, list[Slice]] = defaultdict(list)
    for entry in layout.slices:
        places[entry.name].append(entry)
    memory = target.tensor()
    with torch.no_grad():
        for name, tensor in tensors:
            for place in places.pop(name, ()):
                if tuple(tensor.shape) != place.shape:
                    raise WeightsError(f"{name} has shape {tuple(tensor.shape)}, the model's is {place.shape}")
                destination = memory[place.offset : place.offset + place.nbytes]
                destination.view(getattr(torch, place.dtype)).view(place.shape).copy_(tensor)
    if places:
        raise WeightsError(f"the model folder has no tensor {min(places)}")
