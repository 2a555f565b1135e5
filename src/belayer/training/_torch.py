"""Small torch helpers of the trainer. Import it inside functions only: it loads torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


def collate(sequences: Sequence[Sequence[int]], masks: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids (batch, length), and the mask of the *predicted* positions (batch, length - 1) as floats.

    No attention mask is needed: with causal attention nothing looks at padding on the right, and padding is masked out.
    """
    length = max(len(sequence) for sequence in sequences)
    ids = torch.zeros(len(sequences), length, dtype=torch.long)
    mask = torch.zeros(len(sequences), length)
    for row, (sequence, marks) in enumerate(zip(sequences, masks, strict=True)):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(marks)] = torch.tensor(marks, dtype=torch.float32)
    return ids, mask[:, 1:]


def token_logprobs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log probability (batch, length - 1) of each token given those before it."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[..., 0]


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """A fixed number of compute threads for the calling thread: sums depend on how work is split."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def quiet_transformers() -> None:
    """No progress bars and notices of the library between the lines of the live view."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
