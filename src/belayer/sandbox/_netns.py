"""Fresh network namespaces, with only the loopback interface, up.

Made in a thread of their own: a network namespace belongs to a thread, and a thread that might not find its way back
must not be one that other work runs on. Costs about 5 ms, mostly in the kernel; callers do other things meanwhile.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import socket
import struct
import threading

from belayer.errors import SandboxUnavailable

_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_REQUEST = struct.Struct("16sH22x")
_libc = ctypes.CDLL(None, use_errno=True)


async def fresh_netns() -> int:
    """An open descriptor of a new network namespace; it lives as long as somebody holds or uses it.

    Raises `SandboxUnavailable`.
    """
    return await asyncio.to_thread(_make_in_thread)


def _make_in_thread() -> int:
    result: list[int | OSError] = []

    def make() -> None:
        try:
            result.append(_make())
        except OSError as error:
            result.append(error)

    thread = threading.Thread(target=make, name="belayer-netns")
    thread.start()
    thread.join()
    if isinstance(result[0], OSError):
        raise SandboxUnavailable(f"no network namespace can be made: {result[0]}") from result[0]
    return result[0]


def _make() -> int:
    if _libc.unshare(_CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, _SIOCGIFFLAGS, _REQUEST.pack(b"lo", 0))
        flags = _REQUEST.unpack(answer)[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, _REQUEST.pack(b"lo", flags | _IFF_UP))
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
