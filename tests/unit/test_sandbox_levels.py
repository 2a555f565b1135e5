"""Which level of checkpoint is taken, refused, or restored, from what the run accepts and the host can give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from belayer.errors import CheckpointRefused, CheckpointUnfit
from belayer.sandbox._levels import ORDER, Levels, Restored, restored_from

pytestmark = pytest.mark.unit


def manifest(level: str) -> Any:
    return SimpleNamespace(id="c", level=level, reason="no CRIU", lost=["process 3: sleep 600"])


@pytest.mark.parametrize("allow", ORDER)
@pytest.mark.parametrize("best", ["fs+shell", "full"])
@pytest.mark.parametrize("asked", [None, *ORDER])
def test_never_below_what_the_run_accepts_nor_above_what_the_host_can(allow, best, asked):
    levels = Levels(allow, best, "no CRIU")
    possible = [level for level in ORDER if ORDER.index(allow) <= ORDER.index(level) <= ORDER.index(best)]
    wanted = asked or best
    if wanted in possible:
        level, reason = levels.start(asked)
        assert level == wanted
        assert reason == ("" if level == "full" else "it was asked for" if asked else "no CRIU")
    else:
        with pytest.raises(CheckpointRefused):
            levels.start(asked)
    for level in ORDER:
        if level in possible:
            levels.check(manifest(level))
        else:
            with pytest.raises(CheckpointUnfit):
                levels.check(manifest(level))


def test_one_step_down_after_a_refusal_as_far_as_the_run_goes():
    refusal = CheckpointRefused("a corked socket")
    levels = Levels("fs")
    assert levels.below("full", refusal) == "fs+shell"
    assert levels.below("fs+shell", refusal) == "fs"
    with pytest.raises(CheckpointRefused, match="corked"):
        levels.below("fs", refusal)
    assert refusal.next_step is None, "there is no lower level to advise"
    with pytest.raises(CheckpointRefused, match="corked"):
        Levels("full").below("full", refusal)
    assert refusal.next_step and '"fs+shell"' in refusal.next_step
    kept = CheckpointRefused("x", next_step="do this")
    with pytest.raises(CheckpointRefused):
        Levels("full").below("full", kept)
    assert kept.next_step == "do this", "a better advice is not replaced"


def test_what_a_restore_says():
    low = restored_from(manifest("fs+shell"))
    assert low == Restored(checkpoint="c", level="fs+shell", reason="no CRIU", lost=("process 3: sleep 600",))
    assert not low.complete and not restored_from(manifest("fs")).complete
    full = manifest("full")
    assert not restored_from(full).complete, "an overlay store loses something at full too"
    full.lost = []
    assert restored_from(full).complete
