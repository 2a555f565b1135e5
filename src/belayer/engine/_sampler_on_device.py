"""`sampler.choose` for logits that lie on an accelerator: the same decisions, made where the logits are.

Bringing a batch of logits to the host takes longer than a decode step. So the noise of `_noise`, bit for bit, is made
from integer arithmetic in torch, for the whole vocabulary at once: what is cheap on a processor is dear here, and the
other way round. Logarithms may differ from the host's in their last bit, so a tie closer than that could be decided
otherwise; a run does not change its device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from belayer.engine._penalties import Penalties
from belayer.engine.request import Sampling

_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)  # of Philox 4x64 (Salmon et al. 2011), and below its key steps
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10
_LOW = (1 << 32) - 1


def choose(
    logits: torch.Tensor, rows: Sequence[tuple[int, Sampling, int]], penalties: Mapping[int, Penalties]
) -> list[int]:
    """One token for each of `rows`, as `sampler.choose`. `logits` is [batch, vocabulary]."""
    scores = logits[[row for row, _, _ in rows]].double()
    for index, (row, sampling, position) in enumerate(rows):
        if row in penalties:
            ids = torch.from_numpy(penalties[row].ids).to(scores.device)
            changed = penalties[row].changed(scores[index, ids].cpu().numpy())
            scores[index, ids] = torch.from_numpy(changed).to(scores.device)
        if held := [token for token in sampling.held_back(position) if token < scores.shape[1]]:
            scores[index, held] = -torch.inf
    drawn = [index for index, (_, sampling, _) in enumerate(rows) if sampling.temperature > 0]
    if drawn:
        hot = scores[drawn]
        hot /= hot.new_tensor([rows[index][1].temperature for index in drawn])[:, None]
        for place, index in enumerate(drawn):
            hot[place] = _filtered(hot[place], rows[index][1])
        hot += gumbel(bits([(rows[i][1].seed, rows[i][2]) for i in drawn], hot.shape[1], hot.device))
        scores[drawn] = hot
    return scores.argmax(dim=1).tolist()


def bits(keys: Sequence[tuple[int, int]], vocabulary: int, device: torch.device) -> torch.Tensor:
    """The integers of `_noise.bits`, as int64 [len(keys), vocabulary]."""
    lanes = -(-vocabulary // 8)
    seeds = torch.tensor([[_signed(seed)] for seed, _ in keys], dtype=torch.int64, device=device)
    positions = torch.tensor([[_signed(position)] for _, position in keys], dtype=torch.int64, device=device)
    words = [
        torch.arange(1, lanes + 1, dtype=torch.int64, device=device).expand(len(keys), lanes),
        positions.expand(len(keys), lanes),
        torch.zeros((len(keys), lanes), dtype=torch.int64, device=device),
        torch.zeros((len(keys), lanes), dtype=torch.int64, device=device),
    ]
    for number in range(_ROUNDS):
        high0, low0 = _product(_MULTIPLIERS[0], words[0])
        high1, low1 = _product(_MULTIPLIERS[1], words[2])
        first, second = (_signed(number * step) for step in _WEYL)
        words = [high1 ^ words[1] ^ (seeds + first), low1, high0 ^ words[3] ^ second, low0]
    stacked = torch.stack([part for word in words for part in (word & _LOW, (word >> 32) & _LOW)], dim=2)
    return stacked.reshape(len(keys), lanes * 8)[:, :vocabulary]


def gumbel(of: torch.Tensor) -> torch.Tensor:
    """As `_noise.gumbel`."""
    return of.double().add_(0.5).mul_(-(2.0**-32)).log1p_().neg_().log_().neg_()


def _product(constant: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper and lower 64 bits of the unsigned product; the sums of the schoolbook method fit 64 bits each."""
    high, low = constant >> 32, constant & _LOW
    word_high, word_low = (word >> 32) & _LOW, word & _LOW
    middle = word_low * high + (((word_low * low) >> 32) & _LOW)
    other = word_high * low + (middle & _LOW)
    return word_high * high + ((middle >> 32) & _LOW) + ((other >> 32) & _LOW), word * _signed(constant)


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _filtered(scaled: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """One row of logits / temperature with everything that `sampler.candidates` leaves out at -inf."""
    if sampling.min_p > 0:
        scaled = scaled.masked_fill(scaled < scaled.max() + float(np.log(sampling.min_p)), -torch.inf)
    if 0 < sampling.top_k < scaled.shape[0]:
        scaled = scaled.masked_fill(scaled < torch.topk(scaled, sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1:
        ordered, order = torch.sort(scaled, descending=True, stable=True)
        mass = torch.softmax(ordered, dim=0).cumsum(dim=0)
        outside = torch.cat([mass.new_zeros(1), mass[:-1]]) >= sampling.top_p
        scaled = scaled.masked_fill(torch.zeros_like(outside).scatter_(0, order, outside), -torch.inf)
    return scaled
