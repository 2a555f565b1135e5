"""verl's own classes over a Belayer replica, in verl's Python: what test_adapter_verl.py runs.

python tests/contract/adapter_verl.py FOLDER [--ray]    (VERL_USE_EXTERNAL_MODULES=belayer.integrations.verl_rollout)

No trainer runs. Registries, configuration, replica, load balancer, both clients and the way of the weights are verl's.
Without --ray the two actors are objects of this process, reached by a handle of the same form: a start of Ray takes
longer than the test suite has for all of it. With --ray they are Ray's, and the replica launches its server itself.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import ray
from omegaconf import OmegaConf
from tests.engine_kit import make_model, random_weights
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.workers.config import RolloutConfig
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, GlobalRequestLoadBalancer, LLMServerClient
from verl.workers.rollout.replica import get_rollout_replica_class

PROMPTS = [[(7 * j + 31 * i) % 256 for j in range(9 + 20 * i)] for i in range(4)]


def rollout_config(**changes: Any) -> RolloutConfig:
    engine = {"kv_bytes": 32 << 20, "standby": "process", "images": False}
    settings = {
        "name": "belayer",
        "tensor_model_parallel_size": 1,
        "free_cache_engine": False,
        "prompt_length": 100,
        "response_length": 150,
        "dtype": "float32",
        "max_num_seqs": 8,
        "engine_kwargs": {"belayer": engine},
    }
    return RolloutConfig(**(settings | changes))


handles: list[Handle] = []


def by_number(number: int) -> Handle:
    return handles[number]


def copy(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


class Handle:
    """A handle of an object here that is called like Ray's of an actor: arguments and results are copies."""

    def __init__(self, target: Any) -> None:
        self._target = target
        handles.append(self)

    def __reduce__(self) -> Any:
        return by_number, (handles.index(self),)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = copy((args, kwargs))
            result = method(*args, **kwargs)
            return copy(await result if asyncio.iscoroutine(result) else result)

        return SimpleNamespace(remote=lambda *args, **kwargs: asyncio.ensure_future(call(*args, **kwargs)))


class Trainer:
    """Stands for verl's ActorRolloutRefWorker: the rollout of its process, and the naive checkpoint engine."""

    def __init__(self, config: RolloutConfig, model: Any) -> None:
        os.environ["RANK"] = "0"
        self.rollout = get_rollout_class(config.name)(config=config, model_config=model, device_mesh=None)
        self.engine = CheckpointEngineRegistry.new("naive", bucket_size=1 << 20)

    async def update_weights(self, seed: int, step: int, **kwargs: Any) -> None:
        self.engine.send_weights(random_weights(seed=seed))
        weights = self.engine.receive_weights(global_steps=step)
        await self.rollout.update_weights(weights, global_steps=step, **kwargs)
        await self.rollout.release()
        await self.rollout.resume(tags=["weights", "kv_cache"])


async def launched(config: RolloutConfig, model: Any, folder: Path, with_ray: bool) -> tuple[Any, Any, Any]:
    """The replica, its trainer's worker and the load balancer."""
    replica = get_rollout_replica_class("belayer")(0, config, model, 1)
    if with_ray:
        trainer = ray.remote(Trainer).options(num_cpus=0).remote(config, model)
        await replica.init_hybrid(SimpleNamespace(workers=[trainer], world_size=1))
        servers = {replica.server_address: replica.server_handle}
        return replica, trainer, ray.remote(GlobalRequestLoadBalancer).options(num_cpus=0).remote(servers=servers)
    from belayer.integrations.verl_rollout import BelayerServer

    server = Handle(BelayerServer(config, model, 0, str(folder / "runs/replica-0")))
    replica.servers, replica._server_handle = [server], server
    replica._server_address = await server.launch_server.remote()
    trainer = Trainer(config, model)
    trainer.rollout._handle = server
    return replica, Handle(trainer), Handle(GlobalRequestLoadBalancer({replica.server_address: server}))


