"""vLLM's EngineCore inside our worker process: the KV arena, the step, the requests."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm import SamplingParams
from vllm.config import CompilationMode
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker.cpu_worker import CPUWorker

from belayer.engine._wire import Chunk, Spec, Work
from belayer.engine.backends.owned_weights import OwnedWeights
from belayer.engine.backends.vllm import loader
from belayer.engine.backends.vllm.alone import rendezvous
from belayer.engine.backends.vllm.blocks import KvBlocks
from belayer.engine.backends.vllm.invariance import use_one_attention_tile
from belayer.engine.backends.vllm.sampling import Rows, extra_args, install
from belayer.engine.backends.vllm.sealing import VllmSealing
from belayer.engine.backends.vllm.tap import RowTap
from belayer.engine.memory.host import Region
from belayer.engine.request import Sampling
from belayer.errors import EngineError

BLOCK_SIZE = 32  # tokens: the least that vLLM's CPU kernels take, so that prefixes are shared and sealed finely
CHUNK = 512  # tokens of a step at most: short prefixes get their next token first, and long ones do not stop decoding

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class _ArenaMode(TorchFunctionMode):
    """Gives vLLM's one raw KV allocation an address range of ours instead of the heap."""

    def __init__(self) -> None:
        super().__init__()
        self.regions: list[Region] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs.get("dtype") is torch.int8 and len(args) == 1 and isinstance(args[0], int):
            region = Region(args[0])
            self.regions.append(region)
            memory = (ctypes.c_int8 * args[0]).from_address(region.address)
            return torch.frombuffer(memory, dtype=torch.int8)
        return func(*args, **kwargs)


_arena: Region | None = None


class OwnedWorker(CPUWorker):
    """vLLM's CPU worker with its KV cache in a `Region`."""

    def _maybe_get_memory_pool_context(self, tag: str) -> Any:
        return _arena_context() if tag == "kv_cache" else super()._maybe_get_memory_pool_context(tag)


@contextlib.contextmanager
def _arena_context() -> Iterator[None]:
    global _arena
    mode = _ArenaMode()
    with mode:
        yield
    if len(mode.regions) != 1:
        raise EngineError(f"vLLM made {len(mode.regions)} KV allocations where one was expected: version mismatch")
    _arena = mode.regions[0]


