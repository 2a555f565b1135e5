"""The tensors of a model folder, as they are on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from belayer.errors import WeightsError

if TYPE_CHECKING:
    import torch


def checkpoint_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the folder's safetensors files, by name. Raises `WeightsError` if there is none."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{folder} holds no safetensors file")
    for file in files:
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118  (not a dict)
                yield name, content.get_tensor(name)
