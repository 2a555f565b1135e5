"""Belayer under the trainers and harnesses that people have. Each module says what to change there.

For one that has no module here: `ProtectedHost`, `ProtectedSandbox` and `shared_host`, loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from belayer.integrations._host import ProtectedHost, shared_host
    from belayer.integrations._protected import BlockingSandbox, ProtectedSandbox

_WHERE = {
    "BlockingSandbox": "_protected",
    "ProtectedHost": "_host",
    "ProtectedSandbox": "_protected",
    "shared_host": "_host",
}

__all__ = ["BlockingSandbox", "ProtectedHost", "ProtectedSandbox", "shared_host"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(f"belayer.integrations.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'belayer.integrations' has no attribute {name!r}")
