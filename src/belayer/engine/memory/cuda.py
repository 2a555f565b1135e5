"""GPU memory that one process holds and others map, through CUDA's virtual memory management.

Source: CUDA driver API, "Virtual Memory Management". The owner creates and exports allocations and maps none, so it
needs no CUDA context, which an error on the device could destroy.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any

from belayer.engine.memory import Scratch, _cuda_driver
from belayer.engine.memory._cuda_driver import CudaError, call, enter, idle, load

if TYPE_CHECKING:
    import torch

__all__ = ["CudaAllocation", "CudaError", "CudaMemory", "CudaRegion", "unavailable"]

_FOLD = 64 << 20  # bytes of scratch that lie under a folded range again and again


def _align(nbytes: int, granularity: int) -> int:
    return -(-nbytes // granularity) * granularity


def _properties(ordinal: int) -> Any:
    """Device memory that can be exported as a POSIX descriptor."""
    driver = load()
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    return properties


def _posix_fd() -> Any:
    return load().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def unavailable(ordinal: int) -> str | None:
    """Why this device cannot hold shared memory, in words; None: it can."""
    try:
        driver = load()
        device = _cuda_driver.device(ordinal)
        for name in ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"):
            attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
            if not call("cuDeviceGetAttribute", attribute, device):
                return f"CUDA device {ordinal}: {name.lower()} is 0"
    except CudaError as error:
        return str(error)
    return None


class CudaAllocation:
    """An allocation and its descriptor. It lives until both are closed and nobody maps it any more."""

    def __init__(self, ordinal: int, nbytes: int) -> None:
        self._handle: Any = call("cuMemCreate", nbytes, _properties(ordinal), 0)
        try:
            self.fd = int(call("cuMemExportToShareableHandle", self._handle, _posix_fd(), 0))
        except BaseException:
            call("cuMemRelease", self._handle)
            raise

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            call("cuMemRelease", self._handle)
            self.fd = -1


class CudaRegion:
    """An address range of the device whose backing can be exchanged: pointers into it stay valid.

    `place` is several calls, so it first waits until the device is idle. Should one of them fail, the range is
    without access, and the process that wanted it must not go on.
    """

    def __init__(self, ordinal: int, nbytes: int, granularity: int, scratch: Scratch) -> None:
        self.nbytes = _align(nbytes, granularity)
        self.address = 0
        self._ordinal = ordinal
        self._mapped: list[tuple[int, int]] = []
        enter(ordinal)
        self.address = int(call("cuMemAddressReserve", self.nbytes, 0, 0, 0))
        if scratch is not Scratch.NONE:
            piece = self.nbytes if scratch is Scratch.WHOLE else min(self.nbytes, _align(_FOLD, granularity))
            handle = call("cuMemCreate", piece, _properties(ordinal), 0)
            self._put(handle, piece, writable=True)
            self.forget()

    def _put(self, handle: Any, piece: int, *, writable: bool) -> None:
        """Map `handle`, of `piece` bytes, as often as the range takes it, and drop it: the mapping keeps it alive."""
        driver = load()
        try:
            for start in range(0, self.nbytes, piece):
                size = min(piece, self.nbytes - start)
                call("cuMemMap", self.address + start, size, 0, handle, 0)
                self._mapped.append((self.address + start, size))
        finally:
            call("cuMemRelease", handle)
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._ordinal
        flags = driver.CUmemAccess_flags
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        call("cuMemSetAccess", self.address, self.nbytes, [access], 1)

    def _clear(self) -> None:
        while self._mapped:  # one by one: part of a mapping cannot be taken away, nor several at once
            address, size = self._mapped.pop()
            call("cuMemUnmap", address, size)

    def place(self, fd: int, *, writable: bool, populate: bool = False) -> None:
        """Put the allocation behind `fd` under the range; `populate` has no meaning here."""
        handle = call("cuMemImportFromShareableHandle", fd, _posix_fd())
        idle(self._ordinal)
        self._clear()
        self._put(handle, self.nbytes, writable=writable)

    def forget(self) -> None:
        idle(self._ordinal)
        call("cuMemsetD8", self.address, 0, self.nbytes)
        idle(self._ordinal)

    def copy_in(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        self._check(offset, len(data))
        source = ctypes.create_string_buffer(bytes(data), max(1, len(data)))
        enter(self._ordinal)
        call("cuMemcpyHtoD", self.address + offset, ctypes.addressof(source), len(data))
        idle(self._ordinal)

    def copy_out(self, offset: int, nbytes: int) -> bytes:
        self._check(offset, nbytes)
        target = ctypes.create_string_buffer(max(1, nbytes))
        idle(self._ordinal)
        call("cuMemcpyDtoH", ctypes.addressof(target), self.address + offset, nbytes)
        return target.raw[:nbytes]

    def copy_from(self, other: CudaRegion) -> None:
        if other.nbytes != self.nbytes:
            raise ValueError(f"a region of {other.nbytes} bytes does not fit one of {self.nbytes}")
        idle(self._ordinal)
        call("cuMemcpyDtoD", self.address, other.address, self.nbytes)
        idle(self._ordinal)

    def _check(self, offset: int, nbytes: int) -> None:
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"[{offset}, {offset + nbytes}) is not inside a region of {self.nbytes} bytes")

    def checksum(self, offset: int, nbytes: int) -> int:
        """`weighted_sum` of [offset, offset + nbytes), computed on the device."""
        from belayer.engine.memory._weighted_sum import weighted_sum

        self._check(offset, nbytes)
        idle(self._ordinal)
        return weighted_sum(self.tensor()[offset : offset + nbytes])

    def tensor(self) -> torch.Tensor:
        """The range as uint8 [nbytes] on this device. It must not outlive the region."""
        import torch

        from belayer.engine.memory import _dlpack

        torch.cuda.init()
        return _dlpack.tensor(self.address, self.nbytes, (_dlpack.CUDA, self._ordinal))

    def close(self) -> None:
        if self.address:
            idle(self._ordinal)
            self._clear()
            call("cuMemAddressFree", self.address, self.nbytes)
            self.address = 0


class CudaMemory:
    """`belayer.engine.memory.Memory` of one GPU."""

    def __init__(self, ordinal: int = 0) -> None:
        self.ordinal = ordinal
        self._granularity = 0

    def rounded(self, nbytes: int) -> int:
        return _align(nbytes, self._grain())

    def allocate(self, name: str, nbytes: int) -> CudaAllocation:
        """`name` has no meaning here. Needs no CUDA context."""
        return CudaAllocation(self.ordinal, self.rounded(nbytes))

    def reserve(self, nbytes: int, scratch: Scratch = Scratch.WHOLE) -> CudaRegion:
        return CudaRegion(self.ordinal, nbytes, self._grain(), scratch)

    def _grain(self) -> int:
        if not self._granularity:
            minimum = load().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
            self._granularity = int(call("cuMemGetAllocationGranularity", _properties(self.ordinal), minimum))
        return self._granularity
