"""Attention for batches in which the tokens of several requests follow one another, one request at a time.

transformers' own way for such a batch, without flash attention, is one product of all queries with all keys under a
block-diagonal mask: work and memory grow with the square of the number of requests, and what a request gets depends on
what lies before it. Here every request is a call of PyTorch's scaled dot product attention.

With `invariant` a query's result does not depend, to the bit, on how many queries and keys come after it, so that a
prefix that was decoded token by token and one that is prefilled at once say the same. Two things stand in the way in
PyTorch's CPU kernel, which cuts queries into blocks of 32 to 256 and keys into blocks of 512 and calls MKL for each
pair (torch 2.13, float32; of 116 positions decoded after a prefix of up to 1,400 keys, 115 differed from the same
position prefilled, and of 63 chunks 38; with both measures none):

- the last block of keys is shorter, and how a sum over it is grouped depends on its length: keys are padded with
  masked ones to whole blocks, which add exact zeros;
- for fewer than four queries MKL uses other kernels: queries are padded to a multiple of four.

On a GPU the memory-efficient kernel goes through the keys in order, in tiles of a fixed size, and is given the same
padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

# "flash" in the name tells transformers that sequences are packed and no mask is wanted
PLAIN = "belayer_flash"
INVARIANT = "belayer_flash_invariant"

KEY_BLOCK = 512
QUERY_BLOCK = 4

# Of the step that runs, the same for all its layers. transformers passes lengths as tensors on the device, and to read
# those would stop a GPU in every layer.
_spans: list[tuple[int, int, int, int]] = []
_masks: dict[tuple[int, int], torch.Tensor] = {}


def new_step(spans: list[tuple[int, int, int, int]]) -> None:
    """`spans` say where each request of the next step lies: its queries [first, last) and, likewise, its keys."""
    _spans[:] = spans
    _masks.clear()


def _mask(queries: int, keys: int, rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    """Additive [rows, columns]: the last of `queries` sees all of `keys`, each one before it one less; the rest: none.

    Rows beyond `queries` are padding and see everything, for a row that sees nothing would be NaN.
    """
    known = _masks.get((queries, keys))
    if known is None:
        position = torch.arange(rows, device=like.device)[:, None] + (keys - queries)
        hidden = torch.arange(columns, device=like.device)[None, :] > position
        hidden[queries:] = False
        known = torch.zeros(rows, columns, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)
        _masks[queries, keys] = known
    return known


def _one_request(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, invariant: bool):
    """[1, heads, queries, size], and keys and values [1, kv heads, keys, size] -> [1, heads, queries, size]."""
    queries, keys = query.shape[2], key.shape[2]
    rows, columns = queries, keys
    if invariant:
        rows, columns = -(-queries // QUERY_BLOCK) * QUERY_BLOCK, -(-keys // KEY_BLOCK) * KEY_BLOCK
        query = pad(query, (0, 0, 0, rows - queries))
        key, value = pad(key, (0, 0, 0, columns - keys)), pad(value, (0, 0, 0, columns - keys))
    gqa = query.shape[1] != key.shape[1]
    if gqa and query.is_cuda:  # of the GPU's kernels only some take fewer key heads than query heads
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        gqa = False
    mask, causal = None, False
    if invariant or 1 < queries < keys:
        mask = _mask(queries, keys, rows, columns, query)
    else:
        causal = queries > 1
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=gqa)
    return out[:, :, :queries]


def _packed(invariant: bool, module: Any, query: Any, key: Any, value: Any, scaling: float | None, kwargs: Any):
    key, value = kwargs.pop("cache").update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs
    )
    out = query.new_zeros(1, query.shape[2], query.shape[1], query.shape[3])
    for first, last, key_first, key_last in _spans:
        one = _one_request(
            query[:, :, first:last],
            key[:, :, key_first:key_last],
            value[:, :, key_first:key_last],
            scaling,
            invariant,
        )
        out[:, first:last] = one.transpose(1, 2)
    return out, None


def _plain(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: Any = None, **kwargs: Any):
    return _packed(False, module, query, key, value, scaling, kwargs)


def _invariant(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: Any = None, **kwargs: Any):
    return _packed(True, module, query, key, value, scaling, kwargs)


AttentionInterface.register(PLAIN, _plain)
AttentionInterface.register(INVARIANT, _invariant)
