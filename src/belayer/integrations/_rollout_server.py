"""A rollout server for trainers that call one by its methods: Belayer's engine behind a gateway, in one event loop.

Nothing of a trainer is imported here. `belayer.integrations.verl_rollout` makes it an actor of verl's.
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from belayer.config import Config
from belayer.gateway.dialects import vllm_order
from belayer.gateway.gateway import Gateway
from belayer.gateway.problems import Problem
from belayer.gateway.serving import opened_gateway
from belayer.gateway.settings import GatewaySettings
from belayer.gateway.upstream.own import WEIGHTS_FILE

_KEEP = 2  # folders of weights: what serves, and what an engine may be repaired from while that changes


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one request. `steps` are the trainer's step numbers of the weights of each token."""

    token_ids: list[int]
    logprobs: list[float]
    steps: list[int | None]
    finish: str


class RolloutServer:
    """One engine for one trainer's replica. `directory` becomes its run directory, and the weights are exchanged there.

    The trainer numbers its weights by its steps, and may send a step twice; policy versions count what was sent.
    """

    def __init__(self, config: Config, settings: GatewaySettings, directory: Path) -> None:
        self.directory = directory
        self.url = ""
        self.gateway: Gateway
        self._config = config
        self._settings = settings
        self._stack = AsyncExitStack()
        self._steps: dict[int, int | None] = {}
        self._folders = 0

    async def start(self) -> str:
        """Start the engine, with the model folder's weights; returns the URL. Raises what `belayer serve` would."""
        # the trainer sends its weights anew: those that a gateway of an earlier training served last are not asked for
        (self.directory / WEIGHTS_FILE).unlink(missing_ok=True)
        shutil.rmtree(self.directory / "weights", ignore_errors=True)
        opening = opened_gateway(self._config, self._settings, self.directory)
        self.url, self.gateway = await self._stack.enter_async_context(opening)
        return self.url

    async def close(self) -> None:
        await self._stack.aclose()

    @property
    def max_model_len(self) -> int:
        return self._config.engine.max_model_len

    @property
    def step(self) -> int | None:
        """The trainer's number of the weights that serve, None before it has sent any."""
        return self._steps.get(self.gateway.upstream.policy_version)

    async def generate(self, prompt_ids: list[int], params: dict[str, Any], name: str) -> Completion:
        """One completion; `params` are vLLM's sampling parameters and `name` is what `abort` knows it by.

        Raises `ValueError` for what cannot be honoured, and `BelayerError` where no worker can be had.
        """
        body = {"token_ids": prompt_ids, "request_id": name, "sampling_params": params}
        try:
            order = await vllm_order(body, self.gateway.served)
            (view,) = self.gateway.free(order)
        except Problem as problem:
            raise ValueError(problem.message) from None
        made = view.generation
        try:
            await made.wait()
        finally:
            self.gateway.runner.drop(made)
        steps = [self._steps.get(version) for version in made.versions]
        return Completion(token_ids=made.ids, logprobs=made.logprobs, steps=steps, finish=made.finish)

    async def abort(self, name: str | None = None) -> list[str]:
        """End one request where it is, or all; then nothing new begins until `resume`. Returns their names."""
        runner = self.gateway.runner
        under_way = [next(iter(made.names), "") for made in runner.under_way if name is None or name in made.names]
        if name is None:
            await runner.pause("abort")
        else:
            runner.abort_all(frozenset((name,)))
        return under_way

    def resume(self) -> None:
        self.gateway.runner.resume()

    async def drained(self, poll_s: float = 0.02) -> None:
        """Wait until no request is under way."""
        while self.gateway.runner.running:
            await asyncio.sleep(poll_s)

    def next_folder(self) -> Path:
        """Where the trainer's side writes weights, before `update_weights` is told of them. Another one every time."""
        self._folders += 1
        return self.directory / "weights" / f"{self._folders:08d}"

    async def update_weights(self, folder: Path, step: int | None) -> int:
        """Serve the weights in `folder` from the next token on. Returns their policy version.

        Raises `WeightsError` for a folder that cannot be served; the old weights serve on then.
        """
        version = self.gateway.upstream.policy_version + 1
        self._steps[version] = step
        try:
            await self.gateway.upstream.update_weights(folder, version)
        except BaseException:
            if self.gateway.upstream.policy_version != version:
                del self._steps[version]
            raise
        for old in sorted(self.directory.glob("weights/*"))[:-_KEEP]:
            await asyncio.to_thread(shutil.rmtree, old, True)
        return version


async def write_weights(folder: Path, weights: Any, bucket_bytes: int) -> int:
    """Write named tensors, from an iterator of either kind, as safetensors files of about `bucket_bytes` each.

    One bucket is in memory at a time. The folder is complete when this returns, and gone when it raises. Returns the
    number of tensors.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    bucket: dict[str, Any] = {}
    size = count = files = 0
    try:

        async def flush() -> None:
            nonlocal bucket, size, files
            if bucket:
                files += 1
                await asyncio.to_thread(save_file, bucket, folder / f"model-{files:05d}.safetensors")
                bucket, size = {}, 0

        async for name, tensor in _each(weights):
            # tied weights share their storage, which the format does not have
            bucket[name] = tensor.detach().to("cpu", copy=True).contiguous()
            size += bucket[name].nbytes
            count += 1
            if size >= bucket_bytes:
                await flush()
        await flush()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return count


async def _each(items: Any):
    if hasattr(items, "__aiter__"):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
