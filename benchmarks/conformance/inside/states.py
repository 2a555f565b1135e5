"""What a process is, beside its memory and descriptors: signals, timers, limits, credentials, filters."""

from __future__ import annotations

import ctypes
import errno
import os
import resource as limits
import signal
import struct
import time
from typing import Any

from .kit import LIBC, Resource, call, fork, require, resource, status, wait_until


@resource("pending signals")
class Signals(Resource):
    """Blocked, ignored, caught, and pending ones, real-time signals with their order."""

    def setup(self) -> None:
        self.caught = 0
        self.wanted = [signal.SIGUSR1, signal.SIGRTMIN + 1, signal.SIGRTMIN + 2]
        signal.signal(signal.SIGUSR2, self._catch)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, self.wanted)
        self._send()

    def _catch(self, *_: Any) -> None:
        self.caught += 1

    def _send(self) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        for number, value in ((1, 7), (1, 9), (2, 11)):
            call("sigqueue", os.getpid(), signal.SIGRTMIN + number, ctypes.c_void_p(value))

    def probe(self) -> Any:
        return status("self", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt")

    def use(self) -> None:
        got = []
        info = ctypes.create_string_buffer(128)
        wanted = ctypes.create_string_buffer(128)
        call("sigemptyset", wanted)
        for number in self.wanted:
            call("sigaddset", wanted, int(number))
        while True:
            try:
                number = call("sigtimedwait", wanted, info, struct.pack("qq", 0, 0))
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    break
                raise
            got.append((number, struct.unpack_from("i", info, 24)[0] if number > 32 else 0))
        first = int(signal.SIGRTMIN)
        require(got == [(10, 0), (first + 1, 7), (first + 1, 9), (first + 2, 11)], f"signals came as {got}")
        before = self.caught
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(0)
        require(self.caught == before + 1, "the handler did not run")
        self._send()


@resource("interval timers")
class Timers(Resource):
    def setup(self) -> None:
        self.fired = 0
        signal.signal(signal.SIGALRM, self._fire)
        self.timer = ctypes.c_void_p()
        event = struct.pack("QiI48x", 0, 0, 1)  # SIGEV_NONE
        call("timer_create", int(time.CLOCK_MONOTONIC), event, ctypes.byref(self.timer))
        call("timer_settime", self.timer, 0, struct.pack("qqqq", 17, 0, 5000, 0), None)
        signal.setitimer(signal.ITIMER_REAL, 5000, 19)
        signal.setitimer(signal.ITIMER_VIRTUAL, 4000, 23)

    def _fire(self, *_: Any) -> None:
        self.fired += 1

    def probe(self) -> Any:
        now = ctypes.create_string_buffer(32)
        call("timer_gettime", self.timer, now)
        every, _, left, _ = struct.unpack("qqqq", now.raw)
        real, virtual = signal.getitimer(signal.ITIMER_REAL), signal.getitimer(signal.ITIMER_VIRTUAL)
        return {
            "posix": [every, 4000 < left <= 5000],
            "real": [real[1], 4000 < real[0] <= 5000],
            "virtual": [virtual[1], 3000 < virtual[0] <= 4000],
        }

    def use(self) -> None:
        before = self.fired
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        wait_until("the timer fires", lambda: self.fired > before)
        signal.setitimer(signal.ITIMER_REAL, 5000, 19)


@resource("limits and scheduling")
class Limits(Resource):
    def setup(self) -> None:
        os.umask(0o027)
        os.nice(3)
        limits.setrlimit(limits.RLIMIT_NOFILE, (777, 7777))
        limits.setrlimit(limits.RLIMIT_CPU, (90000, limits.RLIM_INFINITY))
        call("prctl", 15, b"odd name", 0, 0, 0)
        call("prctl", 36, 1, 0, 0, 0)  # child subreaper
        call("prctl", 1, int(signal.SIGURG), 0, 0, 0)  # parent-death signal
        call("prctl", 41, 1, 0, 0, 0)  # no transparent huge pages
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.environ["CONFORMANCE"] = "set by setup"

    def probe(self) -> Any:
        reaper, death = ctypes.c_int(), ctypes.c_int()
        call("prctl", 37, ctypes.byref(reaper), 0, 0, 0)
        call("prctl", 2, ctypes.byref(death), 0, 0, 0)
        old = os.umask(0)
        os.umask(old)
        return {
            "umask": old,
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
            "files": limits.getrlimit(limits.RLIMIT_NOFILE),
            "cpu": limits.getrlimit(limits.RLIMIT_CPU),
            "name": open("/proc/self/comm").read(),
            "subreaper": reaper.value,
            "death signal": death.value,
            "huge pages off": call("prctl", 42, 0, 0, 0, 0),
            "scheduler": os.sched_getscheduler(0),
            "variable": os.environ["CONFORMANCE"],
            "folder": os.getcwd(),
            "command line": open("/proc/self/cmdline").read(),
            "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        }


@resource("setuid process")
class Credentials(Resource):
    """A process that has become another user, and has given up what it may not have.

    CRIU reads another user's limits only with CAP_SYS_RESOURCE on the host; without, it refuses.
    """

    group = "setuid"

    def setup(self) -> None:
        self.child = fork(self._become)
        wait_until("the child has changed", lambda: status(self.child, "Uid")["Uid"].startswith("65534"))

    def _become(self) -> None:
        os.setgroups([7, 65534])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        while True:
            signal.pause()

    def probe(self) -> Any:
        return status(self.child, "Uid", "Gid", "Groups", "CapEff", "CapPrm", "CapInh", "CapBnd", "NoNewPrivs", "State")


@resource("own seccomp filter")
class Seccomp(Resource):
    """A filter that a program inside put upon itself, on top of the container's."""

    def setup(self) -> None:
        number = 140 if os.uname().machine == "x86_64" else 141  # getpriority
        program = b"".join(
            struct.pack("HBBI", *step)
            for step in ((0x20, 0, 0, 0), (0x15, 0, 1, number), (6, 0, 0, 0x50000 | 123), (6, 0, 0, 0x7FFF0000))
        )
        code = ctypes.create_string_buffer(program)
        filters = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
        call("prctl", 22, 2, filters, 0, 0)

    def probe(self) -> Any:
        try:
            os.getpriority(os.PRIO_PROCESS, 0)
            seen = 0
        except OSError as error:
            seen = error.errno
        return {"errno": seen, **status("self", "Seccomp", "Seccomp_filters")}


@resource("rseq and robust futexes")
class Futexes(Resource):
    """A process-shared lock whose owner dies must tell so, also when its owner was restored."""

    def setup(self) -> None:
        import mmap

        self.shared = mmap.mmap(-1, 4096)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.shared))
        self.mutex = ctypes.c_void_p(address)
        attributes = ctypes.create_string_buffer(64)
        LIBC.pthread_mutexattr_init(attributes)
        LIBC.pthread_mutexattr_setpshared(attributes, 1)
        LIBC.pthread_mutexattr_setrobust(attributes, 1)
        require(LIBC.pthread_mutex_init(self.mutex, attributes) == 0, "no mutex")
        self._new_owner()

    def _new_owner(self) -> None:
        self.shared[2048] = 0
        self.child = fork(self._own)
        wait_until("the child owns the mutex", lambda: self.shared[2048])

    def _own(self) -> None:
        require(LIBC.pthread_mutex_lock(self.mutex) == 0, "locked")
        self.shared[2048] = 1
        while True:
            signal.pause()

    def probe(self) -> Any:
        return LIBC.pthread_mutex_trylock(self.mutex)

    def use(self) -> None:
        os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)
        result = LIBC.pthread_mutex_lock(self.mutex)
        require(result == errno.EOWNERDEAD, f"the owner's death is not seen: {result}")
        LIBC.pthread_mutex_consistent(self.mutex)
        LIBC.pthread_mutex_unlock(self.mutex)
        self._new_owner()