async def main(folder: Path, with_ray: bool) -> None:
    model = SimpleNamespace(path=str(make_model(folder / "model")), local_path=None)
    config = rollout_config()
    for broken, word in (({"free_cache_engine": True}, "free_cache_engine"), ({"data_parallel_size": 2}, "one device")):
        refusing = get_rollout_replica_class("belayer")(0, rollout_config(**broken), model, 2)
        refused = await failure(refusing.init_hybrid(SimpleNamespace(workers=[], world_size=1)))
        assert word in refused, refused
    replica, trainer, balancer = await launched(config, model, folder, with_ray)
    await replica.sleep()
    await replica.wake_up()
    print("launched", replica.server_address, flush=True)
    whole = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "belayer", "response_length": 150}}})
    client = LLMServerClient(whole, balancer)
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}

    async def batch(using: Any = client) -> list[Any]:
        calls = [
            using.generate(f"sample-{i}", prompt_ids=prompt, sampling_params=params | {"seed": i, "ignore_eos": True})
            for i, prompt in enumerate(PROMPTS)
        ]
        return await asyncio.gather(*calls)

    # verl's first update is that of step 0
    await trainer.update_weights.remote(0, 0)
    calm = await batch()
    for output in calm:
        assert output.stop_reason == "completed" and len(output.token_ids) == len(output.log_probs) == 150, output
        assert output.extra_fields["global_steps"] == output.extra_fields["min_global_steps"] == 0

    # a worker dies while four completions are under way, and nobody notices
    await wait_standby(replica)
    struck = asyncio.create_task(batch())
    await until(replica, lambda state: state["in_flight"] == 4)
    await asyncio.sleep(0.1)
    state = await replica.server_handle.state.remote()
    assert state["in_flight"] == 4, "too late: nothing was under way any more"
    os.kill(state["worker"], signal.SIGKILL)
    survived = await struck
    after = await replica.server_handle.state.remote()
    assert after["worker"] != state["worker"]
    assert [o.token_ids for o in survived] == [o.token_ids for o in calm]
    assert [o.log_probs for o in survived] == [o.log_probs for o in calm]
    print("survived a kill", flush=True)

    # new weights of another step; tokens say which
    await trainer.update_weights.remote(1, 7)
    newer = await batch()
    assert all(o.extra_fields["global_steps"] == 7 for o in newer)
    assert [o.token_ids for o in newer] != [o.token_ids for o in calm]
    print("new weights", flush=True)

    # the partial rollout of verl's asynchronous trainers: aborted, new weights, gone on from there
    partial = FullyAsyncLLMServerClient(whole, balancer)
    running = asyncio.create_task(batch(partial))
    await until(replica, lambda state: state["in_flight"] == 4)
    aborted = await replica.abort_all_requests()
    assert aborted["aborted_count"] == 4 and len(aborted["request_ids"]) == 4
    await replica.release_kv_cache()
    await trainer.update_weights.remote(0, 8)
    await replica.resume_kv_cache()
    await replica.resume_generation()
    for output in await running:
        assert output.stop_reason == "length" and len(output.token_ids) == len(output.log_probs) == 150
        # those of the first part are told as well as those of the second
        assert output.extra_fields["max_global_steps"] == 8
    print("partial rollout", flush=True)

    # one request by its name
    handle = replica.server_handle
    call = handle.generate.remote(PROMPTS[0], dict(params, ignore_eos=True), "by-name")
    await until(replica, lambda state: state["in_flight"] == 1)
    assert (await replica.abort_request("by-name"))["aborted"] is True
    assert (await call).stop_reason == "aborted"
    assert (await replica.abort_request("by-name"))["aborted"] is False

    # what cannot be honoured is refused by name
    for bad, word in (({"logit_bias": {"1": 2.0}}, "logit_bias"), ({"prompt_logprobs": 2}, "prompts are not scored")):
        refused = await failure(handle.generate.remote(PROMPTS[0], params | bad, "refused"))
        assert word in refused, refused
    assert "context" in await failure(handle.generate.remote([1] * 260, dict(params), "long"))
    assert "lora.merge" in await failure(trainer.update_weights.remote(1, 9, peft_config={"r": 8}))

    # its OpenAI address, for agents that speak it
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        url = f"http://{replica.server_address}/v1/completions"
        answer = await http.post(url, json={"prompt": PROMPTS[0], "max_tokens": 5, "return_token_ids": True})
        assert len(answer.json()["choices"][0]["token_ids"]) == 5, answer.text
    folders = sorted((folder / "runs/replica-0/weights").iterdir())
    assert len(folders) == 2, folders
    await handle.shutdown.remote()
    print("all of it", flush=True)


async def failure(call: Any) -> str:
    """What it fails with."""
    try:
        await call
    except Exception as error:
        return str(error)
    raise AssertionError("it was not refused")


async def until(replica: Any, there: Any, timeout_s: float = 60) -> None:
    async with asyncio.timeout(timeout_s):
        while not there(await replica.server_handle.state.remote()):
            await asyncio.sleep(0.005)


async def wait_standby(replica: Any) -> None:
    await until(replica, lambda state: state["shadow"] is not None, 120)


if __name__ == "__main__":
    where, with_ray = Path(sys.argv[1]).absolute(), "--ray" in sys.argv
    os.environ["BELAYER_RUN_DIR"] = str(where / "runs")
    if with_ray:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        asyncio.run(main(where, with_ray))
    finally:
        if with_ray:
            ray.shutdown()
