"""The counter-based sampler as a logits processor of vLLM.

vLLM itself decodes greedily; this processor has already decided and lifts the chosen token above all others. vLLM
takes the logprobs it returns before any processor runs, so they stay those of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from belayer.engine._penalties import Penalties, penalised
from belayer.engine.request import Sampling
from belayer.engine.sampler import choose

SAMPLING = "belayer_sampling"
OFFSET = "belayer_offset"


def extra_args(sampling: Sampling, done: int) -> dict[str, Any] | None:
    """What a request must carry for `CounterSampling`; None if vLLM's own argmax is all it needs.

    `done` tokens at the end of what vLLM takes for the prompt belong to the completion.
    """
    if sampling.temperature == 0 and not penalised(sampling):
        return None
    return {SAMPLING: sampling, OFFSET: done}


class _Request:
    """One batch row: how to sample it, and a reference to its growing output."""

    def __init__(self, sampling: Sampling, done: int, prompt: list[int], output: list[int]) -> None:
        self.sampling = sampling
        self.done = done
        self.output = output
        self.penalties: Penalties | None = None
        if penalised(sampling):
            own = len(prompt) - done
            self.penalties = Penalties(sampling, prompt[:own])
            self.penalties.extend(prompt[own:])

    def position(self) -> int:
        """Of the token to draw, in the completion."""
        position = self.done + len(self.output)
        if self.penalties is not None:
            self.penalties.extend(self.output[self.penalties.length - self.done :])
        return position


class CounterSampling(LogitsProcessor):
    """Draws for the rows of a batch whose requests carry `extra_args`."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._requests: dict[int, _Request] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._requests.pop(row, None)
        for row, params, prompt, output in batch_update.added:
            extra = params.extra_args or {}
            if SAMPLING in extra:
                self._requests[row] = _Request(extra[SAMPLING], extra[OFFSET], prompt or [], output)
            else:
                self._requests.pop(row, None)
        for source, target, direction in batch_update.moved:
            first, second = self._requests.pop(source, None), self._requests.pop(target, None)
            if first is not None:
                self._requests[target] = first
            if second is not None and direction is MoveDirectionality.SWAP:
                self._requests[source] = second

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self._requests:
            return logits
        rows = [(row, request.sampling, request.position()) for row, request in self._requests.items()]
        penalties = {row: r.penalties for row, r in self._requests.items() if r.penalties is not None}
        tokens = choose(logits, rows, penalties)
        logits[[row for row, _, _ in rows], tokens] = torch.inf
        return logits
