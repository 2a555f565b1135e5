"""Sealing vLLM's KV blocks after each step, and adopting what a dead worker sealed.

While this worker serves, `seal` writes down every token whose keys and values the last step computed, and `void`
happens before vLLM hands a block to anybody else. A successor maps the same arena and calls `open`: every block is now
foreign, and those with a seal of its weights epoch are candidates, at the end of vLLM's queue of free blocks. `want`
looks for a request's tokens among them. A candidate is verified when a request wants it, over the bytes in the arena,
and only then does vLLM learn of it: full blocks enter its prefix cache, and of the last, partly filled one it makes a
private copy as for any partial hit. A foreign block that fails, or that vLLM takes for something else, is zeroed before
anybody can read it.

Why this does not contradict "KV bytes left by a dead worker are never read": docs/decisions/0006-sealed-blocks.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import vllm
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from belayer.engine.backends.vllm.blocks import KvBlocks
from belayer.engine.backends.vllm.tap import RowTap
from belayer.engine.memory.seals import ROOT, Seal, SealTable, chain, stamp
from belayer.errors import EngineError


@dataclasses.dataclass
class _Live:
    """A block whose record says something now."""

    before: bytes
    sealed: int  # tokens
    after: bytes | None  # the chain at its end, once it is full


@dataclasses.dataclass
class _Cursor:
    """How far a running request is sealed: its first block that is not full, and the chain before that."""

    index: int = 0
    before: bytes = ROOT
    last: int = -1  # the block before, by which a request is recognised that was preempted and has others now


@dataclasses.dataclass
class _Tail:
    """A verified, partly filled block that a request continues from."""

    block: Any
    start: int  # position in the request of its first token
    count: int


class VllmSealing:
    """The seals of one worker's blocks; part of `belayer.engine.backends.vllm.core.VllmBackend`."""

    def __init__(self, scheduler: Any, blocks: KvBlocks, tap: RowTap) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self._groups = self._manager.coordinator.single_type_managers
        if len(self._groups) != 1 or self._pool.num_gpu_blocks != blocks.count:
            raise EngineError("blocks of a model with several kinds of attention cannot be sealed")
        self._blocks = blocks
        self._tap = tap
        self._table: SealTable | None = None
        self._epoch = 0
        self._live: dict[int, _Live] = {}
        self._cursors: dict[str, _Cursor] = {}
        self._candidates: dict[bytes, list[Seal]] = {}  # by the chain before them
        self._unverified: set[int] = set()  # blocks of candidates
        self._foreign: set[int] = set()  # blocks that may hold anything
        self._tails: dict[str, _Tail] = {}  # adopted partial blocks, kept from reuse until vLLM has its copy
        self._counts = [0, 0, 0]
        self._take_blocks = self._pool.get_new_blocks
        self._find = self._manager.get_computed_blocks
        self._pool.get_new_blocks = self._get_new_blocks
        self._manager.get_computed_blocks = self._get_computed_blocks

    @property
    def nbytes(self) -> int:
        """Bytes of the seal table."""
        return SealTable.size(self._blocks.count, self._blocks.size)

    # -- life ---------------------------------------------------------------------------------------------------------
    def open(self, memory: memoryview, layout_hash: str, epoch: int) -> int:
        """Use the seal table in `memory` and the arena that is mapped now. Returns the number of candidates."""
        table = self._table = SealTable(memory, self._blocks.count, self._blocks.size)
        self._epoch = epoch
        self._tap.on = True
        geometry = stamp("vllm", vllm.__version__, layout_hash, *self._blocks.geometry)
        if not table.describes(geometry):
            self._blocks.forget()
            table.format(geometry)
            return 0
        self._blocks.clear(0)  # vLLM's placeholder, which is never handed out
        self._foreign = set(range(1, self._blocks.count))
        for block in self._foreign:
            seal = table.read(block)
            if seal is None or seal.epoch != epoch:
                table.void(block)
                continue
            self._candidates.setdefault(seal.before, []).append(seal)
            self._unverified.add(block)
            self._pool.free_block_queue.remove(self._pool.blocks[block])
            self._pool.free_block_queue.append(self._pool.blocks[block])
        return len(self._unverified)

    def use_epoch(self, epoch: int) -> None:
        """Other weights are in place and vLLM has dropped its cache: nothing that was sealed holds any more."""
        self.forget()
        self._epoch = epoch

    def forget(self) -> None:
        """Void every seal and every candidate."""
        for key in list(self._tails):
            self._release(key)
        if self._table is not None:
            self._table.void_all()
        self._unverified.clear()
        self._candidates.clear()
        self._live.clear()
        self._cursors.clear()

    # -- sealing ------------------------------------------------------------------------------------------------------
    def seal(self) -> None:
        """Swear to everything that the last step computed."""
        if self._table is None:
            return
        running = self._scheduler.running
        fresh = self._tap.take()
        for request in running:
            self._seal_request(request, fresh.get(request.request_id))
        if len(self._cursors) > len(running):
            self._cursors = {r.request_id: self._cursors[r.request_id] for r in running}
        for key in list(self._tails):
            request = self._scheduler.requests.get(key)
            if request is None or request.num_computed_tokens > 0:
                self._release(key)

    def _seal_request(self, request: Any, fresh: int | None) -> None:
        """`fresh` is the checksum of the last computed token, if it is known."""
        assert self._table is not None
        size = self._blocks.size
        blocks = self._groups[0].req_to_blocks[request.request_id]
        computed = request.num_computed_tokens
        cursor = self._cursors.get(request.request_id)
        moved = cursor is not None and cursor.index > 0 and blocks[cursor.index - 1].block_id != cursor.last
        if cursor is None or moved or computed < cursor.index * size:
            cursor = self._cursors[request.request_id] = _Cursor()
        while computed > cursor.index * size:
            first = cursor.index * size
            block = blocks[cursor.index].block_id
            count = min(computed - first, size)
            live = self._live.get(block)
            if live is None or live.before != cursor.before:
                self._table.open(block, self._epoch, cursor.before)
                live = self._live[block] = _Live(cursor.before, 0, None)
            if live.sealed < count:
                self._seal_block(block, live, request.all_token_ids[first : first + count], fresh)
            if count < size:
                break
            assert live.after is not None
            cursor.index, cursor.before, cursor.last = cursor.index + 1, live.after, block

    def _seal_block(self, block: int, live: _Live, tokens: list[int], fresh: int | None) -> None:
        assert self._table is not None
        count = len(tokens)
        if count < self._blocks.size:
            if fresh is not None and live.sealed == count - 1:
                checksums = [fresh]
            else:
                checksums = self._blocks.row_checksums(block, live.sealed, count)
            self._table.append(block, live.sealed, tokens[live.sealed :], checksums)
        else:
            self._table.complete(block, tokens, self._blocks.checksum(block))
            live.after = chain(live.before, tokens)
        live.sealed = count

    def _get_new_blocks(self, count: int) -> list[Any]:
        """vLLM's, after which nothing is sworn any more about the blocks it hands out, and nothing old is in them."""
        taken = self._take_blocks(count)
        if self._table is not None:
            for block in [entry.block_id for entry in taken]:
                if self._live.pop(block, None) is not None or block in self._unverified:
                    self._table.void(block)
                    self._unverified.discard(block)
                if block in self._foreign:
                    self._foreign.discard(block)
                    self._blocks.clear(block)
        return taken

    # -- adopting -----------------------------------------------------------------------------------------------------
    def want(self, key: str) -> None:
        """Adopt what the dead worker had computed of this request, which vLLM has queued but not scheduled yet."""
        if not self._unverified:
            return
        request = self._scheduler.requests[key]
        size, before, index = self._blocks.size, ROOT, 0
        # the last token is computed in any case: what comes after it depends on that
        known = list(request.all_token_ids)[: request.num_tokens - 1]
        while (index + 1) * size <= len(known):
            tokens = tuple(known[index * size : (index + 1) * size])
            block = self._cached(request, index) or self._adopt_full(request, index, before, tokens)
            if block is None:
                break
            before = chain(before, tokens)
            index += 1
        tail = self._adopt_tail(before, known[index * size : (index + 1) * size])
        if tail is not None:
            self._pool.touch([tail[0]])
            self._tails[key] = _Tail(tail[0], index * size, tail[1])

    def _cached(self, request: Any, index: int) -> Any:
        found = self._pool.get_cached_block(request.block_hashes[index], [0])
        return found[0] if found else None

    def _adopt_full(self, request: Any, index: int, before: bytes, tokens: tuple[int, ...]) -> Any:
        for seal in self._matching(before):
            if seal.whole is None or seal.tokens != tokens or not self._verified(seal, len(tokens)):
                continue
            block = self._pool.blocks[seal.block]
            key = make_block_hash_with_group_id(request.block_hashes[index], 0)
            self._pool._insert_block_hash(key, block, num_tokens=(index + 1) * self._blocks.size)
            self._live[seal.block] = _Live(before, len(tokens), chain(before, tokens))
            return block
        return None

    def _adopt_tail(self, before: bytes, known: list[int]) -> tuple[Any, int] | None:
        """The block that holds most of `known`, from its first token on, and how many."""
        best: tuple[int, Seal] | None = None
        for seal in self._matching(before):
            count = _common(seal.tokens, known)
            if count > (best[0] if best else 0):
                best = (count, seal)
        if best is None:
            return None
        count, seal = best
        if not self._verified(seal, count):
            return self._adopt_tail(before, known)  # the next best
        self._blocks.clear(seal.block, count)  # what comes after may be half-written
        if self._table is not None:
            self._table.void(seal.block)
        return self._pool.blocks[seal.block], count

    def _matching(self, before: bytes) -> list[Seal]:
        return [seal for seal in self._candidates.get(before, ()) if seal.block in self._unverified]

    def _verified(self, seal: Seal, count: int) -> bool:
        """Whether the bytes in the arena are the sealed ones, for `count` tokens; this decides its fate."""
        block = seal.block
        self._unverified.discard(block)
        self._foreign.discard(block)
        if seal.whole is not None:
            good = self._blocks.checksum(block) == seal.whole
        else:
            good = self._blocks.row_checksums(block, 0, count) == list(seal.rows[:count])
        if good:
            self._counts[0] += 1
            self._counts[1] += count
            return True
        self._counts[2] += 1
        assert self._table is not None
        self._table.void(block)
        self._blocks.clear(block)
        return False

    def _get_computed_blocks(self, request: Any) -> tuple[Any, int, int]:
        """vLLM's, which finds full blocks, and after them the adopted partial one, if they lead up to it."""
        found, count, boundary = self._find(request)
        tail = self._tails.get(request.request_id)
        if tail is None or tail.start != count:
            return found, count, boundary
        blocks = [*found.blocks[0], tail.block]
        return self._manager.create_kv_cache_blocks((blocks,)), count + tail.count, boundary

    def _release(self, key: str) -> None:
        self._pool.free_blocks([self._tails.pop(key).block])

    def adopted(self) -> tuple[int, int, int] | None:
        """Blocks and tokens adopted and blocks refused since the last call; None if nothing happened."""
        if not any(self._counts):
            return None
        blocks, tokens, refused = self._counts
        self._counts = [0, 0, 0]
        return blocks, tokens, refused


def _common(first: tuple[int, ...], second: list[int]) -> int:
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count
