"""Sealed KV blocks after a real SIGKILL: adopted when everything is right, rebuilt when anything is not.

Whatever happens, tokens and logprobs are, to the bit, those of the undisturbed run; so an adopted block gives the
logprobs that a rebuilt one gives.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import mmap
import os
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
from tests.engine_kit import Journal, complete, engine_config, make_model, random_weights, requests

from belayer import events as ev
from belayer.engine import Engine, GenerationRequest, Sampling
from belayer.engine.memory.seals import Seal, SealTable
from belayer.ownership import RunLabel

pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the vLLM backend"),
]

COUNT, POSITION, TOKENS = 4, 25, 80
PROMPT_TOKENS = sum(20 + 110 * i for i in range(COUNT))
KNOWN = PROMPT_TOKENS + COUNT * (POSITION - 1)  # tokens whose keys and values the dead worker must have had
SIZE = 32  # tokens of a block
LAYERS, PIECE = 2, 2 * SIZE * 2 * 32 * 4  # of the model in tests.engine_kit: bytes of a block in one layer
STANDBY_S = 120.0


class Arena:
    """What the owner holds, seen from outside: the KV arena and its seals."""

    def __init__(self, arena: mmap.mmap, table: mmap.mmap) -> None:
        self.bytes = arena
        self.blocks = int.from_bytes(table[24:28], "little")
        self.memory = table
        self.table = SealTable(memoryview(table), self.blocks, SIZE)

    def seals(self) -> list[Seal]:
        return [seal for block in range(self.blocks) if (seal := self.table.read(block)) is not None]

    def full(self) -> list[Seal]:
        return [seal for seal in self.seals() if seal.whole is not None]

    def places(self, block: int) -> list[int]:
        return [layer * self.blocks * PIECE + block * PIECE for layer in range(LAYERS)]

    def checksum(self, block: int) -> int:
        crc = 0
        for place in self.places(block):
            crc = google_crc32c.extend(crc, self.bytes[place : place + PIECE])
        return crc


@contextlib.contextmanager
def owned(pid: int) -> Iterator[Arena]:
    """The owner's memory files, by the names they carry."""
    with contextlib.ExitStack() as stack:
        found: dict[str, mmap.mmap] = {}
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                name = os.readlink(fd)
            except FileNotFoundError:
                continue  # a connection that has just ended
            for wanted in ("belayer-kv-arena", "belayer-kv-seals"):
                if wanted in name:
                    file = stack.enter_context(open(fd, "r+b"))
                    found[wanted] = mmap.mmap(file.fileno(), 0)
        yield Arena(found["belayer-kv-arena"], found["belayer-kv-seals"])


class Watched:
    def __init__(self, engine: Engine, events: list[ev.Event], reference: Journal) -> None:
        self.engine = engine
        self.events = events
        self.reference = reference

    async def killed(self, also: Callable[[Arena], None] = lambda _: None) -> dict[str, Any]:
        """Kill the worker amid all requests, do something to what it leaves, and see them end as if nothing was.

        Returns the adoption that followed: blocks, tokens, refused; zeros if there was none.
        """
        engine = self.engine
        await engine.wait_standby(STANDBY_S)
        journal = Journal()

        def kill() -> None:
            pid, owner = engine.worker_pid, engine.owner_pid
            assert pid is not None
            watch = os.pidfd_open(pid)
            os.kill(pid, signal.SIGKILL)
            assert select.select([watch], [], [], 10)[0]  # it is dead, and this loop has not heard of it yet
            os.close(watch)
            with owned(owner) as arena:
                also(arena)

        journal.when_all_have(POSITION, COUNT, kill)
        seen = len(self.events)
        await asyncio.wait_for(complete(engine, requests(COUNT, TOKENS), journal), STANDBY_S)
        assert journal.tokens == self.reference.tokens
        assert journal.logprobs == self.reference.logprobs
        async with asyncio.timeout(STANDBY_S):  # a fast worker may have sent its last token before it died
            while not (recovered := [e for e in self.events[seen:] if e.kind == ev.RECOVERED]):
                await asyncio.sleep(0.01)
        assert [e.data["how"] for e in recovered] == ["promotion"]
        adopted = [e.data for e in self.events[seen:] if e.kind == ev.KV_ADOPTED]
        faults = [e for e in self.events[seen:] if e.kind == ev.FAULT_DETECTED and e.data["fault"] == "worker.seal"]
        total = {key: sum(data[key] for data in adopted) for key in ("blocks", "tokens", "refused")}
        assert len(faults) == sum(1 for data in adopted if data["refused"])
        return total


