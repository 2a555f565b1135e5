"""Layout, digest and the owner's epoch table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer.engine.owner.table import EpochTable
from belayer.engine.weights.layout import Layout, Slice, align, digest, first_unfilled

pytestmark = pytest.mark.unit

LAYOUT = Layout(1024, (Slice("a", 0, 256, "float32", (8, 8)), Slice("b", 512, 400, "float32", (100,))), ("tied",))


@pytest.mark.parametrize(
    "other",
    [
        Layout(1024, LAYOUT.slices[:1], ("tied",)),
        Layout(1024, (LAYOUT.slices[0], Slice("b", 516, 400, "float32", (100,))), ("tied",)),
        Layout(1024, (LAYOUT.slices[0], Slice("b", 512, 400, "int32", (100,))), ("tied",)),
        Layout(1024, (LAYOUT.slices[0], Slice("b", 512, 400, "float32", (10, 10))), ("tied",)),
        Layout(2048, LAYOUT.slices, ("tied",)),
    ],
)
def test_layout_hash_tells_layouts_apart(other: Layout) -> None:
    assert LAYOUT.hash() == Layout(LAYOUT.nbytes, LAYOUT.slices, LAYOUT.aliases).hash()
    assert other.hash() != LAYOUT.hash()


@given(position=st.integers(0, 1023), bit=st.integers(0, 7))
def test_digest_notices_every_bit_of_every_tensor(position: int, bit: int) -> None:
    content = bytearray(i * 7 % 256 for i in range(1024))
    before = digest(LAYOUT, memoryview(content))
    content[position] ^= 1 << bit
    inside = position < 256 or 512 <= position < 912
    assert (digest(LAYOUT, memoryview(content)) != before) == inside


def test_digest_notices_exchanged_tensors() -> None:
    names = Layout(512, (Slice("a", 0, 256, "u", (1,)), Slice("b", 256, 256, "u", (1,))))
    swapped = Layout(512, (Slice("b", 0, 256, "u", (1,)), Slice("a", 256, 256, "u", (1,))))
    content = memoryview(bytes(range(256)) * 2)
    assert digest(names, content) != digest(swapped, content)


def test_unfilled_parameters_are_found() -> None:
    wanted = [("q", 0, 100), ("norm", 256, 10)]
    assert first_unfilled(wanted, [(50, 100), (0, 50), (256, 266)]) is None
    assert first_unfilled(wanted, [(0, 50), (60, 100), (256, 266)]) == "q"
    assert first_unfilled(wanted, [(0, 300), (256, 265)]) is None  # the first range covers both
    assert first_unfilled(wanted, [(0, 100)]) == "norm"
    assert align(1) == align(256) == 256 and align(257) == 512 and align(0) == 0


def test_an_epoch_becomes_clean_in_one_step() -> None:
    table = EpochTable()
    with pytest.raises(ValueError, match="no layout"):
        table.begin()
    table.define(LAYOUT)
    first = table.begin()
    assert not first.clean and table.clean is None
    clean = table.commit(first.number, "d1", 7)
    assert clean.clean and (clean.policy_version, clean.digest, table.dirty) == (7, "d1", None)

    second = table.begin()
    assert second.slot != clean.slot and second.number > clean.number
    assert table.clean == clean  # whatever happens to the writer now
    third = table.begin()  # it died; another one begins
    assert third.slot == second.slot
    with pytest.raises(ValueError, match="not the one being written"):
        table.commit(second.number, "d2", 8)  # the dead one's late word
    with pytest.raises(ValueError, match="digest"):
        table.commit(third.number, "", 8)
    assert table.clean == clean
    assert table.commit(third.number, "d3", 8).slot == third.slot
    with pytest.raises(ValueError, match="not the one being written"):
        table.commit(third.number, "d3", 8)


def test_numbers_go_on_rising_when_an_owner_is_replaced() -> None:
    table = EpochTable()
    table.define(LAYOUT)
    assert table.begin(after=41).number == 42
    assert table.begin(after=3).number == 43


def test_a_living_owner_keeps_its_layout() -> None:
    table = EpochTable()
    table.define(LAYOUT)
    table.define(LAYOUT)
    with pytest.raises(ValueError, match="another layout"):
        table.define(Layout(2048, LAYOUT.slices))
