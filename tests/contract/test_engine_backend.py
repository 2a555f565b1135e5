"""The whole engine on the transformers backend. (On vLLM: tests/crash.)"""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest
from tests.contract.engine_scenario import live_through_everything
from tests.engine_kit import make_model

from belayer.config import EngineConfig
from belayer.engine._model_folder import inspect
from belayer.errors import ConfigError

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
]


def test_vllm_on_a_gpu_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vLLM backend serves on the CPU") as refused:
        inspect(EngineConfig(model=make_model(tmp_path / "model"), device="cuda"))
    assert "transformers" in (refused.value.next_step or "")


@pytest.mark.timeout(600)  # about 20 s on a quiet machine
def test_an_engine_on_transformers_loses_nothing(tmp_path: Path) -> None:
    asyncio.run(live_through_everything(make_model(tmp_path / "model"), "transformers", "cpu"))
