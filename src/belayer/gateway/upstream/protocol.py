"""What the gateway needs from whatever makes the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from belayer.config import VersionPolicy
from belayer.engine import GenerationRequest, TokenSink


class Upstream(Protocol):
    """Makes completions that outlive whatever makes them."""

    model: str
    """What is served: a folder, or the name the servers give."""
    max_model_len: int
    dtype: str
    """Of the weights, as torch spells it; "" where that is not known."""

    @property
    def policy_version(self) -> int: ...

    @property
    def version_policy(self) -> VersionPolicy: ...

    def check(self, request: GenerationRequest | None = None) -> None:
        """Raise, before any token, for a request that cannot be honoured; without one, if nothing can be served."""
        ...

    async def generate(self, request: GenerationRequest, on_tokens: TokenSink) -> str:
        """See `belayer.engine.Engine.generate`: one completion, journalled through `on_tokens` before it is seen."""
        ...

    async def end_trajectory(self, name: str) -> None: ...

    async def update_weights(self, folder: Path, policy_version: int | None) -> int:
        """Serve the weights in `folder` from now on. Returns their policy version."""
        ...

    def state(self) -> dict[str, Any]:
        """What `/health` says about it."""
        ...

    async def close(self) -> None: ...
