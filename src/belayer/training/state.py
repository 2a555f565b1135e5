"""The trainer's saved states: which one is whole, and what is in it.

A state is a folder `checkpoint-<step>` that the trainer library writes file by file. It counts once it holds
`complete.json`, which is renamed into place after everything else is on disk. A folder without it is what a kill in
the middle of saving left, and goes at the next start.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from belayer.training.interface import TrainingError

if TYPE_CHECKING:
    import torch

_MARKER = "complete.json"
_PREFIX = "checkpoint-"


class SavedState(msgspec.Struct, frozen=True):
    """A whole saved state: the policy after `step` optimiser steps (so its policy version), in `folder`."""

    step: int
    folder: Path
    weights_digest: str

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The policy's tensors under their Hugging Face names, for an engine that starts with them."""
        from safetensors import safe_open

        for file in sorted(self.folder.glob("model*.safetensors")):
            with safe_open(file, framework="pt") as content:
                for name in content.keys():  # noqa: SIM118 (not a mapping)
                    yield name, content.get_tensor(name)


def newest_state(state_dir: Path) -> SavedState | None:
    """The newest whole state below `state_dir`, or None before the first optimiser step was saved."""
    found = []
    for folder in state_dir.glob(f"{_PREFIX}*"):
        marker = folder / _MARKER
        if marker.is_file():
            content = json.loads(marker.read_text())
            found.append(SavedState(content["step"], folder, content["weights_digest"]))
    return max(found, key=lambda state: state.step, default=None)


def remove_unfinished(state_dir: Path) -> None:
    """Remove states that a kill left half-written."""
    for folder in state_dir.glob(f"{_PREFIX}*"):
        if not (folder / _MARKER).is_file():
            shutil.rmtree(folder)


def mark_complete(folder: Path, step: int, weights_digest: str) -> None:
    """Force everything in `folder` to disk, then publish it as whole."""
    if not folder.is_dir():
        raise TrainingError(f"the state of step {step} was not saved: there is no {folder}")
    for path in folder.iterdir():
        if path.is_file():
            _sync(path)
    unpublished = folder / f"{_MARKER}.tmp"
    unpublished.write_text(json.dumps({"step": step, "weights_digest": weights_digest}))
    _sync(unpublished)
    unpublished.rename(folder / _MARKER)
    _sync(folder)
    _sync(folder.parent)


def weights_digest(named_tensors: Iterator[tuple[str, torch.Tensor]]) -> str:
    """Digest of names, shapes and exact values."""
    import torch

    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(named_tensors, key=lambda item: item[0]):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
