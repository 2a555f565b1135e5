"""Norms in one pass over memory, by the kernels that vLLM ships for the CPU.

vLLM itself composes them from PyTorch operations there (vLLM 0.32), each of which reads and writes the whole batch: 140
of 740 ms of an 80-token prefill of a 0.4B model in bfloat16. A row's result depends on that row alone, to the bit.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import vllm._custom_ops  # noqa: F401  (loads the kernel library that fits this processor)
from vllm.model_executor.layers.layernorm import RMSNorm

_KERNELS = ("rms_norm", "fused_add_rms_norm")


def use_in(model: torch.nn.Module) -> None:
    """Replace what the modules of a built model compute with; what these kernels do not offer stays as it is."""
    if not all(_is_there(name) for name in _KERNELS):
        return
    for module in model.modules():
        if type(module) is RMSNorm and module.has_weight and module.variance_size_override is None:
            chosen: Any = module
            chosen._forward_method = partial(_norm, module)


def _is_there(name: str) -> bool:
    return hasattr(torch.ops._C, name) and torch._C._dispatch_has_kernel_for_dispatch_key(f"_C::{name}", "CPU")


def _norm(module: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    if residual is None:
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        torch.ops._C.rms_norm(result, x.contiguous(), module.weight.data, module.variance_epsilon)
        return result
    torch.ops._C.fused_add_rms_norm(x, residual, module.weight.data, module.variance_epsilon)
    return x, residual
