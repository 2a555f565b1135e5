"""`belayer prepare` for a program that configures its run itself: every setting an image depends on can be given."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import needs_root
from tests.engine_kit import KEYED

from belayer.cli import prepare
from belayer.cli.app import app
from belayer.config import Config, EngineConfig, load_config
from belayer.errors import ConfigError

pytestmark = pytest.mark.unit


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """For which configurations an image was asked for; none is made."""
    configs: list[EngineConfig] = []

    async def build(config: EngineConfig, *_: Any, **__: Any) -> str:
        configs.append(config)
        return ""

    monkeypatch.setattr(prepare, "set_up", lambda **_: None)
    monkeypatch.setattr(prepare, "build_image", build)
    return configs


def call(*words: str) -> int:
    return app(words, exit_on_error=False, result_action="return_value")


@needs_root
def test_an_image_for_what_the_program_will_ask_for(asked: list[EngineConfig]) -> None:
    assert call("prepare", "--model", "runs/tiny_model", "--max-model-len", "256") == 0
    overrides = {"engine.model": "runs/tiny_model", "engine.max_model_len": 256}
    assert call("prepare", "--model", "runs/tiny_model", "--no-batch-invariant") == 0
    other = {"engine.model": "runs/tiny_model", "engine.batch_invariant": False}
    assert asked == [load_config(overrides=each).engine for each in (overrides, other)]


@needs_root
def test_flags_are_stronger_than_the_file(asked: list[EngineConfig], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[engine]\nmodel = "elsewhere"\nmax_num_seqs = 4\nthreads = 3\n[train]\ntask = "none.py:None"\n')
    assert call("prepare", str(file), "--model", "runs/tiny_model", "--threads", "1") == 0
    (engine,) = asked
    assert (engine.model, engine.max_num_seqs, engine.threads) == (Path("runs/tiny_model"), 4, 1)


def test_without_a_model_it_says_how_to_give_one(asked: list[EngineConfig]) -> None:
    with pytest.raises(ConfigError, match="--model FOLDER"):
        prepare.prepare_command(None, {})
    assert asked == []


def test_every_setting_of_an_images_key_can_be_given() -> None:
    given = set(inspect.signature(app["prepare"].default_command).parameters)  # type: ignore[arg-type]
    assert KEYED - {"backend", "device"} <= given, "images are of vLLM on the CPU only"
    assert given - {"config"} <= set(EngineConfig.model_fields) and Config().engine.backend == "vllm"
