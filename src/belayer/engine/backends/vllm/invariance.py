"""Batch invariance on the CPU: a request's logits do not depend, to the bit, on what is computed beside it.

Without it a resumed request, whose prefix is prefilled instead of decoded and whose neighbours are others, gets logits
that differ in the last bits, and once in a while another token. Three things depend on the shape of a batch, and each
has one setting that ends it at no measurable cost (float32, vLLM 0.32, MKL 2024.2; 24 requests of up to 1,280 tokens,
chunked, preempted, cached, resumed: 0 of 2,880 logprobs differ, against 1,178 with the matrix products alone fixed):

- MKL picks kernels by shape: `MKL_CBWR` holds it to one order of summation, from a few rows on; fewer are padded.
- Attention splits long prefixes over threads: `VLLM_CPU_ATTN_SPLIT_KV=0`. (Both are set in the worker's environment.)
- Attention cuts the keys into tiles by what fits the cache beside the step's queries: `use_one_attention_tile`.

In bfloat16 the products are our own kernel's (`bfloat16_linear`), whose rows never depend on one another, and attention
is held still the same way.
"""

from __future__ import annotations

import ctypes

import torch
import vllm._custom_ops  # noqa: F401  (loads the kernel library that fits this processor)

from belayer.engine.backends.rows import rows_needed
from belayer.errors import EngineError

_TILE_BUDGET = "_ZZN9cpu_utils21get_available_l2_sizeEvE4size"
_TILE_BUDGET_SET = "_ZGVZN9cpu_utils21get_available_l2_sizeEvE4size"


def linear_for_any_batch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear` whose rows do not depend on their number. `x` is [rows, features]."""
    rows = x.shape[0]
    needed = rows_needed(weight.shape[0])
    if rows >= needed:
        return torch.nn.functional.linear(x, weight, bias)
    padded = x.new_zeros((needed, *x.shape[1:]))
    padded[:rows] = x
    return torch.nn.functional.linear(padded, weight, bias)[:rows]


def use_one_attention_tile(budget: int = 1 << 30) -> None:
    """Let vLLM's CPU attention take the keys of a request as one tile, however long the prefix.

    The kernel sizes its tiles by a constant of its library, the level-2 cache, that is read at its first use. This
    sets it, before that, to `budget` bytes: room for about a million keys. Raises `EngineError` where the library has
    no such constant.
    """
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "/vllm/_C" in line}
    found = False
    for path in paths:
        library = ctypes.CDLL(path)
        try:
            size = ctypes.c_int64.in_dll(library, _TILE_BUDGET)
            is_set = ctypes.c_uint8.in_dll(library, _TILE_BUDGET_SET)
        except ValueError:
            continue
        size.value, is_set.value = budget, 1
        found = True
    if not found:
        raise EngineError(
            "this build of vLLM offers no batch invariant attention on the CPU",
            next_step="set engine.batch_invariant = false; a resumed request may then differ in a token",
        )
