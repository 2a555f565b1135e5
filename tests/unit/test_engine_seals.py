"""The seal table: whatever a dying writer left of a record, it never swears to anything it had not sworn to."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer.engine.memory.seals import ROOT, Seal, SealTable, chain, stamp

pytestmark = pytest.mark.unit

BLOCKS, SIZE = 4, 8
GEOMETRY = stamp("test", BLOCKS, SIZE)

tokens = st.integers(0, 2**32 - 1)
checksums = st.integers(0, 2**32 - 1)


def table(memory: bytearray | None = None) -> tuple[SealTable, bytearray]:
    if memory is not None:
        return SealTable(memoryview(memory), BLOCKS, SIZE), memory
    fresh = bytearray(SealTable.size(BLOCKS, SIZE))
    made = SealTable(memoryview(fresh), BLOCKS, SIZE)
    made.format(GEOMETRY)
    return made, fresh


def everything(memory: bytearray) -> list[Seal | None]:
    return [SealTable(memoryview(memory), BLOCKS, SIZE).read(block) for block in range(BLOCKS)]


def weaker(claim: Seal | None, sworn: Seal | None) -> bool:
    """Whether `claim` swears to nothing that `sworn` does not."""
    if claim is None:
        return True
    if sworn is None or (claim.block, claim.epoch, claim.before) != (sworn.block, sworn.epoch, sworn.before):
        return False
    if claim.whole is not None:
        return claim == sworn
    return sworn.tokens[: len(claim.tokens)] == claim.tokens and (
        sworn.whole is not None or sworn.rows[: len(claim.rows)] == claim.rows
    )


def test_a_fresh_table_swears_to_nothing() -> None:
    made, memory = table()
    assert everything(memory) == [None] * BLOCKS
    assert made.describes(GEOMETRY)
    assert not made.describes(stamp("test", BLOCKS, SIZE + 1))


def test_memory_that_was_never_formatted_describes_nothing() -> None:
    made = SealTable(memoryview(bytearray(SealTable.size(BLOCKS, SIZE))), BLOCKS, SIZE)
    assert not made.describes(GEOMETRY)


def test_another_process_reads_what_was_sworn() -> None:
    made, memory = table()
    made.open(1, 7, ROOT)
    assert everything(memory)[1] is None  # no token yet
    made.append(1, 0, [5, 6], [50, 60])
    made.append(1, 2, [7], [70])
    assert everything(memory)[1] == Seal(1, 7, ROOT, (5, 6, 7), (50, 60, 70), None)
    full = list(range(10, 10 + SIZE))
    made.open(2, 7, chain(ROOT, [1]))
    made.complete(2, full, 99)  # a prefill fills a block in one step: no row was ever appended
    assert everything(memory)[2] == Seal(2, 7, chain(ROOT, [1]), tuple(full), (), 99)


def test_voiding_one_block_leaves_the_others() -> None:
    made, memory = table()
    for block in (0, 1):
        made.open(block, 1, ROOT)
        made.append(block, 0, [1], [2])
    made.void(0)
    seals = everything(memory)
    assert seals[0] is None and seals[1] is not None
    made.void_all()
    assert everything(memory) == [None] * BLOCKS


def test_a_new_life_inherits_nothing_of_the_old_one() -> None:
    made, memory = table()
    made.open(3, 1, ROOT)
    made.append(3, 0, list(range(SIZE)), [9] * SIZE)
    made.complete(3, list(range(SIZE)), 4)
    made.open(3, 1, ROOT)  # even of the same epoch, after the same tokens
    assert everything(memory)[3] is None
    made.append(3, 0, [0], [1])
    assert everything(memory)[3] == Seal(3, 1, ROOT, (0,), (1,), None)


def test_a_record_copied_to_another_block_does_not_verify() -> None:
    made, memory = table()
    made.open(0, 1, ROOT)
    made.append(0, 0, [1], [2])
    room = (len(memory) - 64) // BLOCKS
    memory[64 + room : 64 + 2 * room] = memory[64 : 64 + room]
    assert everything(memory)[1] is None


def test_blocks_outside_the_table_are_an_error() -> None:
    made, _ = table()
    with pytest.raises(IndexError):
        made.void(BLOCKS)
    with pytest.raises(ValueError):
        SealTable(memoryview(bytearray(10)), BLOCKS, SIZE)


def test_chains_depend_on_every_token_and_on_their_order() -> None:
    assert chain(chain(ROOT, [1, 2]), [3]) != chain(chain(ROOT, [2, 1]), [3])
    assert chain(ROOT, [1]) != chain(ROOT, [1, 0])


class _Writer:
    """A worker's life as far as the table is concerned: fills blocks, voids them, begins new ones."""

    def __init__(self) -> None:
        self.table, self.memory = table()
        self.held: dict[int, list[int]] = {}

    def act(self, dice: random.Random) -> tuple[int, Seal | None]:
        """Do one thing to one block; the block, and what the record swears to in between, at most."""
        block = dice.randrange(BLOCKS)
        held = self.held.get(block)
        if held is None or dice.random() < 0.1:
            self.table.open(block, dice.randrange(3), bytes(dice.randbytes(16)))
            self.held[block] = []
        elif len(held) == SIZE or dice.random() < 0.1:
            self.table.void(block)
            del self.held[block]
        elif dice.random() < 0.2:
            held += [dice.randrange(1 << 32) for _ in range(SIZE - len(held))]
            self.table.complete(block, held, dice.randrange(1 << 32))
        else:
            new = [dice.randrange(1 << 32) for _ in range(dice.randint(1, SIZE - len(held)))]
            self.table.append(block, len(held), new, [dice.randrange(1 << 32) for _ in new])
            held += new
        return block, self.table.read(block)


