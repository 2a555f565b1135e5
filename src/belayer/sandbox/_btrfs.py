"""Btrfs subvolumes by ioctl: no helper program, and the interpreter is free while the kernel works.

Layouts and numbers: linux/btrfs.h. `fcntl.ioctl` keeps the interpreter's lock for arguments above 1 KiB, and a snapshot
may take tens of milliseconds, hence ctypes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import uuid
from pathlib import Path

_SUPER_MAGIC = 0x9123683E
_ARGS_V1 = struct.Struct("<q4088s")
_ARGS_V2 = struct.Struct("<qQQ32x4040s")
_READ_ONLY = 1 << 1
SUBVOLUME_INODE = 256  # of the top folder of every subvolume
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]


def _write(number: int, size: int) -> int:
    return 1 << 30 | size << 16 | 0x94 << 8 | number


def _read(number: int, size: int) -> int:
    return 2 << 30 | size << 16 | 0x94 << 8 | number


_SUBVOL_CREATE = _write(14, 4096)
_SNAP_DESTROY = _write(15, 4096)
_SNAP_CREATE_V2 = _write(23, 4096)
_SUBVOL_INFO_SIZE = 504
_GET_SUBVOL_INFO = _read(60, _SUBVOL_INFO_SIZE)
_WAIT_SYNC = _write(22, 8)
_SUBVOL_GETFLAGS = _read(25, 8)
_SUBVOL_SETFLAGS = _write(26, 8)
_QUOTA_CTL = 3 << 30 | 16 << 16 | 0x94 << 8 | 40
_ENABLE_SIMPLE_QUOTA = 4
_QGROUP_LIMIT = _read(43, 48)
_QGROUP_CREATE = _write(42, 16)
_TREE_SEARCH = 3 << 30 | 4096 << 16 | 0x94 << 8 | 17
_SEARCH_KEY = struct.Struct("<7Q4I32x")  # tree, objectid, offset and transaction from and to, type from and to, most
_ROOT_TREE, _ROOT_ITEM = 1, 132
_LIMIT_REFERENCED = 1
_FS_INFO_SIZE = 1024
_FS_INFO = _read(31, _FS_INFO_SIZE)
_FICLONE = 0x40049409
_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS = 0x80086601, 0x40086602
_IMMUTABLE = 0x10


def _ioctl(folder: Path, request: int, argument: ctypes.Array[ctypes.c_char]) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.ioctl(fd, request, argument) < 0:  # GET_SUBVOL_INFO may answer 1 for success
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(fd)


def is_btrfs(path: Path) -> bool:
    """Is `path` on a btrfs file system?"""
    buffer = ctypes.create_string_buffer(256)
    if _libc.statfs(os.fsencode(path), buffer):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    return struct.unpack_from("<q", buffer.raw)[0] == _SUPER_MAGIC


def create_subvolume(path: Path) -> None:
    """A new empty subvolume at `path`."""
    name = os.fsencode(path.name)
    _ioctl(path.parent, _SUBVOL_CREATE, ctypes.create_string_buffer(_ARGS_V1.pack(0, name), 4096))


def snapshot(source: Path, target: Path, *, read_only: bool = False) -> None:
    """Snapshot the subvolume `source` as `target`. Costs one transaction: about 1 ms plus the unwritten data."""
    fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        packed = _ARGS_V2.pack(fd, 0, _READ_ONLY if read_only else 0, os.fsencode(target.name))
        _ioctl(target.parent, _SNAP_CREATE_V2, ctypes.create_string_buffer(packed, 4096))
    finally:
        os.close(fd)


def delete_subvolume(path: Path) -> None:
    """Delete the subvolume at `path`; its space is freed in the background. Missing is fine."""
    try:
        _ioctl(path.parent, _SNAP_DESTROY, ctypes.create_string_buffer(_ARGS_V1.pack(0, os.fsencode(path.name)), 4096))
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise


def set_read_only(path: Path) -> None:
    """Make the subvolume at `path` read-only for good."""
    flags = ctypes.create_string_buffer(8)
    _ioctl(path, _SUBVOL_GETFLAGS, flags)
    value = struct.unpack("<Q", flags.raw)[0] | _READ_ONLY
    _ioctl(path, _SUBVOL_SETFLAGS, ctypes.create_string_buffer(struct.pack("<Q", value), 8))


def identity(path: Path) -> str:
    """Names one unchanged state of the subvolume at `path`: its UUID and the transaction that last changed it."""
    info = ctypes.create_string_buffer(_SUBVOL_INFO_SIZE)
    _ioctl(path, _GET_SUBVOL_INFO, info)
    # treeid u64, name[256], parent_id u64, dirid u64, generation u64, flags u64, uuid[16], parent_uuid[16],
    # received_uuid[16], ctransid u64, …
    uuid = info.raw[296:312].hex()
    if not any(info.raw[296:312]):
        raise OSError(errno.EIO, "btrfs does not say which subvolume this is", str(path))
    changed = struct.unpack_from("<Q", info.raw, 344)[0]
    return f"{uuid}:{changed}"


def clone_file(source: Path, target: Path, mode: int) -> None:
    """Copy a file within the store without copying its data."""
    with open(source, "rb") as old, open(target, "xb") as new:
        fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
        os.fchmod(new.fileno(), mode)


def set_immutable(path: Path, on: bool) -> None:
    """Nobody without CAP_LINUX_IMMUTABLE, which no sandbox has, can change an immutable file or folder.

    A link is refused (`OSError`): a sandbox could have put it there.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = struct.unpack("<L", fcntl.ioctl(fd, _FS_IOC_GETFLAGS, b"\0" * 8)[:4])[0]
        wanted = flags | _IMMUTABLE if on else flags & ~_IMMUTABLE
        fcntl.ioctl(fd, _FS_IOC_SETFLAGS, struct.pack("<Q", wanted))
    finally:
        os.close(fd)


