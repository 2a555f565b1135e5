"""Seeds that are made from others, so that a whole run hangs on one number."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, what: str) -> int:
    """A seed of its own for `what`, the same in every run with the same `seed`; 63 bits."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{what}".encode(), digest_size=8).digest()) >> 1
