"""Memory and processes on the host: memfds, fixed mappings, pidfds, death signals."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from typing import TYPE_CHECKING

from belayer.engine.memory import Scratch

if TYPE_CHECKING:
    import torch

PAGE = mmap.PAGESIZE
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_POPULATE = 0x8000
_PR_SET_PDEATHSIG = 1
_MADV_REMOVE = 9  # punch a hole into the file behind a shared mapping
_MADV_DONTNEED = 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _check(result: int | None, what: str) -> int:
    if result is None or result == ctypes.c_void_p(-1).value or result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def memfd(name: str, nbytes: int) -> int:
    """A memory file of `nbytes` zeros that goes away with its last descriptor and mapping."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, pages(nbytes))
    return fd


def checksum(memory: memoryview) -> int:
    """CRC32C (RFC 3720) of `memory`."""
    # here, because the owner imports this module and must stay small
    import google_crc32c
    import numpy as np

    return google_crc32c.value(np.frombuffer(memory, dtype=np.uint8))


class Region:
    """An address range whose backing can be exchanged under running code: pointers into it stay valid."""

    def __init__(self, nbytes: int, scratch: Scratch = Scratch.WHOLE) -> None:
        """Reserve `nbytes` on private scratch memory, of which only touched pages cost anything."""
        self.nbytes = pages(nbytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        protection = 0 if scratch is Scratch.NONE else mmap.PROT_READ | mmap.PROT_WRITE
        self.address = _check(_libc.mmap(None, self.nbytes, protection, flags, -1, 0), "mmap(reserve)")
        self._shared = False

    def place(self, fd: int, *, writable: bool, populate: bool = False) -> None:
        """Put the memory file `fd` under the range, in one step, whatever was there before."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED | _MAP_FIXED | (_MAP_POPULATE if populate else 0)
        _check(_libc.mmap(self.address, self.nbytes, protection, flags, fd, 0), "mmap(place)")
        self._shared = True

    def view(self) -> memoryview:
        """The bytes of the range. Writing through it where the mapping is read-only kills the process."""
        return memoryview((ctypes.c_ubyte * self.nbytes).from_address(self.address)).cast("B")

    def forget(self) -> None:
        """Give the pages back: every byte reads as zero."""
        advice = _MADV_REMOVE if self._shared else _MADV_DONTNEED
        _check(_libc.madvise(self.address, self.nbytes, advice), "madvise(forget)")

    def copy_in(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        self.view()[offset : offset + len(data)] = data

    def copy_out(self, offset: int, nbytes: int) -> bytes:
        return bytes(self.view()[offset : offset + nbytes])

    def copy_from(self, other: Region) -> None:
        self.view()[:] = other.view()

    def checksum(self, offset: int, nbytes: int) -> int:
        """CRC32C of [offset, offset + nbytes)."""
        return checksum(self.view()[offset : offset + nbytes])

    def tensor(self) -> torch.Tensor:
        """The range as uint8 [nbytes]. It must not outlive the region."""
        from belayer.engine.memory import _dlpack

        return _dlpack.tensor(self.address, self.nbytes, (_dlpack.CPU, 0))

    def close(self) -> None:
        if self.address:
            _check(_libc.munmap(self.address, self.nbytes), "munmap")
            self.address = 0


class HostAllocation:
    """A memory file."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.fd = memfd(name, nbytes)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class HostMemory:
    """`belayer.engine.memory.Memory` of the host."""

    def rounded(self, nbytes: int) -> int:
        return pages(nbytes)

    def allocate(self, name: str, nbytes: int) -> HostAllocation:
        return HostAllocation(name, nbytes)

    def reserve(self, nbytes: int, scratch: Scratch = Scratch.WHOLE) -> Region:
        return Region(nbytes, scratch)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which must be its parent, dies.

    The check afterwards closes the gap in which the parent died before the request was made.
    """
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def may_lower_nice() -> bool:
    """Whether a niceness that was raised can be taken back (root, or a generous RLIMIT_NICE)."""
    import resource

    return os.geteuid() == 0 or resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20


def set_nice(value: int) -> None:
    """Set the niceness of every thread of this process (on Linux it belongs to the thread)."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.setpriority(os.PRIO_PROCESS, int(thread), value)
        except ProcessLookupError:
            continue  # that thread ended meanwhile
