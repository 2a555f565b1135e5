"""bfloat16 products on processors without instructions for them (`bfloat16.c`).

torch multiplies row by row there: decoding 4 requests takes 4 times as long as decoding one, though both read the same
weights, and prefill runs at a tenth of what the processor can do. The kernel needs AVX2 and a C compiler at its first
use; without either, `wide_linear` does the work. A row of its result does not depend on the others, to the bit.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import torch

from belayer.engine.backends import bfloat16_kernel

_STEP = 16  # features taken at once

_kernel: Any = None


def prepare() -> bool:
    """Build and load the kernel, once per process. False: it cannot be had here; the reason is in the log."""
    global _kernel
    if _kernel is None:
        try:
            _kernel = _load(bfloat16_kernel.build())
        except (OSError, ValueError) as error:
            print(f"belayer: no kernel of our own for bfloat16: {error}", file=sys.stderr, flush=True)
            _kernel = False
    return bool(_kernel)


def _load(library: Path) -> Any:
    """Load it on the OpenMP library that torch uses."""
    with open("/proc/self/maps") as maps:
        loaded = sorted({line.split()[-1] for line in maps if "libgomp" in line and "/torch/" in line})
    if not loaded:
        raise ValueError("torch uses another OpenMP library than GNU's")
    ctypes.CDLL(loaded[0], mode=ctypes.RTLD_GLOBAL)
    kernel = ctypes.CDLL(str(library)).belayer_bfloat16_linear
    pointer = ctypes.c_void_p
    kernel.argtypes = [pointer, ctypes.c_long, pointer, ctypes.c_long, ctypes.c_long, pointer, pointer]
    return kernel


def suits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `bfloat16_linear` may be called with these."""
    return bool(
        _kernel
        and weight.shape[1] % _STEP == 0
        and x.dtype is weight.dtype is torch.bfloat16
        and x.is_contiguous()
        and weight.is_contiguous()
    )


def bfloat16_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear` of bfloat16 tensors that `suits` approves of. `x` is [rows, features]."""
    rows, (outputs, features) = x.shape[0], weight.shape
    result = x.new_empty((rows, outputs))
    shift = None if bias is None else bias.float()
    place = None if shift is None else shift.data_ptr()
    if _kernel(x.data_ptr(), rows, weight.data_ptr(), outputs, features, place, result.data_ptr()):
        raise MemoryError("bfloat16_linear")
    return result