@pytest.mark.timeout(600)
def test_sealed_blocks_are_adopted_or_rebuilt(tmp_path: Path) -> None:
    """One engine for all of it: starting one for each case would take minutes."""
    model = make_model(tmp_path / "model")

    async def scenario() -> None:
        events: list[ev.Event] = []
        # room for the requests and little more, so that blocks are reused all the time
        config = engine_config(model, adopt_sealed_blocks=True, kv_bytes=3 << 20)
        with RunLabel.new("test engine adoption") as label:
            engine = await Engine.start(config, label, events=events.append)
            try:
                await live_through(Watched(engine, events, await complete(engine, requests(COUNT, TOKENS))))
            finally:
                await engine.close()

    async def live_through(watched: Watched) -> None:
        await adopted(watched)
        await torn_entries(watched)
        await a_stale_epoch(watched)
        await every_seal_is_true(watched)
        await a_flipped_bit(watched)
        await a_block_that_holds_something_else(watched)
        await after_a_weights_update(watched)

    asyncio.run(scenario())


async def adopted(watched: Watched) -> None:
    found = await watched.killed()
    assert found["refused"] == 0
    # all but the last token or two of each request: those of a step that the driver had not heard of
    assert found["tokens"] >= KNOWN - COUNT
    again = await watched.killed()  # its successor seals too, adopted blocks included
    assert again["refused"] == 0 and again["tokens"] >= KNOWN - COUNT


async def a_flipped_bit(watched: Watched) -> None:
    def flip(arena: Arena) -> None:
        for seal in arena.full():
            arena.bytes[arena.places(seal.block)[-1] + 5] ^= 0x10

    found = await watched.killed(flip)
    assert found["refused"] > 0
    assert found["tokens"] < KNOWN / 2  # first blocks are gone, and with them all that follows


async def a_block_that_holds_something_else(watched: Watched) -> None:
    """As if a block had been given to somebody else and its seal had stayed."""

    def exchange(arena: Arena) -> None:
        first, second = [seal.block for seal in arena.full() if seal.before == bytes(16)][:2]
        for a, b in zip(arena.places(first), arena.places(second), strict=True):
            one, other = arena.bytes[a : a + PIECE], arena.bytes[b : b + PIECE]
            arena.bytes[a : a + PIECE], arena.bytes[b : b + PIECE] = other, one

    found = await watched.killed(exchange)
    assert found["refused"] >= 2  # and some that the last case damaged, if nobody needed their room since
    assert 0 < found["tokens"] < KNOWN


async def torn_entries(watched: Watched) -> None:
    def tear(arena: Arena) -> None:
        room = SealTable.size(2, SIZE) - SealTable.size(1, SIZE)
        for seal in arena.full():
            middle = 64 + seal.block * room + 40  # the last words, the first ones are in place
            arena.memory[middle : middle + 8] = os.urandom(8)

    found = await watched.killed(tear)
    assert found["refused"] == 0  # there is nothing that could be refused
    assert found["tokens"] < KNOWN


async def a_stale_epoch(watched: Watched) -> None:
    def age(arena: Arena) -> None:
        for seal in arena.full():
            arena.table.open(seal.block, seal.epoch - 1, seal.before)
            arena.table.complete(seal.block, seal.tokens, seal.whole or 0)

    found = await watched.killed(age)
    assert found["refused"] == 0
    assert found["tokens"] < KNOWN / 2


async def every_seal_is_true(watched: Watched) -> None:
    """After many requests in an arena that is too small for them, no seal says what its block does not hold."""
    others = [
        GenerationRequest(
            id=f"other{i}", prompt_ids=[(11 * j + 17 * i) % 1000 for j in range(400)], sampling=Sampling(max_tokens=30)
        )
        for i in range(8)
    ]
    await complete(watched.engine, others)
    with owned(watched.engine.owner_pid) as arena:
        assert len(arena.full()) > 4
        for seal in arena.full():
            assert arena.checksum(seal.block) == seal.whole


async def after_a_weights_update(watched: Watched) -> None:
    """The same tokens with other weights: nothing sealed before may be used."""
    engine = watched.engine
    await engine.update_weights(random_weights(seed=5), policy_version=1)
    with owned(engine.owner_pid) as arena:
        assert not arena.seals()
    watched.reference = await complete(engine, requests(COUNT, TOKENS))
    found = await watched.killed()
    assert found["refused"] == 0 and found["tokens"] >= KNOWN - COUNT
