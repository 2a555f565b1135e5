"""The gateway campaign's judgement: whatever a client could notice is counted."""

from __future__ import annotations

from typing import Any

import pytest

from belayer.cli.bench import _folder, _load

pytestmark = pytest.mark.unit
gateway = _load(_folder(), "gateway")

CALM = gateway.Told(ids=[1, 2, 3], logprobs=[-0.1, -0.2, -0.3], finish="length", done=True)


@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        ({}, {}),
        ({"ids": [1, 2], "logprobs": [-0.1, -0.2]}, {"lost": 1}),
        ({"ids": [1, 2, 3, 3], "logprobs": [-0.1, -0.2, -0.3, -0.3]}, {"duplicated": 1, "lost": 0}),
        ({"ids": [1, 5, 3]}, {"changed": 1}),
        ({"logprobs": [-0.1, -0.2, -0.4]}, {"logprobs_changed": 1}),
        ({"done": False}, {"lost": 1}),
        ({"finish": "stop"}, {"lost": 1}),
    ],
)
def test_what_a_client_could_notice_is_counted(changes: dict[str, Any], counted: dict[str, int]) -> None:
    campaign = gateway._Campaign(None, None, 0)
    fields = {"ids": [1, 2, 3], "logprobs": [-0.1, -0.2, -0.3], "finish": "length", "done": True}
    campaign._judge(gateway.Told(**(fields | changes)), CALM)
    wrong = {name: campaign.counts[name] for name in gateway.WRONG if campaign.counts[name]}
    assert wrong == {name: count for name, count in counted.items() if count}
    assert campaign.counts["streams"] == 1
