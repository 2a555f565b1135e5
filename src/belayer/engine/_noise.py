"""Standard Gumbel noise from a counter-based generator: noise of (seed, position, token), whoever draws it.

Philox 4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) maps a key and a counter to 256
bits. The key is the seed; the counter's upper words hold the position, its lowest word runs over the vocabulary, eight
tokens to a counter. Nothing else enters, so a resumed completion, in another process and another batch, meets the very
same noise. A change of this function changes what journalled runs continue with: raise `VERSION` with it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

VERSION = 1
_MASK = (1 << 64) - 1

Bits = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float64]


class _Generators(threading.local):
    """One generator per thread: making one costs as much as the bits of 5,000 tokens."""

    def __init__(self) -> None:
        self.philox = np.random.Philox(key=0)
        self.state = self.philox.state


_generators = _Generators()


def bits(keys: Sequence[tuple[int, int]], vocabulary: int) -> Bits:
    """Uniform 32-bit integers, one row per (seed, position): [len(keys), vocabulary]."""
    philox, state = _generators.philox, _generators.state
    words = -(-vocabulary // 2)
    raw = np.empty((len(keys), words), dtype=np.uint64)
    inner: dict[str, npt.NDArray[np.uint64]] = state["state"]  # pyright: ignore[reportAssignmentType]
    for row, (seed, position) in enumerate(keys):
        inner["key"][:] = seed & _MASK, 0
        inner["counter"][:] = 0, position & _MASK, 0, 0
        philox.state = state  # also empties the buffer of words that were drawn and not used
        raw[row] = philox.random_raw(words)
    return raw.view(np.uint32)[:, :vocabulary]


def gumbel(of: Bits) -> Floats:
    """Standard Gumbel noise, float64, from uniform 32-bit integers of any shape; the smaller these, the larger it is.

    The uniform lies in (0, 1), never at its ends; -log1p(-u) keeps its precision where the noise is largest.
    """
    noise = of.astype(np.float64)
    noise += 0.5
    noise *= -(2.0**-32)
    np.log1p(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)
