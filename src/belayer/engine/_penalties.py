"""Repetition, presence and frequency penalties, as vLLM and the OpenAI API define them.

They depend on the tokens before the one to draw and on nothing else. What is known of a completion when it is resumed
counts as completion, not as prompt, although the engine below prefills it like a prompt.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from belayer.engine.request import Sampling


class Penalties:
    """What one request's tokens so far do to its next logits. Costs as much as there are different tokens."""

    def __init__(self, sampling: Sampling, prompt_ids: Iterable[int]) -> None:
        self._sampling = sampling
        # the repetition penalty alone looks at the prompt
        seen = dict.fromkeys(prompt_ids) if sampling.repetition_penalty != 1 else {}
        self._slots = {token: slot for slot, token in enumerate(seen)}
        size = max(64, 2 * len(self._slots))
        self._ids = np.zeros(size, dtype=np.int64)
        self._ids[: len(self._slots)] = list(self._slots)
        self._counts = np.zeros(size, dtype=np.float64)  # in the completion
        self.length = 0

    def extend(self, output_ids: Iterable[int]) -> None:
        """These tokens follow in the completion."""
        for token in output_ids:
            slot = self._slots.setdefault(token, len(self._slots))
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token
            self._counts[slot] += 1
            self.length += 1

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The tokens whose logits change."""
        return self._ids[: len(self._slots)]

    def changed(self, logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """What the logits of `ids`, float64, become."""
        sampling, counts = self._sampling, self._counts[: len(self._slots)]
        if sampling.repetition_penalty != 1:
            factor = sampling.repetition_penalty
            logits = np.where(logits > 0, logits / factor, logits * factor)
        return logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)

    def apply(self, row: npt.NDArray[np.float64]) -> None:
        """Change one row of logits, float64 [vocabulary], in place."""
        row[self.ids] = self.changed(row[self.ids])


def penalised(sampling: Sampling) -> bool:
    """Whether the tokens before a position change its logits."""
    return bool(sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty)
