"""HTTP for existing trainers and harnesses: they change a URL and have Belayer's protection.

`Gateway` ties an upstream, a tokenizer and a journal together, `make_app` puts it behind HTTP, and `serve` runs it
until it is told to stop. See docs/gateway.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from belayer.gateway.gateway import Gateway
    from belayer.gateway.http import make_app
    from belayer.gateway.serving import serve
    from belayer.gateway.settings import GatewaySettings

_WHERE = {"Gateway": "gateway", "GatewaySettings": "settings", "make_app": "http", "serve": "serving"}

__all__ = ["Gateway", "GatewaySettings", "make_app", "serve"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(f"belayer.gateway.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'belayer.gateway' has no attribute {name!r}")
