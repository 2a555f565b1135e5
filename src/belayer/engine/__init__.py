"""Tokens: a rollout engine whose worker may die at any moment without a caller noticing.

`Engine` is the whole interface; the structs are what goes in and comes out. The owner (weights and KV arena), the
worker and the shadow are processes of their own; see `owner`, `worker` and `supervisor`.
"""

# The owner and the worker are modules of this package too, and the owner must stay small: `Engine`, which pulls in
# asyncio, pydantic and the rest of the driver's side, is only imported when somebody asks for it.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from belayer.engine.request import GenerationRequest, Sampling, TokenChunk, TokenSink, WeightsEpoch

if TYPE_CHECKING:
    from belayer.engine.engine import Engine

__all__ = ["Engine", "GenerationRequest", "Sampling", "TokenChunk", "TokenSink", "WeightsEpoch"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from belayer.engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
