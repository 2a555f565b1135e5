"""What protection costs while nothing fails: tokens per second of Belayer's engine against vLLM alone.

Subject: owner, worker, standing shadow, the channel to the driver, the counter-based sampler, and every token in a
journal on disk before the driver goes on. Baselines, each in a process of its own that sleeps while it is not measured:

  vllm              the same vLLM with the same flags and kernels, its own weights and its own sampler, nothing else
  vllm_as_it_comes  the kernels that vLLM would choose by itself; they pack private copies of the weights

Every engine is started once. They run the same requests in turn, and the order is turned round from pair to pair, so
that whatever else the machine does meets all. Besides the wall time, which noise moves, each side's processor time is
compared: user and system seconds of all its processes. `_engine_phases.py` says where it goes.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from belayer.config import EngineConfig
from belayer.engine import Engine, GenerationRequest, Sampling, TokenChunk
from belayer.engine.exactness import is_exact
from belayer.engine.workers.child import environment
from belayer.errors import EngineError
from belayer.journal import Journal, records
from belayer.ownership import RunLabel

from ._engine_phases import phases
from ._eta import Eta
from ._models import Model, folder
from ._paired import compare, series
from ._plain_vllm import Batch, Done, One, Ready, Setup

PROMPT = 64
READY_S = 180.0
BATCH_S = 120.0
TARGET = 0.01


class Load(msgspec.Struct, frozen=True):
    """What is run: `requests` at a time, half of them greedy, of `tokens` each; that `pairs` times by each side."""

    model: str
    requests: int
    tokens: int
    pairs: int
    as_it_comes: bool = False


LOADS = {
    True: [Load("tiny", 8, 64, 10)],
    False: [Load("tiny", 8, 128, 20, as_it_comes=True), Load("mid", 4, 16, 10)],
}


def overhead(models: dict[str, Model], quick: bool) -> list[dict[str, Any]]:
    """One cell for each load, in the form of every bench."""
    return [asyncio.run(_measure(load, models[load.model])) for load in LOADS[quick]]


async def _measure(load: Load, model: Model) -> dict[str, Any]:
    config = EngineConfig(
        model=folder(model),
        dtype=model.dtype,  # pyright: ignore[reportArgumentType]
        max_model_len=model.max_model_len,
        max_num_seqs=max(load.requests, model.max_num_seqs),
        kv_bytes=model.kv_bytes,
        images=False,  # none is to be built while this is measured
    )
    with RunLabel.new("bench overhead") as label, tempfile.TemporaryDirectory(prefix="belayer-bench-") as name:
        logs = Path(name)
        async with AsyncExitStack() as stack:
            baselines = {"vllm": False} | ({"vllm_as_it_comes": True} if load.as_it_comes else {})
            plain = {
                side: await stack.enter_async_context(_plain(config, label, logs / f"{side}.log", as_it_comes=as_is))
                for side, as_is in baselines.items()
            }
            engine = await Engine.start(config, label, log_dir=logs / "subject")
            stack.push_async_callback(engine.close)
            journal = Journal(logs / "journal")
            stack.callback(journal.close)
            await engine.wait_standby(READY_S)
            return await _pairs(load, model, engine, journal, plain, is_exact(config))


async def _pairs(
    load: Load, model: Model, engine: Engine, journal: Journal, baselines: dict[str, Plain], exact: bool
) -> dict[str, Any]:
    subject: list[_Tape] = []
    others: dict[str, list[Done]] = {name: [] for name in baselines}
    checks = {"tokens_lost": 0, "tokens_changed": 0, "greedy_unlike_vllm": 0}
    await _subject(load, model, engine, journal, -1)  # all warm, and the prompts cached
    for baseline in baselines.values():
        await baseline.run(_work(load, model))
    eta = Eta(f"overhead of the engine, {load.model}", load.pairs)
    for number in range(load.pairs):
        sides = ["subject", *baselines]
        for side in sides if number % 2 else reversed(sides):
            if side == "subject":
                subject.append(await _subject(load, model, engine, journal, number))
            else:
                others[side].append(await baselines[side].run(_work(load, model)))
        tape = subject[-1]
        checks["tokens_lost"] += sum(load.tokens - len(ids) for ids in tape.tokens)
        if exact:
            checks["tokens_changed"] += _unlike(tape.tokens, subject[0].tokens)
            checks["greedy_unlike_vllm"] += _unlike(tape.tokens[::2], others["vllm"][-1].token_ids[::2])
        eta(f"{tape.wall_s / others['vllm'][-1].wall_s - 1:+.1%}")
    tokens = load.requests * load.tokens
    walls = [tape.wall_s for tape in subject]
    cpu = [sum(tape.cpu_s.values()) for tape in subject]
    found = {name: compare(walls, [done.wall_s for done in each], TARGET) for name, each in others.items()}
    found |= {
        f"{name}, processor time": compare(cpu, [done.cpu_s for done in each], TARGET) for name, each in others.items()
    }
    return {
        "workload": (
            f"failure-free: {load.model} ({model.parameters / 1e6:.0f}M {model.dtype}), {load.requests} x "
            f"{load.tokens} tokens, mixed, journal on disk"
        ),
        "model": load.model,
        "subject": series(walls) | {"tokens_per_s": tokens / statistics.median(walls)},
        "baselines": {
            name: series([done.wall_s for done in each])
            | {"tokens_per_s": tokens / statistics.median(done.wall_s for done in each)}
            for name, each in others.items()
        },
        "ratios": {
            name: statistics.median(done.wall_s / wall for done, wall in zip(each, walls, strict=True))
            for name, each in others.items()
        },
        "overhead": found,
        "cpu_s_per_token": {
            **{part: statistics.median(tape.cpu_s[part] for tape in subject) / tokens for part in subject[0].cpu_s},
            **{name: statistics.median(done.cpu_s for done in each) / tokens for name, each in others.items()},
        },
        "phases_us_per_token": _phases(load, model, subject, others["vllm"]),
        "checks": checks,
    }


def _phases(load: Load, model: Model, subject: list[_Tape], vllm: list[Done]) -> dict[str, float]:
    """Microseconds a token: what was counted in the pairs, and what parts take by themselves."""
    tokens = load.requests * load.tokens

    def median(values: list[float]) -> float:
        return statistics.median(values) / tokens * 1e6

    worker = [tape.cpu_s["worker"] - done.cpu_s for tape, done in zip(subject, vllm, strict=True)]
    return {
        "more wall time than vllm": median([t.wall_s - done.wall_s for t, done in zip(subject, vllm, strict=True)]),
        "more processor time of the worker than of vllm": median(worker),
        "processor time of driver": median([tape.cpu_s["driver"] for tape in subject]),
        "processor time of owner": median([tape.cpu_s["owner"] for tape in subject]),
        "processor time of shadow": median([tape.cpu_s["shadow"] for tape in subject]),
        "journal append": median([tape.journal_s for tape in subject]),
        "records of the journal, each": statistics.median(tape.journal_s / tape.records for tape in subject) * 1e6,
    } | phases(load.requests, model.vocabulary)


class _Tape:
    """A sink that journals as a rollout does, and keeps the tokens."""

    def __init__(self, journal: Journal, requests: list[GenerationRequest]) -> None:
        self._journal = journal
        self._asked = {one.id: f"generate {msgspec.json.encode(one.sampling).decode()}" for one in requests}
        self._index = {one.id: index for index, one in enumerate(requests)}
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.wall_s = 0.0
        self.journal_s = 0.0
        self.records = 0
        self.cpu_s: dict[str, float] = {}

    def __call__(self, chunk: TokenChunk) -> None:
        begun = time.perf_counter()
        self._journal.record(
            records.TokensAppended(
                rollout=chunk.request_id,
                call=0,
                source="model",
                ids=chunk.token_ids,
                logprobs=chunk.logprobs,
                weights_version=chunk.weights_version,
                asked=self._asked[chunk.request_id],
                finish=chunk.finish_reason or "",
            )
        )
        self.journal_s += time.perf_counter() - begun
        self.records += 1
        self.tokens[self._index[chunk.request_id]] += chunk.token_ids


async def _subject(load: Load, model: Model, engine: Engine, journal: Journal, number: int) -> _Tape:
    requests = [
        GenerationRequest(
            id=f"{number}-{index}",
            prompt_ids=one.prompt_ids,
            sampling=Sampling(max_tokens=one.max_tokens, temperature=one.temperature, seed=one.seed),
        )
        for index, one in enumerate(_work(load, model))
    ]
    for one in requests:
        journal.record(records.RolloutStarted(rollout=one.id, group="", task=None, seed=0))
    tape = _Tape(journal, requests)
    before = _cpu(engine)
    began = time.perf_counter()
    await asyncio.gather(*(engine.generate(one, tape) for one in requests))
    tape.wall_s = time.perf_counter() - began
    tape.cpu_s = {part: seconds - before[part] for part, seconds in _cpu(engine).items()}
    return tape


def _work(load: Load, model: Model) -> list[One]:
    return [
        One(
            [(7 * position + 131 * index) % model.vocabulary for position in range(PROMPT)],
            load.tokens,
            float(index % 2),
            index,
        )
        for index in range(load.requests)
    ]


class Plain:
    """A baseline's process, from the side of this one."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection

    async def ready(self) -> None:
        """Raises `EOFError` if it ends before."""
        await self._receive(Ready, READY_S)

    async def send(self, message: object) -> None:
        body = msgspec.msgpack.encode(message)
        await asyncio.get_running_loop().sock_sendall(self._connection, len(body).to_bytes(4, "little") + body)

    async def run(self, requests: list[One]) -> Done:
        await self.send(Batch(requests))
        return await self._receive(Done, BATCH_S)

    async def _receive(self, kind: type[Any], limit_s: float) -> Any:
        async with asyncio.timeout(limit_s):
            size = int.from_bytes(await self._exactly(4), "little")
            return msgspec.msgpack.decode(await self._exactly(size), type=kind)

    async def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            more = await asyncio.get_running_loop().sock_recv(self._connection, count - len(data))
            if not more:
                raise EOFError("the peer closed the connection")
            data += more
        return bytes(data)


