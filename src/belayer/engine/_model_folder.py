"""Checks of the model folder and the configuration, before any process is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from belayer.config import EngineConfig
from belayer.errors import ConfigError


class ModelFacts(msgspec.Struct, frozen=True):
    """What the driver needs to know of a model."""

    path: Path
    vocab_size: int
    tied: bool


def inspect(config: EngineConfig) -> ModelFacts:
    """Read the folder's `config.json`. Raises `ConfigError` with one sentence about what is wrong."""
    if config.backend == "vllm" and config.device != "cpu":
        raise ConfigError(
            f"the vLLM backend serves on the CPU, not on {config.device}",
            next_step='set engine.backend = "transformers"',
        )
    if config.model is None:
        raise ConfigError("no model is configured", next_step="set engine.model to a model folder")
    folder = config.model.expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(f"there is no model folder {folder}", next_step="check engine.model")
    file = folder / "config.json"
    try:
        facts: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} has no config.json, so it is not a model folder",
            next_step="point engine.model at a folder with config.json and *.safetensors",
        ) from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder} holds no *.safetensors file", next_step="save the model with safetensors")
    if not isinstance(facts, dict) or not isinstance(facts.get("vocab_size"), int):
        raise ConfigError(f"{file} names no vocab_size", next_step="use a text generation model")
    if "quantization_config" in facts:
        raise ConfigError(f"{folder} is quantised; its weights cannot be shared between processes as they are")
    saved = facts.get("dtype") or facts.get("torch_dtype")
    if saved is not None and saved != config.dtype:
        raise ConfigError(
            f"the model in {folder} is {saved}, but engine.dtype is {config.dtype}",
            next_step=f'set engine.dtype = "{saved}", or save the model as {config.dtype}',
        )
    longest = facts.get("max_position_embeddings")
    if isinstance(longest, int) and config.max_model_len > longest:
        raise ConfigError(
            f"engine.max_model_len is {config.max_model_len}, but the model in {folder} knows only {longest} positions",
            next_step=f"set engine.max_model_len to {longest} or less",
        )
    return ModelFacts(folder, facts["vocab_size"], bool(facts.get("tie_word_embeddings", False)))
