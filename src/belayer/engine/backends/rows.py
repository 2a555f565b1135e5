"""How many rows a float32 product on the CPU must have, so that a row of it does not depend on their number.

Measured with torch 2.13 and MKL 2024.2, `MKL_CBWR` set, and 1 to 24 threads: from four rows on a row is always the
same. But a product of few columns is shared among threads by columns as long as there are fewer rows than columns, and
a share of less than some ten columns gets another kernel; then it takes as many rows as columns, and four per thread.
"""

from __future__ import annotations

import torch

FEWEST = 4
COLUMNS_PER_THREAD = 16  # fewer are few


def rows_needed(columns: int) -> int:
    """The rows that a product with `columns` output features must have at least."""
    threads = torch.get_num_threads()
    return max(columns, FEWEST * threads) if columns <= COLUMNS_PER_THREAD * threads else FEWEST
