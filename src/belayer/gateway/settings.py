"""What can be set about a gateway."""

from __future__ import annotations

import ipaddress

import msgspec

from belayer.errors import ConfigError


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a gateway listens and what it lets in.

    `max_requests` bounds completions in the engine and in its queue together; beyond it clients are told to come back
    (429). `recover_s` is how long a completion waits for an external server when none can be reached.
    `sampled_logprobs_only` answers a wish for the likeliest tokens with the sampled token alone instead of refusing it.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    token: str = ""
    names: tuple[str, ...] = ()
    max_requests: int = 256
    max_body_bytes: int = 8 << 20
    heartbeat_s: float = 5.0
    request_timeout_s: float = 3600.0
    recover_s: float = 60.0
    drain_s: float = 10.0
    sampled_logprobs_only: bool = False

    def check(self) -> None:
        """Raises `ConfigError` for what cannot be or must not be."""
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"{self.port} is no port", next_step="choose one below 65536, or 0 for any free one")
        if self.max_requests < 1 or self.max_body_bytes < 1024:
            raise ConfigError("max_requests must be at least 1 and max_body_bytes at least 1024")
        for name in ("heartbeat_s", "request_timeout_s", "recover_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be greater than 0")
        if not self.token and not _is_loopback(self.host):
            raise ConfigError(
                f"{self.host} can be reached from outside, and no token is set",
                next_step="give --token-file (or BELAYER_TOKEN), or listen on 127.0.0.1",
            )
        if self.token and not (self.token.isascii() and self.token.isprintable() and " " not in self.token):
            raise ConfigError("the token must be printable ASCII without spaces")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name: what it means is not ours to know
