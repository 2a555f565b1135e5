"""What only a GPU shows. The suites that a GPU shares with the host are in tests/contract."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.engine_scenario import live_through_everything
from tests.contract.memory_kit import Peer, running_owner
from tests.engine_kit import make_model

from belayer.engine import memory
from belayer.engine.memory import Scratch
from belayer.engine.memory._weighted_sum import weighted_sum
from belayer.engine.weights.layout import Layout, Slice
from belayer.ownership import RunLabel


def _no_gpu() -> str:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return "this torch sees no CUDA device" if not torch.cuda.is_available() else memory.unavailable("cuda") or ""


_reason = _no_gpu()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_reason), reason=_reason)]

GiB = 1 << 30


@pytest.fixture
def label() -> Iterator[RunLabel]:
    with RunLabel.new("test GPU") as made:
        yield made


def used() -> int:
    """Bytes of the device that anybody uses."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_the_owner_has_memory_and_no_context(label: RunLabel) -> None:
    """A context is what an error on the device destroys, and it costs hundreds of MB."""
    memory.of("cuda").reserve(1 << 21).close()
    before = used()
    with running_owner("cuda", label) as (client, _pid):
        client.define(Layout(GiB, (Slice("a", 0, GiB, "u", (GiB,)),)))
        held = used() - before
        assert 2 * GiB <= held < 2 * GiB + (100 << 20)
    time.sleep(0.5)
    assert used() - before < 100 << 20, "what the owner held is free again"


def test_a_folded_range_costs_next_to_nothing() -> None:
    kind = memory.of("cuda")
    kind.reserve(1 << 21).close()
    before = used()
    region = kind.reserve(8 * GiB, Scratch.FOLDED)
    assert used() - before < 200 << 20
    region.tensor()[:: 1 << 20].fill_(7)
    region.close()
    assert used() - before < 50 << 20


def test_an_exchange_waits_for_what_runs() -> None:
    import torch

    kind = memory.of("cuda")
    size = 256 << 20
    first, second = kind.allocate("first", size), kind.allocate("second", size)
    region = kind.reserve(size, Scratch.NONE)
    region.place(second.fd, writable=True)
    region.forget()
    region.place(first.fd, writable=True)
    region.forget()
    tensor = region.tensor()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(200):
            tensor.add_(1)
    region.place(second.fd, writable=True)
    assert not tensor.any(), "the second allocation was not written to"
    region.place(first.fd, writable=False)
    assert bool((tensor == 200).all())
    for one in (region, first, second):
        one.close()


def test_a_checksum_is_quick_and_the_same_as_on_the_host(record_property) -> None:
    import torch

    size = 4 * GiB
    region = memory.of("cuda").reserve(size)
    words = region.tensor().view(torch.int32)
    torch.manual_seed(0)
    words.random_(-(2**31), 2**31 - 1)
    region.checksum(0, 1 << 26)
    began = time.monotonic()
    region.checksum(0, size)
    seconds = time.monotonic() - began
    record_property("checksum_gb_per_s", size / seconds / 1e9)
    print(f"checksum: {size / seconds / 1e9:.0f} GB/s")
    part = region.tensor()[4096 : 4096 + (40 << 20) + 3]
    assert region.checksum(4096, part.numel()) == weighted_sum(part.cpu())
    region.close()
    assert seconds < 2.0


KILLED = """
import sys, torch
from belayer.engine import memory
import socket
from belayer.engine._wire import receive_with_fds
import msgspec
class Go(msgspec.Struct):
    nbytes: int
go, fds = receive_with_fds(socket.socket(fileno=int(sys.argv[1])), Go)
arena = memory.of("cuda").reserve(go.nbytes, memory.Scratch.NONE)
arena.place(fds[0], writable=True)
tensor = arena.tensor()
tensor.fill_(9)
torch.cuda.synchronize()
print("writing", flush=True)
while True:
    tensor.add_(1)
"""


def test_a_process_killed_while_its_kernels_write_leaves_the_rest_alone(label: RunLabel) -> None:
    import socket

    import msgspec

    from belayer.engine._wire import send_with_fds

    class Go(msgspec.Struct):
        nbytes: int

    kind = memory.of("cuda")
    size = 512 << 20
    weights, arena = kind.reserve(size), kind.allocate("arena", size)
    weights.tensor().fill_(5)
    checksum = weights.checksum(0, size)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        victim = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ | label.env,
            stdout=subprocess.PIPE,
        )
    send_with_fds(ours, Go(size), [arena.fd])
    assert victim.stdout is not None and victim.stdout.readline() == b"writing\n"
    time.sleep(0.2)
    victim.kill()
    victim.wait()
    assert weights.checksum(0, size) == checksum
    mine = kind.reserve(size, Scratch.NONE)
    mine.place(arena.fd, writable=True)
    mine.forget()
    time.sleep(0.2)
    assert not mine.tensor().any(), "nobody writes there any more"
    for one in (mine, weights, arena):
        one.close()
    ours.close()


def test_a_forbidden_write_is_the_writer_s_end_and_the_device_stays_well(label: RunLabel) -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    from belayer.engine.device import health_of

    health = health_of("cuda")
    assert health.check() is None
    kind = memory.of("cuda")
    allocation = kind.allocate("weights", 1 << 21)
    region = kind.reserve(1 << 21, Scratch.NONE)
    region.place(allocation.fd, writable=True)
    region.forget()
    peer = Peer("cuda", 1 << 21, label)
    try:
        peer.place(allocation.fd, writable=False)
        assert peer.read(0, 1) == b"\0"
        try:
            assert peer.write(0, b"x").error
        except EOFError:
            pass
    finally:
        peer.close()
    assert region.copy_out(0, 1) == b"\0"
    began = time.monotonic()
    assert health.check() is None
    assert time.monotonic() - began < 0.5
    region.close()
    allocation.close()


@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_an_engine_on_a_gpu_loses_nothing(tmp_path: Path) -> None:
    asyncio.run(live_through_everything(make_model(tmp_path / "model"), "transformers", "cuda"))