@given(st.integers(0, 2**32), st.integers(0, 60))
def test_a_write_torn_at_any_place_swears_to_nothing_new(seed: int, actions: int) -> None:
    """The writer dies in the middle: any mixture of old and new bytes, in any order, may be what is left."""
    dice = random.Random(seed)
    writer = _Writer()
    for _ in range(actions):
        writer.act(dice)
    old = bytes(writer.memory)
    before = everything(writer.memory)
    block, after = writer.act(dice)
    new = bytes(writer.memory)
    changed = [i for i in range(len(old)) if old[i] != new[i]]
    for kind in range(8):
        cut = dice.randint(0, len(changed))
        arrived = changed[:cut] if kind == 0 else changed[cut:] if kind == 1 else dice.sample(changed, cut)
        torn = bytearray(old)
        for i in arrived:
            torn[i] = new[i]
        found = everything(torn)
        assert weaker(found[block], before[block]) or weaker(found[block], after)
        assert found[:block] + found[block + 1 :] == before[:block] + before[block + 1 :]


@given(st.integers(0, 2**32), st.integers(1, 60), st.data())
def test_a_flipped_bit_takes_away_and_never_changes(seed: int, actions: int, data: st.DataObject) -> None:
    dice = random.Random(seed)
    writer = _Writer()
    for _ in range(actions):
        writer.act(dice)
    sworn = everything(writer.memory)
    bit = data.draw(st.integers(0, 8 * len(writer.memory) - 1))
    writer.memory[bit // 8] ^= 1 << bit % 8
    if bit // 8 < 36:  # in the header: the whole table is not read
        assert not writer.table.describes(GEOMETRY)
        return
    for found, was in zip(everything(writer.memory), sworn, strict=True):
        assert weaker(found, was)


@given(st.lists(st.tuples(tokens, checksums), min_size=1, max_size=SIZE), st.integers(1, SIZE))
def test_rows_come_back_in_order_however_they_were_grouped(rows: list[tuple[int, int]], group: int) -> None:
    made, memory = table()
    made.open(0, 2, ROOT)
    for start in range(0, len(rows), group):
        part = rows[start : start + group]
        made.append(0, start, [t for t, _ in part], [c for _, c in part])
    assert everything(memory)[0] == Seal(0, 2, ROOT, tuple(t for t, _ in rows), tuple(c for _, c in rows), None)
