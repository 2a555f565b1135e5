"""The whole engine on the transformers backend. (On vLLM: tests/crash.)"""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest
from tests.contract.engine_scenario import live_through_everything
from tests.engine_kit import make_model

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
]


@pytest.mark.timeout(600)  # about 20 s on a quiet machine
def test_an_engine_on_transformers_loses_nothing(tmp_path: Path) -> None:
    asyncio.run(live_through_everything(make_model(tmp_path / "model"), "transformers", "cpu"))
