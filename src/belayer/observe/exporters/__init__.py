"""Optional event sinks: OpenTelemetry, TensorBoard, Weights & Biases. Each needs its package, and says so.

They work behind a queue on a thread of their own: a run neither waits for them nor fails with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from belayer.observe.exporters._background import Background

Exporter = Literal["opentelemetry", "tensorboard", "wandb"]


def open_exporter(name: Exporter, run_dir: Path) -> Background:
    """The exporter `name` for the run in `run_dir`, started. Raises `ConfigError` without its package."""
    if name == "opentelemetry":
        from belayer.observe.exporters.opentelemetry import OpenTelemetryExporter

        return Background(name, OpenTelemetryExporter(run_dir.name))
    if name == "tensorboard":
        from belayer.observe.exporters.scalars import TensorBoardWriter

        return Background(name, TensorBoardWriter(run_dir / "tensorboard"))
    from belayer.observe.exporters.scalars import WandbWriter

    return Background(name, WandbWriter(run_dir))


__all__ = ["Background", "Exporter", "open_exporter"]
