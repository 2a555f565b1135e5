"""Batch invariance: a request's logits do not depend, to the bit, on what is computed beside it.

Attention sees to it by itself (`attention`). Everything else in a decoder works on single tokens, that is, rows. What a
row gets depends on the number of rows only because libraries pick other kernels for few of them, so there are never
few:

- CPU: MKL's products are the same for a row from four rows on (with `MKL_CBWR`, which the worker's environment sets).
- GPU: cuBLAS picks a kernel, and how to split its sums, by the number of rows, so products are computed in tiles of
  exactly `GPU_ROWS` rows: the same kernel every time. Reductions over a row (norms) are arranged by the number of rows
  up to 16. A decode step is bound by reading weights, and the rows that pad it cost little.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.functional import linear

CPU_ROWS = 4
GPU_ROWS = 64


def rows_for(device: torch.device) -> int:
    """Steps are padded to a multiple of so many tokens."""
    return GPU_ROWS if device.type == "cuda" else CPU_ROWS


def linear_for_any_batch(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.linear` of x [..., features] whose rows do not depend on their number."""
    flat = x.reshape(-1, x.shape[-1])
    rows = flat.shape[0]
    if not flat.is_cuda:
        if rows >= CPU_ROWS:
            return linear(x, weight, bias)
        padded = flat.new_zeros(CPU_ROWS, flat.shape[1])
        padded[:rows] = flat
        return linear(padded, weight, bias)[:rows].view(*x.shape[:-1], -1)
    out = flat.new_empty(-(-rows // GPU_ROWS) * GPU_ROWS, weight.shape[0])
    for start in range(0, rows, GPU_ROWS):
        tile = flat[start : start + GPU_ROWS]
        if tile.shape[0] < GPU_ROWS or tile.data_ptr() % 256:  # cuBLAS looks at alignment as well
            tile = torch.cat([tile, tile.new_zeros(GPU_ROWS - tile.shape[0], tile.shape[1])])
        out[start : start + GPU_ROWS] = linear(tile, weight, bias)
    return out[:rows].view(*x.shape[:-1], -1)


def use_in(model: torch.nn.Module) -> None:
    """Compute every linear layer of `model` this way."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.forward = partial(linear_for_any_batch, module.weight, module.bias)  # pyright: ignore[reportAttributeAccessIssue]
