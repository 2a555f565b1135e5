"""Whether an engine continues a request exactly: with the tokens and logprobs of the undisturbed run, to the bit."""

from __future__ import annotations

from belayer.config import EngineConfig
from belayer.engine.backends import bfloat16_kernel


def is_exact(config: EngineConfig) -> bool:
    """Whether tokens do not depend on what is computed beside them, nor on how the prefix came into the KV cache.

    In float32 always, if `batch_invariant` is not turned off. In bfloat16 with vLLM on a CPU whose products are those
    of our own kernel; elsewhere kernels round differently for every batch.
    """
    if not config.batch_invariant or config.dtype == "float32":
        return config.batch_invariant
    ours = config.dtype == "bfloat16" and config.device == "cpu" and config.backend == "vllm"
    return ours and not bfloat16_kernel.unavailable()
