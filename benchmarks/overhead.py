"""What protection costs while nothing fails: the rollout engine against the same vLLM without Belayer, in pairs."""

from __future__ import annotations

from typing import Any

from ._engine_overhead import overhead
from .worker import workloads


def bench(quick: bool) -> dict[str, Any]:
    """Run it; the result is in the form of every bench."""
    cells = overhead(workloads().models, quick)
    return {"ok": not any(value for cell in cells for value in cell["checks"].values()), "cells": cells}
