"""What the parts of the engine's protection take by themselves, in this process: sampler and wire, for a token."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import msgspec
import numpy as np
import torch

from belayer.engine import Sampling
from belayer.engine._wire import Chunk, Tokens
from belayer.engine.sampler import choose, logprobs_of

REPEATS = 40


def phases(batch: int, vocabulary: int) -> dict[str, float]:
    """Microseconds a token: choosing it, its logprob, encoding and decoding its frame.

    Sealing of KV blocks is off by default and not in it."""
    source = torch.Generator().manual_seed(0)
    logits = torch.randn((batch, vocabulary), generator=source) * 3
    samplings = [Sampling(max_tokens=1 << 20, temperature=float(index % 2), seed=index) for index in range(batch)]
    rows = [(index, sampling, 7) for index, sampling in enumerate(samplings)]
    tokens = choose(logits, rows)
    columns = np.array(tokens)
    frame = Tokens(1, 0, [Chunk(f"request {index}", 7, [tokens[index]], [-1.0], None) for index in range(batch)])
    decoder = msgspec.msgpack.Decoder(Tokens)

    def of_each(work: Callable[[], object]) -> float:
        work()
        found = []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            work()
            found.append(time.perf_counter() - begun)
        return statistics.median(found) / batch * 1e6

    return {
        "sampler, alone": of_each(lambda: choose(logits, rows)),
        "logprob, alone": of_each(lambda: logprobs_of(logits, columns)),
        "wire, alone": of_each(lambda: decoder.decode(msgspec.msgpack.encode(frame))),
    }
