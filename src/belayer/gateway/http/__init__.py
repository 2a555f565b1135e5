"""The gateway's HTTP side: routes, guards, streams."""

from belayer.gateway.http.app import make_app

__all__ = ["make_app"]
