"""Where tokens come from: Belayer's own engine, or vLLM and SGLang servers that somebody else runs."""

from belayer.gateway.upstream.protocol import Upstream

__all__ = ["Upstream"]
