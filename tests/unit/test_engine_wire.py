"""Frames, descriptors over sockets, mappings, the progress page, and the clock of a recovery."""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer.engine import Sampling
from belayer.engine._recovery_clock import RecoveryClock
from belayer.engine._wire import (
    Abort,
    Chunk,
    FromWorker,
    Hello,
    Submit,
    Tokens,
    ToOwner,
    ToWorker,
    Unpacker,
    Work,
    pack,
    receive_with_fds,
    send_with_fds,
)
from belayer.engine.memory.host import PAGE, Region, memfd
from belayer.engine.workers import hang
from belayer.engine.workers.hang import HangDetector
from belayer.engine.workers.progress import Phase, Progress

pytestmark = pytest.mark.unit

ids = st.lists(st.integers(0, 2**31), max_size=5)
tokens = st.builds(
    Tokens,
    generation=st.integers(0, 9),
    policy_version=st.integers(-1, 9),
    chunks=st.lists(
        st.builds(
            Chunk,
            id=st.text(max_size=5),
            start=st.integers(0, 9),
            token_ids=ids,
            logprobs=st.lists(st.floats(allow_nan=False), max_size=5),
            finish_reason=st.sampled_from(["stop", None]),
        ),
        max_size=3,
    ),
)


@given(messages=st.lists(tokens, max_size=5), cuts=st.lists(st.integers(0, 400), max_size=8))
def test_a_stream_may_be_cut_anywhere(messages: list[Tokens], cuts: list[int]) -> None:
    stream = b"".join(map(pack, messages))
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    unpacker: Unpacker[FromWorker] = Unpacker(FromWorker)
    got = [m for start, end in itertools.pairwise(places) for m in unpacker.feed(stream[start:end])]
    assert got == messages


def test_work_survives_the_wire() -> None:
    work = Work("1:a", [1, 2], [3], Sampling(max_tokens=9, seed=(1 << 64) - 1, stop_token_ids=(4, 5)))
    unpacker: Unpacker[ToWorker] = Unpacker(ToWorker)
    assert unpacker.feed(pack(Submit([work])) + pack(Abort(["1:a"]))) == [Submit([work]), Abort(["1:a"])]


def test_a_damaged_stream_is_an_error_and_not_a_wait() -> None:
    with pytest.raises(ValueError, match="damaged"):
        Unpacker(FromWorker).feed(b"\xff\xff\xff\xff....")


def test_descriptors_travel_with_a_frame() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fd = memfd("belayer-test", 10)
        os.pwrite(fd, b"content", 0)
        send_with_fds(ours, Hello(), [fd, fd])
        os.close(fd)
        message, fds = receive_with_fds(theirs, ToOwner)
        assert message == Hello() and len(fds) == 2
        assert os.pread(fds[1], 7, 0) == b"content"
        for received in fds:
            os.close(received)
        ours.close()
        with pytest.raises(EOFError):
            receive_with_fds(theirs, ToOwner)


def test_a_region_changes_its_backing_under_the_same_address() -> None:
    first, second = memfd("belayer-test", PAGE + 1), memfd("belayer-test", PAGE + 1)
    os.pwrite(first, b"one", PAGE)
    os.pwrite(second, b"two", PAGE)
    region = Region(PAGE + 1)
    assert region.nbytes == 2 * PAGE
    view = region.view()
    view[PAGE : PAGE + 3] = b"own"  # scratch until something is placed
    region.place(first, writable=True)
    assert bytes(view[PAGE : PAGE + 3]) == b"one"
    region.place(second, writable=False, populate=True)
    assert bytes(view[PAGE : PAGE + 3]) == b"two"
    region.place(first, writable=True)
    view[PAGE] = ord("O")
    assert os.pread(first, 3, PAGE) == b"One"
    assert os.pread(second, 3, PAGE) == b"two"
    region.close()
    region.close()
    os.close(first)
    os.close(second)


