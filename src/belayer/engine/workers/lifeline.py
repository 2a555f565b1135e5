"""Learning of a process's death before the kernel has taken it apart.

A pidfd becomes readable once a process is a zombie, and by then the kernel has unmapped all its memory: 30 to 100 ms
for a worker. A *robust* mutex is released earlier, as the first thing a dying thread does, and whoever waits for it is
woken with EOWNERDEAD (set_robust_list(2), pthread_mutexattr_setrobust(3)). So a worker's main thread takes such a
mutex in memory it shares with the driver and never gives it back; a thread of the driver waits for it.

What this proves: the worker's main thread, the only one that sends tokens, will not run again. It does not prove that
other threads of the process have stopped, nor that its memory is free; the pidfd proves that.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable

from belayer.engine.memory.host import PAGE

_SHARED, _ROBUST = 1, 1
OFFSET = 2048  # of the mutex in the page; the rest belongs to whoever shares the page
_LOOK_S = 0.5  # how often a waiting thread asks whether it is still wanted

_libc = ctypes.CDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


def _call(name: str, *arguments: object) -> None:
    code = getattr(_libc, name)(*arguments)
    if code:
        raise OSError(code, f"{name}: {os.strerror(code)}")


def prepare(fd: int) -> None:
    """Put a fresh lifeline, held by nobody, into the page that `fd` is."""
    with mmap.mmap(fd, PAGE) as page:
        attributes = ctypes.create_string_buffer(64)
        mutex = ctypes.c_char.from_buffer(page, OFFSET)
        _call("pthread_mutexattr_init", attributes)
        _call("pthread_mutexattr_setpshared", attributes, _SHARED)
        _call("pthread_mutexattr_setrobust", attributes, _ROBUST)
        _call("pthread_mutex_init", ctypes.byref(mutex), attributes)
        del mutex


def hold(fd: int) -> None:
    """Hold the lifeline in `fd` for the rest of this thread's life. Call it from the main thread, once."""
    page = mmap.mmap(fd, PAGE)
    mutex = ctypes.c_char.from_buffer(page, OFFSET)
    _call("pthread_mutex_lock", ctypes.byref(mutex))
    _held.append((page, mutex))


_held: list[tuple[mmap.mmap, ctypes.c_char]] = []  # unmapped, the kernel could not release it


class Lifeline:
    """Watches a lifeline that another process holds; `on_death` is called from a thread of its own."""

    def __init__(self, fd: int, on_death: Callable[[], None]) -> None:
        self._page = mmap.mmap(fd, PAGE)
        self._on_death = on_death
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="belayer-lifeline", daemon=True)

    def watch(self) -> None:
        """Begin; the other process must hold it already."""
        self._thread.start()

    def close(self) -> None:
        """Call nobody any more. The thread ends on its own, within half a second."""
        self._stop.set()
        if not self._thread.ident:
            self._page.close()

    def _wait(self) -> None:
        mutex = ctypes.c_char.from_buffer(self._page, OFFSET)
        died = False
        while not (died or self._stop.is_set()):
            seconds, fraction = divmod(time.monotonic() + _LOOK_S, 1.0)
            until = _Timespec(int(seconds), int(fraction * 1e9))
            code = _libc.pthread_mutex_clocklock(ctypes.byref(mutex), time.CLOCK_MONOTONIC, ctypes.byref(until))
            died = code == errno.EOWNERDEAD
            if code in (0, errno.EOWNERDEAD):
                _libc.pthread_mutex_unlock(ctypes.byref(mutex))
            elif code != errno.ETIMEDOUT:
                break  # the pidfd still tells
            if code == 0:
                break  # nobody held it
        if died and not self._stop.is_set():
            self._on_death()
        del mutex
        self._page.close()
