"""Checksums of what a decode step adds to the KV cache, taken from what it computed and not read back.

In a block the elements of one token's keys lie far apart, one cache line each. Reading them back costs more than all
else that sealing does; the tensors they were copied from are small, whole and at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import google_crc32c
import torch

MOST_ROWS = 64  # a step with more is a prefill, and keeping its tensors would cost memory


class RowTap:
    """Keeps the keys and values of the last step, if it was a step of one token per request."""

    def __init__(self, runner: Any) -> None:
        """`runner` is vLLM's model runner; its attention layers are those of `runner.kv_caches`, in that order."""
        self.on = False
        self._runner = runner
        self._layers = len(runner.kv_caches)
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        numbers = {cache.data_ptr(): number for number, cache in enumerate(runner.kv_caches)}
        for layer in runner.compilation_config.static_forward_context.values():
            cache = getattr(layer, "kv_cache", None)
            if isinstance(cache, torch.Tensor) and cache.data_ptr() in numbers:
                layer.impl.do_kv_cache_update = self._tapped(numbers[cache.data_ptr()], layer.impl.do_kv_cache_update)

    def _tapped(self, number: int, update: Callable[..., None]) -> Callable[..., None]:
        def tapped(
            layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
        ) -> None:
            update(layer, key, value, cache, slots)
            if self.on and key.shape[0] <= MOST_ROWS:
                self._kept[number] = (key, value)

        return tapped

    def take(self) -> dict[str, int]:
        """CRC32C, as `KvBlocks.row_checksums` gives it, of the token that each request has got by the last step.

        Empty where some request got several.
        """
        kept, self._kept = self._kept, {}
        requests = self._runner.input_batch.req_ids
        if len(kept) < self._layers or kept[0][0].shape[0] != len(requests):
            return {}
        keys, values = (torch.stack([kept[layer][i] for layer in range(self._layers)]) for i in (0, 1))
        rows = torch.cat((keys, values), dim=-1).transpose(0, 1).contiguous()  # [requests, layers, heads, both]
        raw = rows.view(torch.uint8).numpy()
        return {request: google_crc32c.value(raw[row]) for row, request in enumerate(requests)}
