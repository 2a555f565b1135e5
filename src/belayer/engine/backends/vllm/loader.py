"""vLLM's model loader on the owner's weights (`belayer.engine.backends.owned_weights`)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from belayer.engine.backends import bfloat16_linear, wide_linear
from belayer.engine.backends.owned_weights import OwnedWeights
from belayer.engine.backends.vllm import fused
from belayer.engine.backends.vllm.invariance import linear_for_any_batch
from belayer.errors import EngineError, WeightsError

LOAD_FORMAT = "belayer"

_current: OwnedWeights | None = None


def use(weights: OwnedWeights) -> None:
    """Name the `OwnedWeights` that the next model of this process is built on."""
    global _current
    _current = weights


@register_model_loader(LOAD_FORMAT)
class OwnerLoader(BaseModelLoader):
    """vLLM's hook: builds the model and hands it to `OwnedWeights`."""

    def download_model(self, model_config: Any) -> None:
        """Nothing to fetch: models are folders."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        raise WeightsError("weights change through the owner, never in place")

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        assert _current is not None
        disk = DefaultModelLoader(dataclasses.replace(self.load_config, load_format="auto"))
        with set_default_torch_dtype(model_config.dtype), torch.device("cpu"):
            model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
            _current.take(model, lambda: disk.get_all_weights(model_config, model))
            process_weights_after_loading(model, model_config, torch.device("cpu"))
        use_own_kernels(model, model_config.dtype, _current.batch_invariant)
        return model.eval()


def use_own_kernels(model: torch.nn.Module, dtype: torch.dtype, batch_invariant: bool) -> None:
    """Replace the norms of a built model, and its products where ours are exact in any batch, or much quicker."""
    fused.use_in(model)
    exact_bfloat16 = batch_invariant and dtype is torch.bfloat16  # promised by the driver, so it holds or is refused
    function: Any
    if exact_bfloat16 or wide_linear.needed(dtype):
        ready = bfloat16_linear.prepare()
        if exact_bfloat16 and not ready:
            raise EngineError("the kernel for bfloat16 that the driver could build cannot be loaded by the worker")
        function = wide_linear.linear_through_float32
    elif batch_invariant:
        function = linear_for_any_batch
    else:
        return
    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            weight: Any = module.weight
            if exact_bfloat16 and not bfloat16_linear.suits(weight[:1], weight):
                raise EngineError(
                    f"a product of {weight.shape[1]} features is not exact in bfloat16: they must be a multiple of 16",
                    next_step="set engine.batch_invariant = false; a resumed request may then differ in a token",
                )
            module.cpu_linear = function  # pyright: ignore[reportArgumentType]


def use_plain_matmul() -> None:
    """Keep vLLM from packing private copies of the weights, which no update of the owner's memory would reach."""
    import vllm._custom_ops as operators
    import vllm.model_executor.layers.utils as layers

    operators._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda *_: False
