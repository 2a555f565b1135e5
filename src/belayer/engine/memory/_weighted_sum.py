"""A 64-bit checksum that a GPU computes at the speed of its memory.

The content is read as 32-bit words; the checksum is the sum of (word x weight of its place) modulo 2^64. All weights
are odd, so a change of any one word changes the sum; they look random, so that exchanged or repeated content gives
another sum too, except once in about 2^32. Sums of integers do not depend on their order, so every device, the CPU
included, finds the same number.

Why not the CRC32C of the host: a GPU has no instruction for it, and bringing 16 GB of weights over PCIe to a core that
has takes above a second, and as much host memory as the chunks that are in flight.
"""

from __future__ import annotations

import torch

_BLOCK = 1 << 22  # words summed at once: 16 MB of content, 32 MB of weights
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio, odd

_weights: dict[torch.device, torch.Tensor] = {}


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _weights_on(device: torch.device) -> torch.Tensor:
    """Odd int64 [_BLOCK], the same everywhere: a counter, mixed by multiplications and shifts that wrap around."""
    known = _weights.get(device)
    if known is None:
        mixed = torch.arange(1, _BLOCK + 1, dtype=torch.int64, device=device).mul_(_signed(_GOLDEN))
        mixed ^= mixed >> 30
        mixed *= _signed(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> 27
        mixed *= _signed(0x94D049BB133111EB)
        mixed ^= mixed >> 31
        known = _weights[device] = mixed | 1
    return known


def weighted_sum(content: torch.Tensor) -> int:
    """The checksum of contiguous uint8 [n], on whatever device it is. A short last word is filled up with zeros."""
    tail = content.numel() % 4
    if content.data_ptr() % 4:
        content = content.clone()
    whole = content[: content.numel() - tail]
    words = whole.view(torch.int32) if whole.numel() else torch.empty(0, dtype=torch.int32, device=content.device)
    weights = _weights_on(content.device)
    sums = [
        (words[start : start + _BLOCK].to(torch.int64) * weights[: len(words) - start]).sum()
        for start in range(0, len(words), _BLOCK)
    ]
    if tail:
        last = torch.zeros(4, dtype=torch.uint8, device=content.device)
        last[:tail] = content[-tail:]
        sums.append(last.view(torch.int32).to(torch.int64)[0])
    total = 0
    for block, value in enumerate(torch.stack(sums).tolist() if sums else []):
        total += value * ((block + 1) * _GOLDEN | 1)  # one more odd factor, so that blocks are told apart too
    return total & _MASK
