"""The process that becomes an image: a warmed-up worker without weights.

    python -m belayer.engine.images.template CONTROL_FD TRIGGER_FD FOLDER

It is process 2 of a pid namespace of its own (`_init`), so that restored processes never collide with numbers that are
taken. It builds the engine as any first worker does, loads the checkpoint into private memory and says a few things
with it (the canary). Then it throws away what must not be in an image: weights, scratch KV memory, sockets. What it
waits on next, a pipe, is where it wakes up after a restore. Other descriptors that a restore replaces are placeholder
files until then.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import msgspec

from belayer.engine._wire import Spec
from belayer.engine.images.canary import Words
from belayer.engine.memory.host import Region
from belayer.engine.weights.layout import Layout
from belayer.errors import EngineError

INIT, WORKER = 1, 2  # their pids inside
GO = b"g"
PLACEHOLDERS = ("channel", "progress", "log")
BAKED = (
    "backend",
    "dtype",
    "device",
    "max_model_len",
    "max_num_seqs",
    "kv_bytes",
    "batch_invariant",
    "adopt_sealed_blocks",
)
"""Fields of a `Spec` that a restored worker cannot change any more."""

_MAP_EMPTY = 0x02 | 0x10 | 0x20 | 0x4000  # private, fixed, anonymous, not reserved
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


class Order(msgspec.Struct):
    """What to build."""

    spec: Spec
    vocab_size: int


class Built(msgspec.Struct):
    """It is built, and will wait for the dump as soon as the control socket is closed."""

    layout: Layout
    canary: list[Words]
    sources: dict[str, str]
    inherited: dict[str, str]


def be_worker(control_fd: int, trigger: int, folder: Path) -> None:
    """Build, wait to be dumped, and go on wherever it is restored."""
    import gc
    import socket

    from belayer.engine._wire import receive_with_fds, send_with_fds
    from belayer.engine.backends.vllm import alone
    from belayer.engine.images import canary, key
    from belayer.engine.workers import cohort, lifeline
    from belayer.engine.workers.progress import Progress
    from belayer.engine.workers.worker import Worker

    control = socket.socket(fileno=control_fd)
    order, _fds = receive_with_fds(control, Order)
    os.chdir("/")
    alone.share_nothing()
    worker = Worker(order.spec)
    worker.build(_keep_private)
    alone.leave_process_groups()
    worker.engine.warm_up()
    words = canary.listen(worker.engine, canary.requests(order.vocab_size, order.spec.max_model_len))
    _throw_away(worker)
    fds = {name: os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600) for name in PLACEHOLDERS}
    inherited = {name: str(folder / name)[1:] for name in PLACEHOLDERS}  # as CRIU names files: without the first slash
    inherited["trigger"] = os.readlink(f"/proc/self/fd/{trigger}")
    built = Built(worker.layout, words, key.sources(), inherited)
    sys.stdout.flush()
    sys.stderr.flush()
    for fd in (1, 2):
        os.dup2(fds["log"], fd)
    os.close(fds["log"])
    send_with_fds(control, built, [])
    del built, words, order
    gc.collect()
    gc.freeze()  # a collection would touch, and so copy, all pages that processes of one image share
    _libc.malloc_trim(0)
    control.close()

    # here it is dumped, and here every restored process begins
    if os.read(trigger, 1) != GO:
        return  # whoever restored it is gone already
    os.close(trigger)
    channel = socket.socket(fileno=fds["channel"])
    lifeline.hold(fds["progress"])
    cohort.watch()
    spec, _fds = receive_with_fds(channel, Spec)
    for name in BAKED:
        if getattr(spec, name) != getattr(worker.spec, name):
            raise EngineError(f"the image was made with {name} {getattr(worker.spec, name)}, not {getattr(spec, name)}")
    worker.revive(spec, channel, Progress(fds["progress"]), lambda: canary.probe(worker.engine))
    worker.run()


def _keep_private(_region: object, _nbytes: int, loaded: Layout | None) -> Layout:
    assert loaded is not None
    return loaded


def _throw_away(worker) -> None:
    """Weights and KV scratch; their addresses stay."""
    region = worker.region
    assert isinstance(region, Region)
    address = _libc.mmap(region.address, region.nbytes, 0, _MAP_EMPTY, -1, 0)
    if address != region.address:
        raise EngineError(f"the weights cannot be taken out of memory: {os.strerror(ctypes.get_errno())}")
    worker.engine.arena.forget()


if __name__ == "__main__":
    from belayer.engine.workers.worker import end_with

    end_with(lambda: be_worker(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
