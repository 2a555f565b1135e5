"""One suite for every kind of memory: the host's, and a GPU's where there is one."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.memory_kit import Order, Peer, running_owner

from belayer.engine import memory
from belayer.engine.memory import Scratch, _weighted_sum
from belayer.engine.weights.layout import Layout, Slice, digest
from belayer.ownership import RunLabel

pytestmark = pytest.mark.contract

SIZE = 3 << 20  # no multiple of a GPU's 2 MiB


def no_device(device: str) -> str | None:
    """Why the suite cannot run on `device`, or None."""
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            return "this torch sees no CUDA device"
    return memory.unavailable(device)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if (reason := no_device(request.param)) is not None:
        pytest.skip(f"no memory of {request.param} here: {reason}")
    return request.param


@pytest.fixture(scope="module")
def label() -> Iterator[RunLabel]:
    with RunLabel.new("test memory") as made:
        yield made


@pytest.fixture
def kind(device: str) -> memory.Memory:
    return memory.of(device)


@pytest.fixture
def regions(kind: memory.Memory) -> Iterator[list[memory.Region]]:
    """Two ranges on one allocation: the first writable, the second not."""
    allocation = kind.allocate("belayer-test", SIZE)
    made = [kind.reserve(SIZE, Scratch.NONE) for _ in range(2)]
    made[0].place(allocation.fd, writable=True)
    made[1].place(allocation.fd, writable=False)
    allocation.close()  # who maps it keeps it
    made[0].forget()
    yield made
    for region in made:
        region.close()


def content(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def test_ranges_and_allocations_have_whole_units(kind: memory.Memory) -> None:
    unit = kind.rounded(1)
    assert unit >= 4096 and kind.rounded(unit) == unit and kind.rounded(unit + 1) == 2 * unit
    region = kind.reserve(SIZE)
    assert region.nbytes == kind.rounded(SIZE) >= SIZE and region.address % 4096 == 0
    region.close()
    region.close()


def test_scratch_holds_what_is_written(kind: memory.Memory) -> None:
    region = kind.reserve(SIZE, Scratch.WHOLE)
    data = content(SIZE)
    region.copy_in(0, data)
    assert region.copy_out(0, SIZE) == data
    region.forget()
    assert not any(region.copy_out(0, SIZE))
    region.close()


def test_folded_scratch_can_be_used_everywhere(kind: memory.Memory) -> None:
    region = kind.reserve(200 << 20, Scratch.FOLDED)  # more than what lies under it again and again
    for offset in (0, 100 << 20, region.nbytes - 64):
        region.copy_in(offset, b"x" * 64)
        assert region.copy_out(offset, 64) == b"x" * 64
    region.close()


@pytest.mark.parametrize("scratch", list(Scratch))
def test_an_address_keeps_its_meaning_while_its_backing_is_exchanged(kind: memory.Memory, scratch: Scratch) -> None:
    first, second = (kind.allocate("belayer-test", SIZE) for _ in range(2))
    writer = kind.reserve(SIZE, Scratch.NONE)
    for allocation, word in ((first, b"one"), (second, b"two")):
        writer.place(allocation.fd, writable=True)
        writer.copy_in(SIZE - 3, word)
    region = kind.reserve(SIZE, scratch)
    address, tensor = region.address, region.tensor()
    last = tensor[SIZE - 3 : SIZE]
    for allocation, word in ((first, b"one"), (second, b"two"), (first, b"one")):
        region.place(allocation.fd, writable=False, populate=True)
        assert region.address == address == tensor.data_ptr()
        assert bytes(last.tolist()) == region.copy_out(SIZE - 3, 3) == word
    for one in (writer, region, first, second):
        one.close()


def test_all_who_map_an_allocation_see_the_same(regions: list[memory.Region]) -> None:
    writable, readable = regions
    for offset, nbytes in ((0, 1), (1, 4095), (4097, 12345), (SIZE - 1, 1), (7, 0)):
        data = content(nbytes, offset)
        writable.copy_in(offset, data)
        assert readable.copy_out(offset, nbytes) == data
    writable.tensor()[100:104] = 7
    assert readable.tensor()[99:105].tolist()[1:5] == [7] * 4


def test_what_is_forgotten_is_zero_for_everybody(regions: list[memory.Region]) -> None:
    writable, readable = regions
    writable.copy_in(0, content(SIZE))
    writable.forget()
    assert not readable.tensor().any() and not any(readable.copy_out(0, SIZE))
    writable.copy_in(5, b"again")
    assert readable.copy_out(5, 5) == b"again"


def test_one_region_is_copied_to_another(kind: memory.Memory, regions: list[memory.Region]) -> None:
    source = kind.reserve(SIZE)
    source.copy_in(0, content(SIZE))
    regions[0].copy_from(source)
    source.close()
    assert regions[1].copy_out(0, SIZE) == content(SIZE)


def test_a_checksum_is_of_content_and_place(regions: list[memory.Region]) -> None:
    writable, readable = regions
    data = bytearray(content(70_001))
    start = 512
    writable.copy_in(start, data)
    whole = readable.checksum(start, len(data))
    assert whole == writable.checksum(start, len(data)) and 0 <= whole < 1 << 64
    writable.copy_in(200_000 - start % 4, data)  # the same content elsewhere
    assert writable.checksum(200_000 - start % 4, len(data)) == whole
    chosen = random.Random(1)
    for position in [0, 1, 2, 3, len(data) - 1, len(data) - 2, *(chosen.randrange(len(data)) for _ in range(40))]:
        bit = 1 << chosen.randrange(8)
        writable.copy_in(start + position, bytes([data[position] ^ bit]))
        assert readable.checksum(start, len(data)) != whole, f"byte {position}, bit {bit}"
        writable.copy_in(start + position, data[position : position + 1])
    assert readable.checksum(start, len(data)) == whole
    writable.copy_in(start, data[4:8] + data[:4])  # two words exchanged
    assert readable.checksum(start, len(data)) != whole


def test_an_epoch_digest_is_the_same_on_every_mapping(regions: list[memory.Region]) -> None:
    layout = Layout(SIZE, (Slice("a", 0, 1000, "u", (1,)), Slice("b", 1024, 999, "u", (1,))))
    regions[0].copy_in(0, content(SIZE))
    before = digest(layout, regions[0])
    assert digest(layout, regions[1]) == before
    regions[0].copy_in(1010, b"not in tensors")
    assert digest(layout, regions[1]) == before
    regions[0].copy_in(2022, bytes([content(SIZE)[2022] ^ 128]))
    assert digest(layout, regions[1]) != before


def test_another_process_maps_it_and_its_death_changes_nothing(
    device: str, kind: memory.Memory, label: RunLabel
) -> None:
    allocation = kind.allocate("belayer-test", SIZE)
    region = kind.reserve(SIZE, Scratch.NONE)
    region.place(allocation.fd, writable=True)
    region.forget()
    region.copy_in(10, b"from here")
    peer = Peer(device, SIZE, label)
    try:
        peer.place(allocation.fd, writable=True)
        assert peer.read(10, 9) == b"from here"
        assert not peer.write(SIZE - 6, b"there!").error
        assert region.copy_out(SIZE - 6, 6) == b"there!"
        assert peer.ask(Order("checksum", offset=3, nbytes=100_003)).value == region.checksum(3, 100_003)
    finally:
        peer.close()  # SIGKILL
    assert region.copy_out(10, 9) == b"from here" and region.copy_out(SIZE - 6, 6) == b"there!"
    region.close()
    allocation.close()


def test_who_may_only_read_cannot_write(device: str, kind: memory.Memory, label: RunLabel) -> None:
    allocation = kind.allocate("belayer-test", SIZE)
    region = kind.reserve(SIZE, Scratch.NONE)
    region.place(allocation.fd, writable=True)
    region.copy_in(0, b"weights")
    peer = Peer(device, SIZE, label)
    try:
        peer.place(allocation.fd, writable=False)
        assert peer.read(0, 7) == b"weights"
        try:
            assert peer.write(0, b"damage!").error
        except EOFError:
            assert peer.process.wait() == -signal.SIGSEGV
    finally:
        peer.close()
    assert region.copy_out(0, 7) == b"weights"
    region.close()
    allocation.close()


def test_the_owner_hands_it_out_and_the_mapping_outlives_the_owner(
    device: str, kind: memory.Memory, label: RunLabel
) -> None:
    layout = Layout(SIZE, (Slice("a", 0, SIZE, "u", (SIZE,)),))
    slots = [kind.reserve(SIZE, Scratch.NONE) for _ in range(2)]
    arena = kind.reserve(SIZE + 1, Scratch.FOLDED)
    with running_owner(device, label) as (client, pid):
        client.define(layout)
        _state, fds = client.weights(when_clean=False)
        for slot, fd in zip(slots, fds, strict=True):
            slot.place(fd, writable=True)
            os.close(fd)
        slots[0].copy_in(0, b"epoch 1")
        slots[1].copy_in(0, b"epoch 2")
        fd = client.arena(arena.nbytes, fresh=True)
        if isinstance(fd, list):
            fd = fd[0]
        arena.place(fd, writable=True)
        os.close(fd)
        arena.copy_in(SIZE, b"!")
        loaded = Path(f"/proc/{pid}/maps").read_text()
        assert not re.search(r"libtorch|libcudart|/numpy/|/torch/", loaded)
        if device == "cpu":
            assert "cuda" not in loaded
    assert slots[0].copy_out(0, 7) == b"epoch 1" and slots[1].copy_out(0, 7) == b"epoch 2"
    assert arena.copy_out(SIZE, 1) == b"!"
    for region in (*slots, arena):
        region.close()


def _held(device: str) -> tuple[int, int]:
    """Bytes of the device in use, as far as this process can tell, and descriptors it holds."""
    descriptors = len(os.listdir("/proc/self/fd"))
    if device == "cpu":
        status = Path("/proc/self/status").read_text()
        return sum(int(kb) << 10 for kb in re.findall(r"(?:RssShmem|RssAnon):\s+(\d+)", status)), descriptors
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free, descriptors


def test_what_is_closed_is_given_back(device: str, kind: memory.Memory) -> None:
    size = 16 << 20

    def use() -> None:
        allocation = kind.allocate("belayer-test", size)
        region = kind.reserve(size, Scratch.WHOLE)
        region.copy_in(0, b"x" * size)
        region.place(allocation.fd, writable=True)
        region.copy_in(0, b"y" * size)
        region.close()
        allocation.close()

    use()
    before = _held(device)
    for _ in range(8):
        use()
    after = _held(device)
    assert after[0] - before[0] < 2 * size, "memory"
    assert after[1] == before[1], "descriptors"


def test_the_weighted_sum_is_the_sum_of_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU computes, on the CPU, against the formula in plain integers; blocks are made small to have several."""
    import torch

    monkeypatch.setattr(_weighted_sum, "_BLOCK", 8)
    monkeypatch.setattr(_weighted_sum, "_weights", {})
    mask = (1 << 64) - 1
    weights = [w & mask for w in _weighted_sum._weights_on(torch.device("cpu")).tolist()]
    assert len(set(weights)) == 8 and all(w % 2 for w in weights)
    for nbytes in (0, 1, 3, 4, 31, 32, 33, 100, 257):
        data = content(nbytes, nbytes)
        total = 0
        whole = nbytes // 4
        for index in range(whole):
            word = int.from_bytes(data[4 * index : 4 * index + 4], "little", signed=True)
            total += word * weights[index % 8] * ((index // 8 + 1) * _weighted_sum._GOLDEN | 1)
        if nbytes % 4:
            block = -(-whole // 8)
            last = int.from_bytes(data[4 * whole :].ljust(4, b"\0"), "little", signed=True)
            total += last * ((block + 1) * _weighted_sum._GOLDEN | 1)
        assert _weighted_sum.weighted_sum(torch.tensor(list(data), dtype=torch.uint8)) == total & mask
