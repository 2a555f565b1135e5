"""Memory that one process holds and others map: one protocol, on the host (memfd) and on a GPU (CUDA VMM).

The owner calls `allocate` and hands the descriptor out; whoever receives it reserves an address range once, for its
lifetime, and puts one allocation after another under it. Pointers into the range stay valid throughout.

| | host | CUDA |
|---|---|---|
| allocation | memfd | `cuMemCreate`, exported as a POSIX descriptor |
| address range | anonymous mapping | `cuMemAddressReserve` |
| `place` | `mmap(MAP_FIXED)`: one step | unmap, `cuMemMap`, `cuMemSetAccess`: the device is idle meanwhile |
| `forget` | the pages go back to the kernel | `cuMemsetD8` |
| `checksum` | CRC32C | weighted sum on the device (`_weighted_sum`) |
"""

# Importing this package must stay cheap and free of numpy, torch and CUDA: the owner does it.

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    import torch

__all__ = ["Allocation", "Memory", "Region", "Scratch", "of", "unavailable"]


class Scratch(enum.Enum):
    """What lies under a range before anything is placed there."""

    WHOLE = enum.auto()
    """Private memory that holds what is written, as much as the range is long."""

    FOLDED = enum.auto()
    """Every address can be read and written, but what is written need not be kept: for warming up on a KV arena.

    On the host this is the same as WHOLE, whose untouched pages cost nothing. On a GPU one small allocation lies under
    the range again and again, so that a shadow does not cost a second arena.
    """

    NONE = enum.auto()
    """Nothing: no access until something is placed."""


class Region(Protocol):
    """An address range whose backing can be exchanged under running code. One thread uses it at a time."""

    @property
    def address(self) -> int:
        """Its first address; it never changes."""
        ...

    @property
    def nbytes(self) -> int:
        """Its length: what was asked for, rounded up to the memory's granularity."""
        ...

    def place(self, fd: int, *, writable: bool, populate: bool = False) -> None:
        """Put the allocation behind `fd`, of this length, under the range, whatever was there before.

        The caller keeps `fd` and may close it afterwards. `populate`: fault all pages in now, where that means
        anything. Raises `OSError`.
        """
        ...

    def forget(self) -> None:
        """Make every byte of what lies under the range zero, for all who map it. It must be writable here."""
        ...

    def copy_in(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write `data` from `offset` on."""
        ...

    def copy_out(self, offset: int, nbytes: int) -> bytes:
        """The bytes [offset, offset + nbytes)."""
        ...

    def copy_from(self, other: Self) -> None:
        """Write the content of `other`, of the same memory and length."""
        ...

    def checksum(self, offset: int, nbytes: int) -> int:
        """A 64-bit checksum of [offset, offset + nbytes). It finds damage and mix-ups, not forgery.

        Equal content has an equal checksum in every process on memory of the same kind.
        """
        ...

    def tensor(self) -> torch.Tensor:
        """The range as uint8 [nbytes], on the memory's device. It follows `place`, and must not outlive the region."""
        ...

    def close(self) -> None:
        """Give the range back; may be called again."""
        ...


class Allocation(Protocol):
    """Memory that lives as long as somebody holds its descriptor or maps it."""

    @property
    def fd(self) -> int: ...

    def close(self) -> None: ...


class Memory(Protocol):
    """One kind of memory, on one device."""

    def rounded(self, nbytes: int) -> int:
        """`nbytes` rounded up to the granularity of allocations and ranges."""
        ...

    def allocate(self, name: str, nbytes: int) -> Allocation:
        """Memory of `nbytes`, rounded, for others to map. Its content is unspecified. Raises `OSError`."""
        ...

    def reserve(self, nbytes: int, scratch: Scratch = Scratch.WHOLE) -> Region:
        """An address range of `nbytes`, rounded. Raises `OSError`."""
        ...


def of(device: str) -> Memory:
    """The memory of `device`: "cpu", "cuda" or "cuda:1". Nothing is initialised before the first use."""
    if device == "cpu":
        from belayer.engine.memory import host

        return host.HostMemory()
    if device.partition(":")[0] == "cuda":
        from belayer.engine.memory import cuda

        return cuda.CudaMemory(int(device.partition(":")[2] or 0))
    raise ValueError(f"there is no memory for device {device}")


def unavailable(device: str) -> str | None:
    """Why `device` has no memory here, in words; None: it has. Initialises the driver, so not before a fork."""
    if device == "cpu":
        return None
    from belayer.engine.memory import cuda

    return cuda.unavailable(int(device.partition(":")[2] or 0))
