"""The image of an engine's workers, made before the engine is started."""

from __future__ import annotations

from pathlib import Path

from belayer import events as ev
from belayer.config import EngineConfig
from belayer.engine._model_folder import inspect
from belayer.engine._spawner import Spawner, Wanted
from belayer.engine.exactness import is_exact
from belayer.engine.workers.child import environment
from belayer.ownership import RunLabel


async def build_image(
    config: EngineConfig,
    label: RunLabel,
    *,
    events: ev.EventSink = ev.ignore,
    log_dir: Path | None = None,
    timeout_s: float = 600.0,
) -> str:
    """Make sure that engines with this configuration start their workers from an image (half a minute, once).

    Returns why there is none, for instance because CRIU is missing; empty: there is one. An engine does the same by
    itself in a quiet moment; this is for those who cannot wait for one. Raises `ConfigError` as `Engine.start` does.
    """
    model = inspect(config)
    logs = log_dir or label.dir / "engine"
    logs.mkdir(parents=True, exist_ok=True)
    env = environment(label, config.threads, is_exact(config))
    spawner = Spawner(config, model, label, env, logs, events)
    wanted = Wanted(0, fill=True, awaited=False, beside=False, owner_socket="", policy_version=0)
    try:
        return await spawner.build_image(wanted, timeout_s)
    finally:
        await spawner.close()
