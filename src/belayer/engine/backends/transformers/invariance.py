"""Batch invariance: a request's logits do not depend, to the bit, on what is computed beside it.

Attention sees to it by itself (`attention`). Everything else in a decoder works on single tokens, that is, rows. What a
row gets depends on the number of rows because libraries arrange work by it. On the CPU (torch 2.13, MKL 2024.2,
float32, checked with 1 to 24 threads):

- MKL's products are the same for a row once there are enough of them (`belayer.engine.backends.rows`), with `MKL_CBWR`,
  which the worker's environment sets. (Keys and values of few heads: 18 of 20 resumed requests differed with three
  threads.)
- Activation functions are computed 16 elements at a time, and what is left over at the end of each thread's share
  one by one, with another exponential. They get pieces that one thread computes and that leave nothing over. (8 of 24
  resumed requests differed with three threads, none with one or two.)

On a GPU cuBLAS picks a kernel, and how to split its sums, by the number of rows, so products are computed in tiles of
exactly `GPU_ROWS` rows: the same kernel every time. Reductions over a row (norms) are arranged by the number of rows
up to 16. A decode step is bound by reading weights, and the rows that pad it cost little.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import linear, pad
from transformers.activations import ACT2CLS

from belayer.engine.backends.rows import FEWEST, rows_needed

GPU_ROWS = 64
PIECE = 1 << 14  # elements; PyTorch divides work among threads from twice as many on


def rows_for(device: torch.device) -> int:
    """Steps are padded to a multiple of so many tokens."""
    return GPU_ROWS if device.type == "cuda" else FEWEST


def linear_for_any_batch(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.linear` of x [..., features] whose rows do not depend on their number."""
    flat = x.reshape(-1, x.shape[-1])
    rows = flat.shape[0]
    if not flat.is_cuda:
        needed = rows_needed(weight.shape[0])
        if rows >= needed:
            return linear(x, weight, bias)
        padded = flat.new_zeros(needed, flat.shape[1])
        padded[:rows] = flat
        return linear(padded, weight, bias)[:rows].view(*x.shape[:-1], -1)
    out = flat.new_empty(-(-rows // GPU_ROWS) * GPU_ROWS, weight.shape[0])
    for start in range(0, rows, GPU_ROWS):
        tile = flat[start : start + GPU_ROWS]
        if tile.shape[0] < GPU_ROWS or tile.data_ptr() % 256:  # cuBLAS looks at alignment as well
            tile = torch.cat([tile, tile.new_zeros(GPU_ROWS - tile.shape[0], tile.shape[1])])
        out[start : start + GPU_ROWS] = linear(tile, weight, bias)
    return out[:rows].view(*x.shape[:-1], -1)


def in_pieces(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """An elementwise `function` of x, whose elements do not depend on where in x they are."""
    if x.is_cuda:
        return function(x)
    flat = x.reshape(-1)
    out = torch.empty_like(flat)
    for start in range(0, flat.numel(), PIECE):
        piece = flat[start : start + PIECE]
        left = -piece.numel() % 64
        out[start : start + PIECE] = function(pad(piece, (0, left)) if left else piece)[: piece.numel()]
    return out.view(x.shape)


def use_in(model: torch.nn.Module) -> None:
    """Compute every linear layer and every activation function of `model` this way."""
    activations = {entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()}
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.forward = partial(linear_for_any_batch, module.weight, module.bias)  # pyright: ignore[reportAttributeAccessIssue]
        elif type(module) in activations and next(module.parameters(), None) is None:
            module.forward = partial(in_pieces, module.forward)  # pyright: ignore[reportAttributeAccessIssue]
