"""bfloat16 matrix products on processors without instructions for them.

There torch multiplies bfloat16 row by row: 20 GFlop/s on two cores of one such processor, against 100 through float32
and 160 with `bfloat16_linear` (80 rows; AVX2, torch 2.13), and prefill is made of such products. Where our kernel
cannot be had, blocks of the weights are widened, multiplied in float32 and rounded once at the end, which is at least
as exact. Nothing is kept: an update of the weights is seen by the next product.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from belayer.engine.backends import bfloat16_linear

FEWEST_ROWS = 6  # below, reading the weights is most of the work, and widening them would only add to it
BLOCK = 1 << 20  # elements widened at a time: 4 MiB


def needed(dtype: torch.dtype) -> bool:
    """Whether `dtype` is bfloat16 and this processor cannot multiply it."""
    return dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def linear_through_float32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear` of bfloat16 tensors, by our kernel where it suits. `x` is [rows, features]."""
    if bfloat16_linear.suits(x, weight):
        return bfloat16_linear.bfloat16_linear(x, weight, bias)
    if x.shape[0] < FEWEST_ROWS:
        return linear(x, weight, bias)
    outputs, features = weight.shape
    step = max(1, BLOCK // features)
    wide = x.float()
    result = x.new_empty((x.shape[0], outputs))
    for start in range(0, outputs, step):
        part = weight[start : start + step].float()
        result[:, start : start + step] = linear(
            wide, part, None if bias is None else bias[start : start + step].float()
        )
    return result
