"""Belayer: fault tolerance for LLM agentic RL training.

The public names, loaded when they are first used, so that `import belayer` is quick.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from belayer.config import Config, load_config
    from belayer.errors import BelayerError
    from belayer.rollout import Rollout, RolloutSandbox, Turn
    from belayer.run import Run
    from belayer.trajectory import Trajectory

try:
    __version__ = version("belayer")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

_WHERE = {
    "BelayerError": "errors",
    "Config": "config",
    "Rollout": "rollout",
    "RolloutSandbox": "rollout",
    "Run": "run",
    "Trajectory": "trajectory",
    "Turn": "rollout",
    "load_config": "config",
}

__all__ = ["BelayerError", "Config", "Rollout", "RolloutSandbox", "Run", "Trajectory", "Turn", "load_config"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(f"belayer.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'belayer' has no attribute {name!r}")
