"""A torch tensor over an address that somebody else manages, on the host or a GPU, by way of DLPack.

DLPack (https://dmlc.github.io/dlpack) names the device along with the address, so nobody has to look the address up,
which would fail for a reserved range that nothing lies under yet.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CPU = 1  # kDLCPU
CUDA = 2  # kDLCUDA
_UNSIGNED = 1  # kDLUInt
_NAME = b"dltensor"


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


# The consumer looks at the struct once more when its tensor dies, which may be after everything else is gone; a few
# dozen bytes per region are kept for it.
_kept: list[object] = []

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def tensor(address: int, nbytes: int, device: tuple[int, int]) -> torch.Tensor:
    """uint8 [nbytes] at `address` of `device`, a DLPack (type, number). It does not keep the memory alive."""
    import torch

    shape = (ctypes.c_int64 * 1)(nbytes)
    managed = _Managed(_Tensor(address, *device, 1, _UNSIGNED, 8, 1, shape, None, 0), None, None)
    _kept.append((managed, shape))
    return torch.from_dlpack(_new_capsule(ctypes.addressof(managed), _NAME, None))
