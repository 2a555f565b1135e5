"""transformers' continuous batching inside our worker process: the KV arena, the step, the requests.

transformers runs its loop in a thread of its own; here the worker's one thread calls the loop's parts: choose a batch,
run it, note what became of it. These are internals, checked against transformers 5.19; what is relied upon is looked
at when the backend is built, so that another version fails then and not later.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from belayer.engine._penalties import Penalties, penalised
from belayer.engine._wire import Chunk, Spec, Work
from belayer.engine.backends import bfloat16_linear, wide_linear
from belayer.engine.backends.owned_weights import OwnedWeights
from belayer.engine.backends.shared_prefixes import PrefillOrder
from belayer.engine.backends.transformers import attention, invariance, loader
from belayer.engine.memory import Region, Scratch, of
from belayer.engine.request import Sampling
from belayer.engine.sampler import choose
from belayer.errors import EngineError

PAGE = 16  # tokens; prefixes are shared in units of it
BATCH_TOKENS = 2048  # of one step; longer prompts are prefilled in parts


class _ArenaMode(TorchFunctionMode):
    """Gives transformers' one raw KV allocation an address range of ours instead of the heap."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self.regions: list[Region] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs.get("dtype") is torch.uint8 and len(args) == 1 and isinstance(args[0], int):
            region = of(self._device).reserve(args[0], Scratch.FOLDED)
            self.regions.append(region)
            return region.tensor()[: args[0]]
        return func(*args, **kwargs)


class _Request:
    """What transformers does not know of a request."""

    def __init__(self, work: Work) -> None:
        self.sampling = work.sampling
        self.prompt_tokens = len(work.prompt_ids)
        self.penalties: Penalties | None = None
        if penalised(work.sampling):
            self.penalties = Penalties(work.sampling, work.prompt_ids)
            self.penalties.extend(work.done_ids)


