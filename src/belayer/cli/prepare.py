"""`belayer prepare`: what a run would make at its first start, made before it."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from belayer.config import Config, load_config
from belayer.engine.prebuild import build_image
from belayer.errors import ConfigError
from belayer.ownership import RunLabel
from belayer.sandbox.setup import set_up

console = Console(highlight=False, soft_wrap=True)


def prepare_command(path: Path | None, overrides: dict[str, Any]) -> int:
    """`overrides`: settings by their dotted names, None where not given."""
    config = load_config(path, overrides)
    base = path.absolute().parent if path is not None else Path.cwd()
    purpose = f"prepare {path or overrides.get('engine.model')}"
    with tempfile.TemporaryDirectory(prefix="belayer-prepare-") as folder:
        if overrides.get("engine.model") is None:
            config = _with_model(config, base, Path(folder))
        set_up(progress=console.print)
        reason = "engine.images is off"
        begun = time.monotonic()
        if config.engine.images:
            console.print("engine image: about half a minute if there is none yet")
            with RunLabel.new(purpose) as label:
                reason = asyncio.run(build_image(config.engine, label, log_dir=Path(folder)))
    if reason:
        console.print(f"no engine image: {reason}. Workers will start the normal way, in ten seconds or more.")
    else:
        console.print(f"engine image: ready ({time.monotonic() - begun:.1f} s). Workers start from it in a second.")
    return 0


def _with_model(config: Config, base: Path, folder: Path) -> Config:
    """With the model that the run will start with; one that a function builds is built, and kept in the cache."""
    if config.train is not None:
        from belayer.training.model import prepare_model
        from belayer.training.task import load_task

        task = load_task(config.train.task, base)
        model = prepare_model(config.train, task, folder, config.run.seed, console.print, base=base)
        return config.model_copy(update={"engine": config.engine.model_copy(update={"model": model})})
    if config.engine.model is None:
        raise ConfigError(
            "neither engine.model nor a [train] section says which model to prepare for",
            next_step="give a TOML file that does, or --model FOLDER",
        )
    return config
