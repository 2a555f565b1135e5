"""vLLM without Belayer: one process, EngineCore in it, vLLM's own weights, sampler and memory. A baseline.

Run as a program with the number of a connected socket; speaks msgpack frames: `Setup` once, then `Batch` after `Batch`.
It sleeps between them, so that it may stay beside what it is compared with.
"""

from __future__ import annotations

import os
import socket
import sys
import time

import msgspec


class Setup(msgspec.Struct, tag=True):
    """`as_it_comes`: the kernels and scheduling that vLLM would choose; otherwise those that Belayer's workers use."""

    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    kv_bytes: int
    batch_invariant: bool
    as_it_comes: bool


class One(msgspec.Struct):
    prompt_ids: list[int]
    max_tokens: int
    temperature: float
    seed: int


class Batch(msgspec.Struct, tag=True):
    requests: list[One]


class Ready(msgspec.Struct, tag=True):
    pass


class Done(msgspec.Struct, tag=True):
    """`wall_s` is from the first request's submission to the last token; `cpu_s` is the process's, all threads."""

    wall_s: float
    cpu_s: float
    token_ids: list[list[int]]
    logprobs: list[list[float]]


def send(connection: socket.socket, message: object) -> None:
    body = msgspec.msgpack.encode(message)
    connection.sendall(len(body).to_bytes(4, "little") + body)


def receive(connection: socket.socket, kind: object) -> object:
    """The next message, of one of `kind`. Raises `EOFError` when the peer is gone."""
    size = int.from_bytes(_exactly(connection, 4), "little")
    return msgspec.msgpack.decode(_exactly(connection, size), type=kind)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise EOFError("the peer closed the connection")
        data += more
    return bytes(data)


class Plain:
    """One engine core, stepped by hand."""

    def __init__(self, setup: Setup) -> None:
        from vllm.config import CompilationMode
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        from belayer.engine.backends.vllm import core, loader
        from belayer.engine.backends.vllm.invariance import use_one_attention_tile

        if not setup.as_it_comes:
            loader.use_plain_matmul()
            if setup.batch_invariant:
                use_one_attention_tile()
        arguments = EngineArgs(
            model=setup.model,
            dtype=setup.dtype,  # pyright: ignore[reportArgumentType]
            max_model_len=setup.max_model_len,
            max_num_seqs=setup.max_num_seqs,
            kv_cache_memory_bytes=setup.kv_bytes,
            distributed_executor_backend="uni",
            block_size=None if setup.as_it_comes else core.BLOCK_SIZE,  # it decides how much of a prompt is cached
            enforce_eager=True,
            skip_tokenizer_init=True,
            async_scheduling=False,
            seed=0,
        )
        config = arguments.create_engine_config()
        config.compilation_config.mode = CompilationMode.NONE
        self._core = EngineCore(config, UniProcExecutor, log_stats=False)
        self._count = 0
        if not setup.as_it_comes:
            executor: object = self._core.model_executor
            model = executor.driver_worker.worker.model_runner.model  # pyright: ignore[reportAttributeAccessIssue]
            loader.use_own_kernels(model, config.model_config.dtype, setup.batch_invariant)

    def run(self, requests: list[One]) -> Done:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine import EngineCoreRequest

        core = self._core
        token_ids: dict[str, list[int]] = {}
        logprobs: dict[str, list[float]] = {}
        began, cpu = time.perf_counter(), time.process_time()
        for one in requests:
            self._count += 1
            key = str(self._count)
            token_ids[key], logprobs[key] = [], []
            params = SamplingParams(
                temperature=one.temperature,
                seed=one.seed if one.temperature > 0 else None,
                max_tokens=one.max_tokens,
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                output_kind=RequestOutputKind.DELTA,
            )
            request = EngineCoreRequest(
                request_id=key,
                prompt_token_ids=one.prompt_ids,
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
            core.add_request(*core.preprocess_add_request(request))
        while core.scheduler.has_requests():
            outputs, executed = core.step()
            core.post_step(executed)
            for batch in outputs.values():
                for output in batch.outputs:
                    token_ids[output.request_id] += output.new_token_ids
                    if output.new_logprobs is not None:
                        logprobs[output.request_id] += output.new_logprobs.logprobs[:, 0].tolist()
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        return Done(wall_s, cpu_s, list(token_ids.values()), list(logprobs.values()))


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    setup = receive(connection, Setup)
    assert isinstance(setup, Setup)
    plain = Plain(setup)
    send(connection, Ready())
    while True:
        try:
            batch = receive(connection, Batch)
        except EOFError:
            # nothing is left to save, and taking vLLM apart takes a second
            sys.stdout.flush()
            os._exit(0)
        assert isinstance(batch, Batch)
        send(connection, plain.run(batch.requests))


if __name__ == "__main__":
    main()