def sync(path: Path) -> None:
    """Write everything out, deletions too: their space can then be used again. Blocking."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(fd):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(fd)


def wait_committed(subvolume: Path) -> None:
    """Return when the disk has the transaction that last changed `subvolume`. Blocking.

    That of a snapshot is committed, with the data of its source, before the call that makes it returns.
    """
    info = ctypes.create_string_buffer(_SUBVOL_INFO_SIZE)
    _ioctl(subvolume, _GET_SUBVOL_INFO, info)
    generation = struct.unpack_from("<Q", info.raw, 280)[0]
    _ioctl(subvolume, _WAIT_SYNC, ctypes.create_string_buffer(struct.pack("<Q", generation), 8))


def enable_quota(root: Path) -> bool:
    """Let subvolumes be limited, by simple quotas (Linux 6.7): each pays for what was written in it. True if so."""
    try:
        _ioctl(root, _QUOTA_CTL, ctypes.create_string_buffer(struct.pack("<QQ", _ENABLE_SIMPLE_QUOTA, 0), 16))
    except OSError as error:
        return error.errno == errno.EEXIST
    return True


def limit(subvolume: Path, size: int) -> None:
    """No more than `size` bytes may be written in this subvolume. Raises `OSError` where quotas are not enabled."""
    packed = struct.pack("<6Q", 0, _LIMIT_REFERENCED, size, 0, 0, 0)  # qgroup 0: that of the subvolume itself
    _ioctl(subvolume, _QGROUP_LIMIT, ctypes.create_string_buffer(packed, 48))


def forget_deleted(root: Path) -> int:
    """Remove the quota groups of subvolumes that are gone; returns how many. Raises `OSError`.

    The kernel keeps the group of a deleted subvolume as long as a snapshot holds something that was written in it, and
    does not come back to it afterwards.
    """
    groups, removed = quota_groups(root), 0
    for name in os.listdir(groups) if groups.is_dir() else []:
        level, _, number = name.partition("_")
        if level != "0" or not number.isdigit() or int(number) < SUBVOLUME_INODE or subvolume_exists(root, int(number)):
            continue
        try:
            if int((groups / name / "referenced").read_text()) == 0:
                _ioctl(root, _QGROUP_CREATE, ctypes.create_string_buffer(struct.pack("<QQ", 0, int(number)), 16))
                removed += 1
        except OSError as error:
            # gone meanwhile (ENODEV: between opening and reading its file), or in use after all
            if error.errno not in (errno.ENOENT, errno.ENODEV, errno.EBUSY, errno.EINVAL):
                raise
    return removed


def subvolume_exists(root: Path, subvolume: int) -> bool:
    """Is there a subvolume of this number? One that is deleted and not yet taken apart counts."""
    most = (1 << 64) - 1
    key = (_ROOT_TREE, subvolume, subvolume, 0, most, 0, most, _ROOT_ITEM, _ROOT_ITEM, 1, 0)
    search = ctypes.create_string_buffer(_SEARCH_KEY.pack(*key), 4096)
    _ioctl(root, _TREE_SEARCH, search)
    return _SEARCH_KEY.unpack_from(search.raw)[9] > 0


def subvolume_number(path: Path) -> int:
    """The number of the subvolume at `path`."""
    info = ctypes.create_string_buffer(_SUBVOL_INFO_SIZE)
    _ioctl(path, _GET_SUBVOL_INFO, info)
    return struct.unpack_from("<Q", info.raw)[0]


def quota_groups(path: Path) -> Path:
    """Where the kernel shows the quota groups of the file system of `path`."""
    host = ctypes.create_string_buffer(_FS_INFO_SIZE)
    _ioctl(path, _FS_INFO, host)
    return Path(f"/sys/fs/btrfs/{uuid.UUID(bytes=host.raw[16:32])}/qgroups")


def quota_left(subvolume: Path) -> int | None:
    """Bytes that may still be written in a limited subvolume, None when it is not limited. Raises `OSError`."""
    if not is_btrfs(subvolume):
        return None
    group = quota_groups(subvolume) / f"0_{subvolume_number(subvolume)}"
    try:
        limit = int((group / "max_referenced").read_text())
        # written and not yet on its way to the disk: it is promised already
        used = sum(int((group / name).read_text()) for name in ("referenced", "rsv_data"))
    except FileNotFoundError:
        return None
    return max(0, limit - used) if limit else None
