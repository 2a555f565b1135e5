"""Mount a file that holds a btrfs file system: loop device and mount by system call.

Direct I/O on the loop device matters: without it the snapshot of 20 MB of fresh writes took 50 ms instead of 7, and all
data was cached twice. `AUTOCLEAR` frees the device with its last mount, so nothing is left to detach.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct
import time
from pathlib import Path

_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_AUTOCLEAR, _DIRECT_IO = 4, 16
_CONFIG = struct.Struct("<II5Q4I64s64s32s2Q64x")  # loop_config, with loop_info64 inside
MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_NOATIME = 2, 4, 32, 1024
_MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: Path, kind: str, flags: int, options: str) -> None:
    """mount(2). Raises `OSError`."""
    args = (source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), options.encode())
    if _libc.mount(*args):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))


def unmount(target: Path, *, lazily: bool = False) -> None:
    """umount2(2). Raises `OSError`."""
    if _libc.umount2(os.fsencode(target), _MNT_DETACH if lazily else 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))


def mount_file(file: Path, target: Path, *, barriers: bool = True) -> None:
    """Mount the btrfs file system in `file` at `target`.

    A device that already backs the file is used again: two devices with one file system on them would damage it.
    Without `barriers` the disk is not told to empty its cache at every commit: a snapshot takes 2 ms instead of 12.
    Killed processes, and a crash of the kernel, still lose nothing; a power failure may damage the file system.
    """
    fd = -1
    device = _device_of(file)
    try:
        if device is None:
            device, fd = _attach(file)
        mount(str(device), target, "btrfs", MS_NOATIME, f"discard=async,{_barrier(barriers)}")
    finally:
        if fd >= 0:
            os.close(fd)  # AUTOCLEAR: a device that was not mounted goes now


def use_barriers(target: Path, wanted: bool = True) -> None:
    """Have a mounted file system outlive a power failure from now on, or not. Raises `OSError`."""
    mount("none", target, "btrfs", MS_REMOUNT | MS_NOATIME, f"discard=async,{_barrier(wanted)}")


def _barrier(wanted: bool) -> str:
    return "barrier" if wanted else "nobarrier"


def _device_of(file: Path) -> Path | None:
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            if backing.read_text().rstrip("\n") == str(file):
                return Path("/dev") / backing.parts[3]
        except OSError:
            continue  # detached while we looked
    return None


def _attach(file: Path) -> tuple[Path, int]:
    deadline = time.monotonic() + 5
    backing = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    flags = _AUTOCLEAR | _DIRECT_IO
    try:
        while True:
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            device = Path(f"/dev/loop{number}")
            if not device.exists():
                os.mknod(device, 0o600 | stat.S_IFBLK, os.makedev(7, number))
            fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            name = os.fsencode(file)[-63:]
            try:
                fcntl.ioctl(
                    fd, _LOOP_CONFIGURE, _CONFIG.pack(backing, 0, 0, 0, 0, 0, 0, 0, 0, 0, flags, name, b"", b"", 0, 0)
                )
                return device, fd
            except OSError as error:
                os.close(fd)
                if error.errno == errno.EINVAL and flags & _DIRECT_IO:
                    flags &= ~_DIRECT_IO  # the file system below cannot do it
                elif error.errno != errno.EBUSY or time.monotonic() > deadline:  # EBUSY: another took this device
                    raise
    finally:
        os.close(backing)
        os.close(control)
