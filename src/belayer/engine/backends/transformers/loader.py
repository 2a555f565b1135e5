"""A transformers model on the owner's weights (`belayer.engine.backends.owned_weights`)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from belayer.engine.backends.owned_weights import OwnedWeights
from belayer.engine.weights.checkpoint_files import checkpoint_tensors
from belayer.errors import WeightsError


def build(folder: Path, dtype: str, device: torch.device, weights: OwnedWeights) -> torch.nn.Module:
    """The folder's model, every parameter in the owner's epoch, its buffers on `device`."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with no_init_weights():
        # on the host, whatever the device: pages that nobody touches cost nothing, memory of a GPU would
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    model.tie_weights()  # part of the initialisation that was left out
    model.requires_grad_(False)
    weights.take(model, lambda: checkpoint_tensors(folder), lambda tensors: _load(model, tensors))
    return model.to(device).eval()


def _load(model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy each tensor to the parameter of its name."""
    parameters = dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - parameters.keys()
    with torch.no_grad():
        for name, tensor in tensors:
            if name in parameters:
                if parameters[name].shape != tensor.shape:
                    raise WeightsError(f"{name} has shape {tuple(tensor.shape)} in the folder, not the model's")
                parameters[name].copy_(tensor)
            elif name not in tied and not name.endswith(".inv_freq"):
                raise WeightsError(
                    f"the model has no parameter {name}: this architecture's checkpoint needs a conversion "
                    "that the transformers backend does not do",
                    next_step='use engine.backend = "vllm"',
                )