@asynccontextmanager
async def _plain(config: EngineConfig, label: RunLabel, log: Path, *, as_it_comes: bool) -> AsyncIterator[Plain]:
    invariant = is_exact(config)
    env = environment(label, config.threads, invariant and not as_it_comes)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    program = Path(__file__).with_name("_plain_vllm.py")
    setup = Setup(
        model=str(config.model),
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_bytes=config.kv_bytes,
        batch_invariant=invariant,
        as_it_comes=as_it_comes,
    )
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(program), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # as workers are: kernels that schedule by session give each side the same share
        )
    theirs.close()
    whole = False
    try:
        plain = Plain(ours)
        await plain.send(setup)
        try:
            await plain.ready()
        except EOFError:
            lines = log.read_text(errors="replace").splitlines()[-12:]
            raise EngineError("the baseline ended before it was ready\n" + "\n".join(lines)) from None
        yield plain
        whole = True
    finally:
        ours.close()  # it ends by itself, but only after the batch that it is at
        if not whole:
            process.kill()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _cpu(engine: Engine) -> dict[str, float]:
    """Processor time so far of the driver (this process) and of the engine's processes."""
    assert engine.worker_pid is not None
    shadow = engine.shadow_pid
    return {
        "driver": time.process_time(),
        "worker": _cpu_s(engine.worker_pid),
        "owner": _cpu_s(engine.owner_pid),
        "shadow": 0.0 if shadow is None else _cpu_s(shadow),
    }


def _cpu_s(pid: int) -> float:
    """Processor time of another process, all its threads: its CPU clock, as clock_getcpuclockid(3) names it."""
    return time.clock_gettime((~pid << 3) | 2)


def _unlike(one: list[list[int]], other: list[list[int]]) -> int:
    return sum(a != b for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))