class VllmBackend:
    """One model, one scheduler, one thread."""

    def __init__(self, spec: Spec, weights: OwnedWeights) -> None:
        loader.use_plain_matmul()
        if spec.batch_invariant:
            use_one_attention_tile()
        loader.use(weights)
        arguments = EngineArgs(
            model=spec.model,
            dtype=spec.dtype,  # pyright: ignore[reportArgumentType]
            max_model_len=spec.max_model_len,
            max_num_seqs=spec.max_num_seqs,
            kv_cache_memory_bytes=spec.kv_bytes,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=max(CHUNK, spec.max_num_seqs),
            load_format=loader.LOAD_FORMAT,
            worker_cls=f"{OwnedWorker.__module__}.{OwnedWorker.__name__}",
            logits_processors=[Rows],
            distributed_executor_backend="uni",
            enforce_eager=True,
            skip_tokenizer_init=True,
            async_scheduling=False,  # the sampler needs to know every token before the next
            seed=0,
        )
        config = arguments.create_engine_config()
        config.compilation_config.mode = CompilationMode.NONE
        with rendezvous():
            self._core = EngineCore(config, UniProcExecutor, log_stats=False)
        executor: Any = self._core.model_executor
        install(executor.driver_worker.worker.model_runner)
        if _arena is None:
            raise EngineError("vLLM made no KV allocation that could be found: version mismatch")
        self.arena = _arena
        self.sealing = self._make_sealing() if spec.adopt_sealed_blocks else None
        self.computed_tokens = 0
        self._count_computed(self._core.scheduler)
        self._made: dict[str, int] = {}  # tokens of each request's completion so far
        self._vocabulary = config.model_config.get_vocab_size()
        self._max_num_seqs = spec.max_num_seqs
        self._max_model_len = spec.max_model_len

    def _make_sealing(self) -> VllmSealing:
        executor: Any = self._core.model_executor
        runner = executor.driver_worker.worker.model_runner
        return VllmSealing(self._core.scheduler, KvBlocks(runner.kv_caches, self.arena), RowTap(runner))

    def _count_computed(self, scheduler: Any) -> None:
        schedule = scheduler.schedule

        def counted(*arguments: Any, **named: Any) -> Any:
            batch = schedule(*arguments, **named)
            self.computed_tokens += batch.total_num_scheduled_tokens
            return batch

        scheduler.schedule = counted

    def submit(self, work: Work) -> None:
        """Queue a request; what is known of its completion becomes part of the prefill."""
        sampling = work.sampling
        done = len(work.done_ids)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=sampling.max_tokens - done,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra_args(sampling, done),
        )
        request = EngineCoreRequest(
            request_id=work.id,
            prompt_token_ids=work.prompt_ids + work.done_ids,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self._made[work.id] = done
        self._core.add_request(*self._core.preprocess_add_request(request))
        if self.sealing is not None:
            self.sealing.want(work.id)

    def abort(self, ids: list[str]) -> None:
        for key in ids:
            self._made.pop(key, None)
        self._core.abort_requests(ids)

    @property
    def busy(self) -> bool:
        return self._core.scheduler.has_requests()

    @property
    def prefilling(self) -> bool:
        """Whether the next step has a prompt, or part of one, to work through."""
        scheduler: Any = self._core.scheduler
        return bool(scheduler.waiting) or any(
            request.num_computed_tokens + 1 < request.num_tokens for request in scheduler.running
        )

    def step(self) -> list[Chunk]:
        outputs, executed = self._core.step()
        self._core.post_step(executed)
        chunks: list[Chunk] = []
        for batch in outputs.values():
            for output in batch.outputs:
                reason = None
                if output.finish_reason is not None:
                    reason = _REASONS.get(output.finish_reason)
                    if reason is None:
                        raise EngineError(f"request {output.request_id} ended with {output.finish_reason}")
                logprobs: list[float] = []
                if output.new_logprobs is not None:
                    # column 0 is the sampled token
                    logprobs = output.new_logprobs.logprobs[:, 0].tolist()
                key, ids = output.request_id, list(output.new_token_ids)
                chunks.append(Chunk(key, self._made[key], ids, logprobs, reason))
                if reason is None:
                    self._made[key] += len(ids)
                else:
                    del self._made[key]
        return chunks

    def forget_prefixes(self) -> None:
        """Drop every cached prefix; requests in flight rebuild theirs, with the weights now in place."""
        if self.sealing is not None:
            self.sealing.forget()
        self._core.scheduler.reset_prefix_cache(reset_running_requests=True)

    def warm_up(self) -> None:
        """Run every kind of step on scratch memory: prefill and decode, greedy and sampled, small and full batch.

        It is about code paths and buffers, not about quantity: a few tokens per request do, for a shadow that is
        warming up takes processor time from the worker beside it.
        """
        for round_, count in enumerate((1, self._max_num_seqs)):
            for index in range(count):
                length = min((72, 6)[round_], self._max_model_len - 8)  # alone: several blocks
                prompt = [(7 * i + 13 * index + 1) % self._vocabulary for i in range(length)]
                kinds = (
                    Sampling(max_tokens=4, temperature=0.0),
                    Sampling(max_tokens=4, seed=index),
                    Sampling(max_tokens=4, seed=index, top_k=5, top_p=0.9, min_p=0.01),
                )
                self.submit(Work(f"warm-{round_}-{index}", prompt, [], kinds[index % 3]))
            while self.busy:
                self.step()
        self.forget_prefixes()


def build(spec: Spec, weights: OwnedWeights) -> VllmBackend:
    return VllmBackend(spec, weights)
