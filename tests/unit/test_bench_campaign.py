"""What a campaign knows outlives it: it goes on where it was, and never with somebody else's state, nor over it."""

from __future__ import annotations

import msgspec
import pytest
from benchmarks._campaign import Campaign, Saved

from belayer.errors import ConfigError

pytestmark = pytest.mark.unit


class Counts(Saved, kw_only=True):
    number: int = 0


class Counting(Campaign[Counts]):
    unit = "steps"

    def __init__(self, folder, seed=0, stop_at=None):
        super().__init__(Counts(seed=seed), state=folder / "build" / "x.state.json", say=self.heard)
        self.stop_at = stop_at

    def heard(self, text):
        self.said = [*getattr(self, "said", []), text]

    @property
    def done(self) -> int:
        return self.saved.number

    def run(self) -> None:
        while self.saved.number < 5:
            if self.saved.number == self.stop_at:
                raise KeyboardInterrupt
            self.saved.number += 1
            if self.saved.number == 2:
                self.saved.count("lost", "one", "two")


def test_a_stopped_campaign_shows_what_it_has_and_goes_on(tmp_path):
    shown = []
    first = Counting(tmp_path, stop_at=3)
    with pytest.raises(KeyboardInterrupt):
        first.carry_out(resume=False, stopped=lambda: shown.append(first.saved.number))
    assert shown == [3] and first.said == ["stopped after 3 steps; go on with --resume"]
    again = Counting(tmp_path)
    again.carry_out(resume=True, stopped=lambda: None)
    assert again.said == ["going on after 3 steps"] and again.saved.number == 5
    assert again.saved.found == {"lost": 2} == again.saved.wrong  # from before the stop
    assert again.saved.details == ["lost: one", "lost: two"]
    assert again.saved.wall_s >= first.saved.wall_s > 0


def test_one_that_begins_anew_puts_the_earlier_one_aside(tmp_path):
    Counting(tmp_path).carry_out(resume=False, stopped=lambda: None)
    before = (tmp_path / "build" / "x.state.json").read_bytes()
    anew = Counting(tmp_path, seed=1)
    anew.carry_out(resume=False, stopped=lambda: None)
    assert (tmp_path / "build" / "x.state.old").read_bytes() == before
    assert "put aside" in anew.said[0] and anew.saved.number == 5


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "truncated"),
        (b"\xff\xfe{", "."),
        (b'{"seed": 0, "outcome": {}}', "unknown field"),
        (msgspec.json.encode(Counts(seed=7, number=2)), "another plan"),
    ],
)
def test_what_is_not_its_state_is_refused_and_left_alone(tmp_path, content, why):
    place = tmp_path / "build" / "x.state.json"
    place.parent.mkdir()
    place.write_bytes(content)
    subject = Counting(tmp_path)
    with pytest.raises(ConfigError, match=why) as refused:
        subject.carry_out(resume=True, stopped=lambda: None)
    assert "--resume" in str(refused.value) and "untouched" in str(refused.value)
    assert place.read_bytes() == content and subject.saved.number == 0


def test_there_may_be_nothing_to_go_on_with(tmp_path):
    subject = Counting(tmp_path)
    subject.carry_out(resume=True, stopped=lambda: None)
    assert "nothing to go on with" in subject.said[0] and subject.saved.number == 5
