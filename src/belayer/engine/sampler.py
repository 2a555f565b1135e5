"""Counter-based sampling: the token at a position depends on (logits, seed, position), not on who draws it.

Gumbel-max (Gumbel 1954; Maddison et al. 2014): argmax(logits / temperature + g) with g standard Gumbel noise is a
sample of softmax(logits / temperature). The noise comes from Philox 4x64 (Salmon et al. 2011), a counter-based
generator: its key is the seed and its counter the position, so a resumed completion, in another process and another
batch, draws the very same noise. Arithmetic is float64 so that the order of a batch cannot change a decision through
rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from belayer.engine.request import Sampling

_MASK = (1 << 64) - 1


def noise(keys: Sequence[tuple[int, int]], vocabulary: int) -> torch.Tensor:
    """Standard Gumbel noise, one row per (seed, position): float64 [len(keys), vocabulary]."""
    words = -(-vocabulary // 2)
    raw = np.empty((len(keys), words), dtype=np.uint64)
    for row, (seed, position) in enumerate(keys):
        # the counter's low word is left to run over the vocabulary
        raw[row] = np.random.Philox(key=seed & _MASK, counter=[0, position & _MASK, 0, 0]).random_raw(words)
    bits = raw.view(np.uint32)[:, :vocabulary].astype(np.float64)
    # uniform on (0, 1), never its ends; -log1p(-u) keeps its precision where the noise is largest
    uniform = torch.from_numpy(bits).add_(0.5).mul_(2.0**-32)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def filtered(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """One row of temperature-scaled float64 logits with everything outside min-p, top-k and top-p at -inf."""
    if sampling.min_p > 0:
        logits = logits.masked_fill(logits < logits.max() + float(np.log(sampling.min_p)), -torch.inf)
    if 0 < sampling.top_k < logits.shape[0]:
        kth = torch.topk(logits, sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = torch.sort(logits, descending=True, stable=True)
        mass = torch.softmax(ordered, dim=0).cumsum(dim=0)
        # keep the tokens before which less than top_p has been collected: at least one
        outside = torch.cat([mass.new_zeros(1), mass[:-1]]) >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(outside).scatter_(0, order, outside), -torch.inf)
    return logits


def choose(logits: torch.Tensor, rows: Sequence[tuple[int, Sampling, int]]) -> list[int]:
    """Sample a token for each (row of `logits`, sampling with temperature > 0, position in the completion)."""
    picked = logits[[row for row, _, _ in rows]].double()
    picked /= torch.tensor([s.temperature for _, s, _ in rows], dtype=torch.float64)[:, None]
    for index, (_, sampling, _) in enumerate(rows):
        if sampling.min_p > 0 or sampling.top_k > 0 or sampling.top_p < 1:
            picked[index] = filtered(picked[index], sampling)
    picked += noise([(s.seed, position) for _, s, position in rows], logits.shape[1])
    return picked.argmax(dim=1).tolist()
