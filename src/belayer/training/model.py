"""Makes the model that the engine starts with: a folder as it is, or a freshly built model after a warm start."""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from itertools import islice
from pathlib import Path

from belayer.config import TrainConfig
from belayer.errors import ConfigError
from belayer.ownership import cache_dir
from belayer.training.task import Task, load_object, source_digest

Progress = Callable[[str], None]


def prepare_model(
    config: TrainConfig, task: Task, state_dir: Path, seed: int, progress: Progress, *, base: Path
) -> Path:
    """Put the starting policy into `state_dir`/model and return that folder, a Hugging Face style model.

    `config.model` is a folder, or `file.py:function` (relative to `base`) that is called with (folder, seed) and writes
    an untrained model; that one then imitates `config.warm_start_steps` batches of the task's demonstrations. The
    result is kept in the cache under a key of everything that it depends on, so another run takes it from there. A run
    that has its model already keeps it, whatever the cache says. Raises `ConfigError`.
    """
    wanted = state_dir / "model"
    if wanted.is_dir():
        return wanted
    source = _built(config, task, seed, progress, base) if ":" in config.model else _given(config.model, base)
    _install(source, wanted)
    return wanted


def _given(model: str, base: Path) -> Path:
    folder = (base / model).resolve()
    if not model or not (folder / "config.json").is_file():
        raise ConfigError(
            f"train.model: {model!r} is neither `file.py:function` nor a model folder (no {folder / 'config.json'})"
        )
    return folder


def _built(config: TrainConfig, task: Task, seed: int, progress: Progress, base: Path) -> Path:
    build = load_object(config.model, base, key="train.model")
    if config.warm_start_steps and not hasattr(task, "warm_start_examples"):
        raise ConfigError("train.warm_start_steps is set, but the task has no `warm_start_examples`")
    models = cache_dir() / "models"
    models.mkdir(parents=True, exist_ok=True)
    folder = models / _key(config, seed, base)
    with (models / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs that start together make the model once
        if folder.is_dir():
            return folder
        from belayer.training._torch import quiet_transformers  # loads torch: not needed for a cached model

        quiet_transformers()
        with tempfile.TemporaryDirectory(dir=models, prefix="unfinished-") as unfinished:
            made = Path(unfinished) / "model"
            build(made, seed)
            _warm_start(made, config, task, seed, progress)
            made.rename(folder)
    return folder


def _key(config: TrainConfig, seed: int, base: Path) -> str:
    """Content key of a built model: the code that makes it, its settings, and the libraries that set its values."""
    parts = {
        "model": config.model,
        "sources": [source_digest(spec, base) for spec in (config.model, config.task)],
        "this": inspect.getsource(_warm_start),
        "settings": [config.warm_start_steps, config.warm_start_batch, config.warm_start_learning_rate, config.threads],
        "seed": seed,
        "versions": [version(name) for name in ("torch", "transformers", "tokenizers")],
    }
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _warm_start(folder: Path, config: TrainConfig, task: Task, seed: int, progress: Progress) -> None:
    """Supervised steps on the task's demonstrations; rewrites the weights in `folder`."""
    if not config.warm_start_steps:
        return
    import torch
    from transformers import AutoModelForCausalLM

    from belayer.training._torch import collate, token_logprobs, with_threads

    with with_threads(config.threads):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.train()
        optimiser = torch.optim.AdamW(model.parameters(), lr=config.warm_start_learning_rate, weight_decay=0.0)
        examples = iter(task.warm_start_examples(seed))
        steps = config.warm_start_steps
        for step in range(steps):
            ramp, decay = min(1.0, (step + 1) / 30), 1 - 0.9 * step / steps
            for group in optimiser.param_groups:
                group["lr"] = config.warm_start_learning_rate * ramp * decay
            batch = list(islice(examples, config.warm_start_batch))
            if len(batch) < config.warm_start_batch:
                raise ConfigError(f"the task's demonstrations ran out after {step} of {steps} warm start steps")
            ids, mask = collate([example[0] for example in batch], [example[1] for example in batch])
            loss = -(token_logprobs(model, ids) * mask).sum() / mask.sum()
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            if (step + 1) % 20 == 0 or step + 1 == steps:
                progress(f"warm start: {step + 1} of {steps} supervised steps")
        model.save_pretrained(folder)


def _install(source: Path, wanted: Path) -> None:
    """Copy the folder so that a kill leaves either no model or a whole one."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    unfinished = wanted.with_name(f"model.{os.getpid()}.unfinished")
    for old in wanted.parent.glob("model.*.unfinished"):
        shutil.rmtree(old)
    shutil.copytree(source, unfinished)
    unfinished.rename(wanted)
