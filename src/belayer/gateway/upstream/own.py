"""Belayer's own engine as the gateway's upstream, and which weights it serves after a restart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belayer import events
from belayer.config import EngineConfig, VersionPolicy
from belayer.engine import Engine, GenerationRequest, TokenSink
from belayer.engine._model_folder import inspect
from belayer.engine.weights.checkpoint_files import checkpoint_tensors
from belayer.errors import ConfigError, WeightsError
from belayer.files import write_atomically
from belayer.ownership import RunLabel

if TYPE_CHECKING:
    import torch

WEIGHTS_FILE = "weights.json"


def check_model(config: EngineConfig) -> None:
    """Raises `ConfigError` for what can be seen to be wrong before anything is started."""
    if (folder := config.model) is not None:
        there = folder.expanduser().is_dir()
        if not there or not (folder.expanduser() / "config.json").is_file():
            raise ConfigError(
                f"{folder} has no config.json: it is no model folder"
                if there
                else f"there is no model folder {folder}",
                kept="nothing was started or written",
                next_step="check the path given to `belayer serve`, or engine.model of its --config",
            )
    inspect(config)


class OwnEngine:
    """An `Engine` that this process runs. Its worker may die at any moment without a client noticing."""

    def __init__(self, engine: Engine, config: EngineConfig, run: Path, folders: dict[int, Path]) -> None:
        """Not for callers: use `start`. `folders` holds the model folder of each policy version."""
        assert config.model is not None
        self.engine = engine
        self.model = str(config.model)
        self.max_model_len = config.max_model_len
        self.dtype = f"torch.{config.dtype}"
        self._run = run
        self._folders = folders
        self._updating = asyncio.Lock()

    @classmethod
    async def start(
        cls, config: EngineConfig, label: RunLabel, run: Path, *, sink: events.EventSink = events.ignore
    ) -> OwnEngine:
        """Start an engine with the weights that `run` served last, its model folder's if none were sent since.

        Raises `ConfigError` when that folder is gone, and what `Engine.start` raises.
        """
        if config.model is None:
            raise ConfigError("no model is given", next_step="give a model folder, or --upstream URL")
        version, folder = _last_weights(run, config.model)
        folders = {version: folder}

        def source(wanted: int) -> Iterable[tuple[str, torch.Tensor]]:
            if wanted not in folders:
                raise WeightsError(f"the folder of policy version {wanted} is not known")
            return checkpoint_tensors(folders[wanted])

        engine = await Engine.start(
            config,
            label,
            events=sink,
            policy_version=version,
            weights=None if folder == config.model else checkpoint_tensors(folder),
            source=source,
            log_dir=run / "logs",
        )
        return cls(engine, config, run, folders)

    @property
    def policy_version(self) -> int:
        return self.engine.policy_version

    @property
    def version_policy(self) -> VersionPolicy:
        return self.engine.version_policy

    def check(self, request: GenerationRequest | None = None) -> None:
        self.engine.check(request)

    async def generate(self, request: GenerationRequest, on_tokens: TokenSink) -> str:
        return await self.engine.generate(request, on_tokens)

    async def end_trajectory(self, name: str) -> None:
        await self.engine.end_trajectory(name)

    async def update_weights(self, folder: Path, policy_version: int | None) -> int:
        """Raises `WeightsError` for a folder or version that cannot be served; the old weights serve on then."""
        async with self._updating:
            tensors = await asyncio.to_thread(_tensors, folder)
            version = self.policy_version + 1 if policy_version is None else policy_version
            self._folders[version] = folder
            try:
                await self.engine.update_weights(tensors, version)
            except BaseException:
                if self.policy_version != version:
                    self._folders.pop(version, None)
                raise
            for old in [known for known in self._folders if known < version]:
                del self._folders[old]
            note = {"policy_version": version, "folder": str(folder)}
            await asyncio.to_thread(write_atomically, self._run / WEIGHTS_FILE, json.dumps(note).encode())
            return version

    def state(self) -> dict[str, Any]:
        return {
            "worker": self.engine.worker_pid,
            "shadow": self.engine.shadow_pid,
            "policy_version": self.policy_version,
        }

    async def close(self) -> None:
        await self.engine.close()


def _tensors(folder: Path) -> list[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError

    try:
        return list(checkpoint_tensors(folder))
    except (OSError, ValueError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise WeightsError(f"the weights cannot be read: {why}", kept="the weights that serve") from None


def _last_weights(run: Path, model: Path) -> tuple[int, Path]:
    file = run / WEIGHTS_FILE
    try:
        note = json.loads(file.read_text())
        version, folder = int(note["policy_version"]), Path(note["folder"])
    except FileNotFoundError:
        return 0, model
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is damaged: {error}", next_step="delete it to serve the model folder") from None
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"this run served policy version {version} from {folder}, which is gone",
            kept="every session",
            next_step=f"put the weights back, or delete {file} to serve the model folder as version 0",
        )
    return version, folder