def test_weights_cannot_be_written_by_a_worker() -> None:
    program = (
        "from belayer.engine.memory.host import *\n"
        "region = Region(PAGE); region.place(memfd('belayer-test', PAGE), writable=False)\n"
        "print(region.view()[0], flush=True)\n"
        "region.view()[0] = 1\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout == "0\n" and ended.returncode == -signal.SIGSEGV


def test_the_owner_stays_small() -> None:
    """What kills workers (torch, vLLM, their threads) must not be in it."""
    heavy = ("torch", "vllm", "numpy", "asyncio")
    program = f"import sys, belayer.engine.owner.server; print([m for m in {heavy} if m in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "[]\n"


class Watch:
    """A hang detector on a real page, with short limits; `busy` says whether there is work."""

    def __init__(self, decode_s: float, prefill_s: float) -> None:
        fd = Progress.create()
        self.worker = Progress(fd)
        # a process without the CPU time that a thread could wait for
        self.process = subprocess.Popen(["sleep", "60"])
        child = SimpleNamespace(pid=self.process.pid)
        self.link: Any = SimpleNamespace(generation=1, progress=Progress(fd), child=child)
        os.close(fd)
        self.busy = True
        self.hangs: list[tuple[float, str]] = []
        self.detector = HangDetector(
            decode_s,
            prefill_s,
            lambda: self.link if self.busy else None,
            lambda _l, s, doing: self.hangs.append((s, doing)),
        )

    async def run(self, seconds: float) -> None:
        self.detector.start()
        await asyncio.sleep(seconds)
        self.detector.stop()
        self.process.kill()
        self.process.wait()


def test_a_frozen_counter_with_work_is_a_hang_and_nothing_else_is() -> None:
    async def scenario() -> None:
        frozen = Watch(0.1, 60.0)
        frozen.worker.mark(Phase.DECODE)
        await frozen.run(0.3)
        assert frozen.hangs and frozen.hangs[0][1] == "decode" and 0.1 < frozen.hangs[0][0] < 1.0

        idle = Watch(0.1, 60.0)
        idle.busy = False
        prefilling = Watch(0.1, 60.0)
        prefilling.worker.mark(Phase.PREFILL)
        working = Watch(0.2, 60.0)

        async def work() -> None:
            for _ in range(30):
                working.worker.mark(Phase.DECODE)
                await asyncio.sleep(0.01)

        await asyncio.gather(idle.run(0.3), prefilling.run(0.3), working.run(0.3), work())
        assert not idle.hangs and not prefilling.hangs and not working.hangs

    asyncio.run(scenario())


def test_one_hang_after_the_other_makes_it_more_patient_until_a_worker_works() -> None:
    async def scenario() -> None:
        watch = Watch(0.1, 60.0)
        watch.worker.mark(Phase.DECODE)
        watch.detector.start()
        while len(watch.hangs) < 3:
            await asyncio.sleep(0.01)
        first, second, third = (seconds for seconds, _ in watch.hangs)
        assert first > 0.1 and second > 0.2 and third > 0.4
        for _ in range(HangDetector.HEALTHY + 2):
            watch.worker.mark(Phase.DECODE)
            await asyncio.sleep(0.03)
        while len(watch.hangs) < 4:
            await asyncio.sleep(0.01)
        assert watch.hangs[3][0] < third
        await watch.run(0.0)

    asyncio.run(scenario())


def test_who_waits_for_a_processor_does_not_hang_or_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        watch = Watch(0.2, 60.0)
        watch.worker.mark(Phase.DECODE)
        begun = time.monotonic()
        monkeypatch.setattr(hang, "waited_for_processors", lambda pid: {"1": time.monotonic() - begun})
        await watch.run(0.8)
        assert not watch.hangs
        circling = Watch(0.05, 60.0)
        circling.worker.mark(Phase.DECODE)
        await circling.run(0.05 * HangDetector.PATIENCE + 0.1)
        assert circling.hangs
        starved = Watch(0.2, 60.0)
        starved.worker.mark(Phase.DECODE)
        monkeypatch.setattr(hang, "waited_for_processors", lambda pid: {"1": 5.0, "2": 7.0})  # long ago
        await starved.run(0.8)
        assert starved.hangs

    asyncio.run(scenario())


def test_a_thread_that_has_no_processor_is_counted() -> None:
    cpu = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, {{{cpu}}}); print(flush=True)\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        before = hang.waited_for_processors(processes[0].pid)
        if not before:
            pytest.skip("this kernel does not count how long a thread waits for a processor")
        time.sleep(0.5)
        (after,) = hang.waited_for_processors(processes[0].pid).values()
        assert 0.05 < after - next(iter(before.values())) < 5.0
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_driver_that_was_stopped_itself_does_not_blame_the_worker() -> None:
    async def scenario() -> None:
        watch = Watch(0.2, 60.0)
        watch.worker.mark(Phase.DECODE)
        watch.detector.start()
        await asyncio.sleep(0.08)
        time.sleep(0.5)  # noqa: ASYNC251  (the whole loop stands still, as it does under SIGSTOP)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not watch.hangs
        await asyncio.sleep(0.4)
        assert watch.hangs  # though it is not let off either
        await watch.run(0.0)

    asyncio.run(scenario())


def test_progress_is_readable_from_another_mapping() -> None:
    fd = Progress.create()
    writer, reader = Progress(fd), Progress(fd)
    os.close(fd)
    assert reader.read() == (0, Phase.STARTING)
    writer.mark(Phase.PREFILL)
    writer.mark(Phase.DECODE)
    assert reader.read() == (2, Phase.DECODE)
    assert mmap.PAGESIZE == PAGE


def test_phases_of_a_recovery_do_not_overlap() -> None:
    clock = RecoveryClock()
    clock.mark("before any fault")
    assert clock.finish() is None
    clock.begin("worker.hang", 2.0)
    clock.begin("worker.exit", None)  # its own fence: the same recovery
    for phase in ("fence_s", "health_s"):
        time.sleep(0.01)
        clock.mark(phase)
    time.sleep(0.02)
    clock.split({"map_s": 0.015}, "handover_s")
    clock.first_token()
    clock.first_token()
    done = clock.finish()
    assert done is not None and done["fault"] == "worker.hang"
    phases = done["phases"]
    assert list(phases) == ["detect_s", "fence_s", "health_s", "map_s", "handover_s", "prefill_s", "first_token_s"]
    assert phases["detect_s"] == 2.0 and phases["map_s"] == 0.015 and phases["handover_s"] >= 0.004
    assert sum(phases.values()) == pytest.approx(done["total_s"])
    assert clock.finish() is None
