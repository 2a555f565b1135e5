"""The suite would notice: after its damage, and without a restore, no resource looks as it did before."""

from __future__ import annotations

import asyncio

import pytest
from benchmarks.conformance import arrange, names
from benchmarks.conformance.engine import Trial, differences
from benchmarks.conformance.shells import SHELLS
from tests.conftest import needs_sandboxes
from tests.integration.sandbox_conformance.conftest import own

pytestmark = [pytest.mark.integration, needs_sandboxes]


def test_damage_is_seen(tmp_path):
    groups = [group for group in arrange(names()) if len(group) > 2]
    assert sum(map(len, groups)) > 60

    async def body() -> list[str]:
        unseen: list[str] = []
        async with own(tmp_path) as runtime:
            for group in groups[:2]:
                box = await runtime.create()
                trial = Trial(box, group)
                await trial.setup()
                (before,) = await trial.ask("probe")
                (again,) = await trial.ask("probe")
                assert not [text for text in differences(before, again).values() if text], "looking changes something"
                await trial.ask("damage")
                (after,) = await trial.ask("probe")
                unseen += [name for name, text in differences(before, after).items() if not text]
                assert any(name in SHELLS for name in group)
                await box.close()
        return unseen

    assert asyncio.run(body()) == []