class TransformersBackend:
    """One model, one scheduler, one thread."""

    def __init__(self, spec: Spec, weights: OwnedWeights) -> None:
        logging.getLogger("transformers").setLevel(logging.WARNING)
        self._device = torch.device(spec.device, 0) if spec.device == "cuda" else torch.device(spec.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._invariant = spec.batch_invariant
        self._max_model_len = spec.max_model_len
        self._max_num_seqs = spec.max_num_seqs
        self._model: Any = loader.build(Path(spec.model), spec.dtype, self._device, weights)
        config = self._model.config.get_text_config()
        config._attn_implementation = attention.INVARIANT if self._invariant else attention.PLAIN
        if self._invariant:
            invariance.use_in(self._model)
        elif self._device.type == "cpu" and wide_linear.needed(self._model.dtype):
            bfloat16_linear.prepare()
            _use_wide_linear(self._model)
        manager = ContinuousBatchingManager(
            self._model,
            GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            ContinuousBatchingConfig(
                page_size=PAGE,
                num_blocks=_blocks(config, spec),
                max_batch_tokens=max(BATCH_TOKENS, _whole(spec.max_num_seqs, invariance.GPU_ROWS)),
                max_requests_per_batch=spec.max_num_seqs,
                max_memory_percent=1.0,  # the arena's size is ours to decide
                use_async_batching=False,  # the sampler needs to know every token before the next
                use_cuda_graph=False,
                auto_switch_to_flash=False,
                return_logprobs=True,
            ),
        )
        with _ArenaMode(spec.device) as mode:
            processor: Any = manager._create_batch_processor()
        if len(mode.regions) != 1:
            raise EngineError(f"transformers made {len(mode.regions)} KV allocations, not one: version mismatch")
        if set(processor.cache.cache_allocators) != {"full_attention"}:
            raise EngineError(
                "the transformers backend serves models with full attention in every layer",
                next_step='use engine.backend = "vllm"',
            )
        self.sealing = None  # blocks of a dead worker are always rebuilt here
        self._arena = mode.regions[0]
        self._manager = manager  # it must live as long as the processor
        self._processor = processor
        self._scheduler = processor.scheduler
        self._inputs = processor.inputs_and_outputs
        self._requests: dict[str, _Request] = {}
        self._order = PrefillOrder(PAGE)
        self._held: dict[str, RequestState] = {}  # not yet given to the scheduler
        self.computed_tokens = 0
        self._drawn: list[tuple[RequestState, int, float]] = []  # of the step that runs
        self._vocabulary: int = config.vocab_size
        runner = processor.model_runner
        if not all(hasattr(runner, name) for name in ("_sample", "maybe_pad_inputs", "pad_inputs")):
            raise EngineError("transformers' model runner has other parts than expected: version mismatch")
        runner._sample = self._sample
        if self._invariant:
            runner.pad_inputs = True
            runner.maybe_pad_inputs = self._pad

    @property
    def arena(self) -> Region:
        return self._arena

    def submit(self, work: Work) -> None:
        """Queue a request; what is known of its completion becomes part of the prefill."""
        tokens = work.prompt_ids + work.done_ids
        left = min(work.sampling.max_tokens - len(work.done_ids), self._max_model_len - len(tokens))
        state = RequestState(
            request_id=work.id,
            initial_tokens=tokens,
            max_new_tokens=left,
            eos_token_id=list(work.sampling.stop_token_ids),
        )
        self._requests[work.id] = _Request(work)
        self._hold(state)

    def _hold(self, state: RequestState) -> None:
        self._held[state.request_id] = state
        self._order.add(state.request_id, state.initial_tokens)

    def abort(self, ids: list[str]) -> None:
        known = [key for key in ids if self._requests.pop(key, None) is not None]
        for key in known:
            self._order.end(key)
            if self._held.pop(key, None) is None:
                self._scheduler.set_request_cancellation(key)
        if known:
            self._scheduler.clear_cancelled_requests()

    @property
    def busy(self) -> bool:
        return bool(self._held) or self._scheduler.has_pending_requests()

    @property
    def prefilling(self) -> bool:
        """Whether the next step has a prompt, or part of one, to work through."""
        active = self._scheduler.active_requests.values()
        waiting = bool(self._held) or bool(self._scheduler.waiting_requests)
        return waiting or any(s.status == RequestStatus.PREFILLING for s in active)

    @torch.inference_mode()
    def step(self) -> list[Chunk]:
        self._drawn = []
        for key in self._order.ready():
            self._scheduler.add_waiting_request(self._held.pop(key))
        if not self._processor.prepare_next_batch():
            return []
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # what was prepared there is read on transformers' own stream
        spans = self._spans()
        self.computed_tokens += spans[-1][1]
        attention.new_step(spans)
        self._processor._generation_step(self._model)
        self._processor.update_batch()
        chunks: list[Chunk] = []
        for state, token, logprob in self._drawn:
            request = self._requests[state.request_id]
            self._order.computed(state.request_id)
            start = len(state.initial_tokens) + len(state.generated_tokens) - 1 - request.prompt_tokens
            reason = None
            if state.status == RequestStatus.FINISHED:
                reason = "stop" if token in request.sampling.stop_token_ids else "length"
                del self._requests[state.request_id]
                self._order.end(state.request_id)
            elif request.penalties is not None:
                request.penalties.extend([token])
            chunks.append(Chunk(state.request_id, start, [token], [logprob], reason))
        while not self._processor.output_router.output_queue.empty():
            self._processor.output_router.output_queue.get_nowait()  # the same, once more
        return chunks

    def _spans(self) -> list[tuple[int, int, int, int]]:
        """Where the queries and the keys of each request of this step lie."""
        spans, first, key_first = [], 0, 0
        for future in self._inputs.requests_in_batch:
            last = first + future.query_length
            key_last = key_first + future.state.position_offset  # it counts this step's tokens already
            spans.append((first, last, key_first, key_last))
            first, key_first = last, key_last
        return spans

    def _pad(self, queries: int, keys: int, fast_path: bool) -> tuple[int, int]:
        """How long transformers shall make the batch; its own padding writes to pages that nobody reads."""
        return min(_whole(queries, invariance.rows_for(self._device)), self._processor.max_batch_tokens), keys

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """In place of transformers' sampling: the counter-based sampler, and logprobs of the unchanged distribution.

        `scores` are logits, float32 [1, rows, vocabulary]; the requests that get a token come first, in their order.
        """
        states = [future.state for future in self._inputs.requests_in_batch if future.has_new_token]
        if not states:
            return
        logits = scores[0, : len(states)]
        rows: list[tuple[int, Sampling, int]] = []
        penalties: dict[int, Penalties] = {}
        for row, state in enumerate(states):
            request = self._requests[state.request_id]
            rows.append(
                (row, request.sampling, len(state.initial_tokens) + len(state.generated_tokens) - request.prompt_tokens)
            )
            if request.penalties is not None:
                penalties[row] = request.penalties
        tokens = torch.tensor(choose(logits, rows, penalties), device=logits.device)
        logprobs = torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None])[:, 0]
        output_ids[0, : len(states)].copy_(tokens)
        output_ids[1, : len(states)].copy_(logprobs.view(torch.int32))
        self._drawn = list(zip(states, tokens.tolist(), logprobs.tolist(), strict=True))

    def forget_prefixes(self) -> None:
        """Drop every cached prefix; requests in flight rebuild theirs, with the weights now in place."""
        waiting = [self._scheduler.waiting_requests[key] for key in self._scheduler.waiting_requests_order]
        active = [state.create_equivalent_initial_request() for state in self._scheduler.active_requests.values()]
        self._scheduler.reset()
        self._processor.cache.reset()
        held, self._held, self._order = list(self._held.values()), {}, PrefillOrder(PAGE)
        for state in active + waiting + held:
            self._hold(state)

    def warm_up(self) -> None:
        """Run every kind of step on scratch memory: prefill and decode, greedy and sampled, small and full batch."""
        length = max(1, min(200, self._max_model_len - 8))
        kinds = (
            Sampling(max_tokens=4, temperature=0.0),
            Sampling(max_tokens=4, seed=1),
            Sampling(max_tokens=4, seed=2, top_k=5, top_p=0.9, min_p=0.01),
        )
        for round_, count in enumerate((1, self._max_num_seqs)):
            for index in range(count):
                tokens = length if index % 2 else min(40, length)
                prompt = [(7 * i + 13 * index + 1) % self._vocabulary for i in range(tokens)]
                self.submit(Work(f"warm-{round_}-{index}", prompt, [], kinds[index % 3]))
            while self.busy:
                self.step()
        self.forget_prefixes()


def _use_wide_linear(model: torch.nn.Module) -> None:
    """Compute linear layers of a processor without bfloat16 through float32."""

    def forward(module: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return wide_linear.linear_through_float32(flat, module.weight, module.bias).view(*x.shape[:-1], -1)

    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.forward = partial(forward, module)  # pyright: ignore[reportAttributeAccessIssue]


def _whole(count: int, of_: int) -> int:
    return -(-count // of_) * of_


def _blocks(config: Any, spec: Spec) -> int:
    """Blocks of `PAGE` tokens that fit into the arena, beside the two that padding is written to."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    block = 2 * config.num_hidden_layers * heads * size * getattr(torch, spec.dtype).itemsize * PAGE
    count = (spec.kv_bytes - 2 * math.lcm(block, 128)) // block
    needed = -(-spec.max_model_len // PAGE)
    if count < needed:
        raise EngineError(
            f"a KV arena of {spec.kv_bytes} bytes holds {max(0, count) * PAGE} tokens, "
            f"less than max_model_len {spec.max_model_len}",
            next_step=f"set engine.kv_bytes to {(needed + 2) * block} or more",
        )
    return count


def build(spec: Spec, weights: OwnedWeights) -> TransformersBackend:
    return TransformersBackend(spec, weights)
