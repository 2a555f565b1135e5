"""The counter-based sampler in the place of vLLM's own.

vLLM tells logits processors which request is in which row of a batch, so `Rows` is one, though it changes no logits.
`CounterSampler` draws, and takes the chosen tokens' logprobs from the logits as the model made them. It works out
nothing else, where vLLM's sampler makes the logprobs of the whole vocabulary and ranks the chosen token among them.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality
from vllm.v1.sample.metadata import SamplingMetadata

from belayer.engine._penalties import Penalties, penalised
from belayer.engine.request import Sampling
from belayer.engine.sampler import choose, likeliest, logprobs_of
from belayer.errors import EngineError

SAMPLING = "belayer_sampling"
OFFSET = "belayer_offset"


def extra_args(sampling: Sampling, done: int) -> dict[str, Any] | None:
    """What a request must carry for `Rows`; None if its tokens are simply the likeliest ones.

    `done` tokens at the end of what vLLM takes for the prompt belong to the completion.
    """
    if sampling.temperature == 0 and not penalised(sampling) and not sampling.held_back(done):
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


class Rows(LogitsProcessor):
    """The requests with `extra_args` by their row in the batch."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._requests: dict[int, _Request] = {}

    def is_argmax_invariant(self) -> bool:
        return True

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
        return logits

    def draw(self, logits: torch.Tensor) -> dict[int, int]:
        """The next token of each of these requests, by row of `logits`."""
        if not self._requests:
            return {}
        rows = [(row, request.sampling, request.position()) for row, request in self._requests.items()]
        penalties = {row: r.penalties for row, r in self._requests.items() if r.penalties is not None}
        return dict(zip(self._requests, choose(logits, rows, penalties), strict=True))


class CounterSampler(torch.nn.Module):
    """Takes the place of `vllm.v1.sample.sampler.Sampler` in the model runner."""

    def __init__(self, original: torch.nn.Module) -> None:
        super().__init__()
        self.original = original  # for whatever else the runner asks of its sampler

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("original"), name)

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        logits = logits.float()
        tokens = likeliest(logits)
        for row, token in _rows(sampling_metadata).draw(logits).items():
            tokens[row] = token
        chosen = torch.from_numpy(tokens)[:, None]
        logprobs = torch.from_numpy(logprobs_of(logits, tokens))[:, None]
        ranks = torch.zeros(len(tokens), dtype=torch.int64)  # nobody asks for them
        return SamplerOutput(chosen, LogprobsTensors(chosen, logprobs, ranks))


def install(runner: Any) -> None:
    """Let vLLM's model runner draw with `CounterSampler`; its logits processors must include `Rows`."""
    if not isinstance(getattr(runner, "sampler", None), torch.nn.Module):
        raise EngineError("vLLM's model runner has no sampler to replace: version mismatch")
    runner.sampler = CounterSampler(runner.sampler)


def _rows(metadata: SamplingMetadata) -> Rows:
    for processor in metadata.logitsprocs.argmax_invariant:
        if isinstance(processor, Rows):
            return processor
    raise EngineError("vLLM did not keep the logits processor it was given: version mismatch")
