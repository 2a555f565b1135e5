"""The counter-based sampler as a logits processor of vLLM.

vLLM itself decodes greedily; this processor has already decided and lifts the chosen token above all others. vLLM
takes the logprobs it returns before any processor runs, so they stay those of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from belayer.engine.request import Sampling
from belayer.engine.sampler import choose

SAMPLING = "belayer_sampling"
OFFSET = "belayer_offset"


class CounterSampling(LogitsProcessor):
    """Keeps, per batch row, how to sample it and a reference to its growing output."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[Sampling, int, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _prompt, output in batch_update.added:
            extra = params.extra_args or {}
            sampling = extra.get(SAMPLING)
            if sampling is None:
                self._rows.pop(row, None)
            else:
                self._rows[row] = (sampling, extra[OFFSET], output)
        for source, target, direction in batch_update.moved:
            first, second = self._rows.pop(source, None), self._rows.pop(target, None)
            if first is not None:
                self._rows[target] = first
            if second is not None and direction is MoveDirectionality.SWAP:
                self._rows[source] = second

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self._rows:
            return logits
        rows = [(row, sampling, offset + len(output)) for row, (sampling, offset, output) in self._rows.items()]
        for (row, _, _), token in zip(rows, choose(logits, rows), strict=True):
            logits[row, token] = torch.inf
        return logits
