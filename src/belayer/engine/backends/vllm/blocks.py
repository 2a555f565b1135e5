"""The bytes of vLLM's KV blocks on the CPU: where they lie in the arena, and their checksums.

A block's keys and values are one contiguous piece per layer. Inside a piece vLLM's kernels order keys as suits the
processor (transposed, or in pairs), so the place of a single token is found out by writing one, not assumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import google_crc32c
import numpy as np
import torch
import vllm._custom_ops as operators
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from belayer.engine.memory import Region
from belayer.errors import EngineError


class KvBlocks:
    """Blocks of one model by number. `count` blocks of `size` tokens; every layer has the same geometry."""

    def __init__(self, caches: Sequence[torch.Tensor], arena: Region) -> None:
        """`caches` are vLLM's, one per layer, each [blocks, KV heads, block size, 2 x head size] inside `arena`.

        Raises `EngineError` for a model whose layers differ, or a kernel that scatters tokens in an unknown way.
        """
        first = caches[0]
        self.count, self._heads, self.size, width = first.shape
        self._arena = arena
        offsets = [cache.data_ptr() - arena.address for cache in caches]
        stride = offsets[1] - offsets[0] if len(caches) > 1 else first.nbytes
        regular = all(
            cache.shape == first.shape and cache.is_contiguous() and cache.dtype is first.dtype and offset == i * stride
            for i, (cache, offset) in enumerate(zip(caches, offsets, strict=True))
        )
        if not regular:
            raise EngineError("the layers' KV caches differ in shape or place: their blocks cannot be sealed")
        piece = first[0].nbytes
        memory = arena.tensor().numpy()
        self._pieces = np.lib.stride_tricks.as_strided(
            memory, (self.count, len(caches), piece), (piece, stride, 1), writeable=True
        )
        # the same bytes as elements, for single tokens: [blocks, layers, heads, tokens x 2 x head size]
        item = first.element_size()
        elements = first.untyped_storage()
        base = torch.empty(0, dtype={2: torch.int16, 4: torch.int32}[item]).set_(elements)
        self._elements = base.as_strided(
            (self.count, len(caches), self._heads, self.size * width),
            (piece // item, stride // item, piece // item // self._heads, 1),
            (first.data_ptr() - elements.data_ptr()) // item,
        )
        self._places = _places(first)
        self.geometry = (
            tuple(first.shape),
            len(caches),
            str(first.dtype),
            stride,
            hashlib.blake2b(self._places.numpy().tobytes(), digest_size=8).hexdigest(),
        )

    def checksum(self, block: int) -> int:
        """CRC32C of all its bytes, layer by layer."""
        crc = 0
        for piece in self._pieces[block]:
            crc = google_crc32c.extend(crc, piece)
        return crc

    def row_checksums(self, block: int, start: int, end: int) -> list[int]:
        """CRC32C of the keys and values of the tokens at places [start, end), one each."""
        layers, heads = self._elements.shape[1:3]
        rows = self._elements[block].index_select(2, self._places[start:end].flatten())
        rows = rows.view(layers, heads, end - start, -1).permute(2, 0, 1, 3).contiguous().numpy()
        return [google_crc32c.value(row) for row in rows]

    def clear(self, block: int, start: int = 0) -> None:
        """Zero the keys and values of the tokens from place `start` on."""
        if start == 0:
            self._pieces[block] = 0
        elif start < self.size:
            self._elements[block].index_fill_(2, self._places[start:].flatten(), 0)

    def forget(self) -> None:
        """Zero every block."""
        self._arena.forget()


def _places(cache: torch.Tensor) -> torch.Tensor:
    """Where a block has its tokens: int64 [block size, 2 x head size], offsets of elements in one head's part.

    For each token its key first, then its value, each in the order of the head's dimensions.
    """
    _blocks, heads, size, width = cache.shape
    head = width // 2
    isa = _get_attn_isa(cache.dtype, size, head, "auto")
    ramp = torch.arange(1, head + 1).to(cache.dtype).repeat(1, heads, 1)
    if head > 256:
        raise EngineError(f"KV blocks of heads with {head} dimensions cannot be sealed")
    found = torch.empty((size, 2, head), dtype=torch.int64)
    for place in range(size):
        slot = torch.tensor([place], dtype=torch.int64)
        for part in (0, 1):
            scratch = torch.zeros((1, heads, size * 2, head), dtype=cache.dtype)
            keys, values = scratch.chunk(2, dim=2)
            pair = (ramp, torch.zeros_like(ramp)) if part == 0 else (torch.zeros_like(ramp), ramp)
            operators.cpu_attn_reshape_and_cache(
                *pair, keys, values, slot, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
            )
            written = scratch.view(heads, -1).float()
            order = written[0].nonzero().flatten()
            order = order[written[0][order].argsort()]
            if not (written == written[0]).all() or not torch.equal(written[0][order], ramp[0, 0].float()):
                raise EngineError("this processor's attention kernel orders KV blocks in an unknown way")
            found[place, part] = order
    if found.unique().numel() != size * width:
        raise EngineError("this processor's attention kernel shares memory between tokens of a KV block")
    return found.view(size, width)
