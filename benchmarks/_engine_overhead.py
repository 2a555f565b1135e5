"""What protection costs while nothing fails: tokens per second of Belayer's engine against vLLM alone.

Subject: owner, worker, standing shadow, the channel to the driver, the counter-based sampler, and every token in a
journal on disk before the driver goes on. Baselines, each in a process of its own that sleeps while it is not measured:

  vllm              the same vLLM with the same flags and kernels, its own weights and its own sampler, nothing else
  vllm_as_it_comes  the kernels that vLLM would choose by itself; they pack private copies of the weights

Subject and baseline run the same requests in turn, and the order changes from pair to pair, so that whatever else the
machine does meets both. The overhead is the median over the pairs of (subject's time / baseline's time - 1), with the
interval that contains the true median with the stated confidence (order statistics of the sign test).
"""

from __future__ import annotations

import asyncio
import math
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from belayer.config import EngineConfig
from belayer.engine import Engine, GenerationRequest, Sampling, TokenChunk
from belayer.engine.workers.child import environment
from belayer.errors import EngineError
from belayer.journal import Journal, records
from belayer.ownership import RunLabel

from ._models import Model, folder
from ._plain_vllm import Batch, Done, One, Ready, Setup, receive, send

PROMPT = 64
READY_S = 180.0
TARGET = 0.01


class Load(msgspec.Struct, frozen=True):
    """What is run: `requests` at a time, half of them greedy, of `tokens` each; that `pairs` times by each side."""

    model: str
    requests: int
    tokens: int
    pairs: int


LOADS = {True: [Load("tiny", 8, 96, 10)], False: [Load("tiny", 8, 192, 20), Load("mid", 4, 24, 10)]}


def overhead(models: dict[str, Model], quick: bool) -> list[dict[str, Any]]:
    """One cell for each load, in the form of every bench."""
    return [asyncio.run(_measure(load, models[load.model], quick)) for load in LOADS[quick]]


async def _measure(load: Load, model: Model, quick: bool) -> dict[str, Any]:
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
        with _plain(config, label, logs / "vllm.log", as_it_comes=False) as vllm:
            engine = await Engine.start(config, label, log_dir=logs / "subject")
            journal = Journal(logs / "journal")
            try:
                await engine.wait_standby(READY_S)
                cell = await _pairs(load, model, engine, journal, {"vllm": vllm})
                if not quick:
                    with _plain(config, label, logs / "as-it-comes.log", as_it_comes=True) as other:
                        more = await _pairs(load, model, engine, journal, {"vllm_as_it_comes": other})
                    for part in ("baselines", "ratios", "overhead"):
                        cell[part] |= more[part]
            finally:
                journal.close()
                await engine.close()
    return cell


async def _pairs(
    load: Load, model: Model, engine: Engine, journal: Journal, baselines: dict[str, socket.socket]
) -> dict[str, Any]:
    subject: list[float] = []
    cpu: dict[str, list[float]] = {"driver": [], "worker": []} | {name: [] for name in baselines}
    others: dict[str, list[float]] = {name: [] for name in baselines}
    checks = {"tokens_lost": 0, "tokens_changed": 0, "greedy_unlike_vllm": 0}
    first: _Tape | None = None
    await _subject(load, model, engine, journal, -1)  # both warm, and the prompts cached
    for baseline in baselines.values():
        await _baseline(load, model, baseline)
    for number in range(load.pairs):
        tape: _Tape | None = None
        for side in ["subject", *baselines] if number % 2 else [*baselines, "subject"]:
            if side == "subject":
                tape = await _subject(load, model, engine, journal, number)
                subject.append(tape.wall_s)
                cpu["driver"].append(tape.driver_cpu_s)
                cpu["worker"].append(tape.worker_cpu_s)
            else:
                done = await _baseline(load, model, baselines[side])
                others[side].append(done.wall_s)
                cpu[side].append(done.cpu_s)
        assert tape is not None
        first = first or tape
        checks["tokens_lost"] += sum(load.tokens - len(ids) for ids in tape.tokens)
        if model.dtype == "float32":
            checks["tokens_changed"] += _unlike(tape.tokens, first.tokens)
            if "vllm" in baselines:
                checks["greedy_unlike_vllm"] += _unlike(tape.tokens[::2], done.token_ids[::2])
    tokens = load.requests * load.tokens
    return {
        "workload": (
            f"failure-free: {load.model} ({model.parameters / 1e6:.0f}M {model.dtype}), {load.requests} x "
            f"{load.tokens} tokens, mixed, journal on disk"
        ),
        "model": load.model,
        "subject": _series(subject) | {"tokens_per_s": tokens / statistics.median(subject)},
        "baselines": {n: _series(v) | {"tokens_per_s": tokens / statistics.median(v)} for n, v in others.items()},
        "ratios": {
            name: statistics.median(b / s for b, s in zip(values, subject, strict=True))
            for name, values in others.items()
        },
        "overhead": {name: compare(subject, values) for name, values in others.items()},
        "cpu_s_per_token": {side: statistics.median(values) / tokens for side, values in cpu.items()},
        "checks": checks,
    }


def compare(subject: list[float], baseline: list[float]) -> dict[str, Any]:
    """Median relative overhead over pairs, and an interval that holds the true one with `confidence` (>= 0.95)."""
    relative = sorted(s / b - 1 for s, b in zip(subject, baseline, strict=True))
    count = len(relative)
    # ranks k and count+1-k enclose the median unless fewer than k of `count` fair coins show one side
    rank, confidence = 1, 1 - 2 * 0.5**count
    for k in range(1, count // 2 + 1):
        inside = 1 - 2 * sum(math.comb(count, i) for i in range(k)) / 2**count
        if inside < 0.95:
            break
        rank, confidence = k, inside
    median = statistics.median(relative)
    low, high = relative[rank - 1], relative[count - rank]
    result = {"median": median, "low": low, "high": high, "confidence": confidence, "pairs": count}
    return result | {"target": TARGET, "within_target": median <= TARGET}


class _Tape:
    """A sink that journals as a rollout does, and keeps the tokens."""

    def __init__(self, journal: Journal, requests: list[GenerationRequest]) -> None:
        self._journal = journal
        self._asked = {one.id: f"generate {msgspec.json.encode(one.sampling).decode()}" for one in requests}
        self._index = {one.id: index for index, one in enumerate(requests)}
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.wall_s = 0.0
        self.driver_cpu_s = 0.0
        self.worker_cpu_s = 0.0

    def __call__(self, chunk: TokenChunk) -> None:
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
    assert engine.worker_pid is not None
    driver_cpu, worker_cpu = time.process_time(), _cpu_s(engine.worker_pid)
    began = time.perf_counter()
    await asyncio.gather(*(engine.generate(one, tape) for one in requests))
    tape.wall_s = time.perf_counter() - began
    tape.driver_cpu_s = time.process_time() - driver_cpu
    tape.worker_cpu_s = _cpu_s(engine.worker_pid) - worker_cpu
    return tape


async def _baseline(load: Load, model: Model, connection: socket.socket) -> Done:
    send(connection, Batch(_work(load, model)))
    done = await asyncio.to_thread(receive, connection, Done)
    assert isinstance(done, Done)
    return done


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


@contextmanager
def _plain(config: EngineConfig, label: RunLabel, log: Path, *, as_it_comes: bool) -> Iterator[socket.socket]:
    invariant = config.batch_invariant and config.dtype == "float32"
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
    try:
        ours.settimeout(READY_S)
        send(ours, setup)
        try:
            receive(ours, Ready)
        except EOFError:
            lines = log.read_text(errors="replace").splitlines()[-12:]
            raise EngineError("the baseline ended before it was ready\n" + "\n".join(lines)) from None
        yield ours
    finally:
        ours.close()  # it ends by itself
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _cpu_s(pid: int) -> float:
    """Processor time of another process, all its threads: its CPU clock, as clock_getcpuclockid(3) names it."""
    return time.clock_gettime((~pid << 3) | 2)


def _unlike(one: list[list[int]], other: list[list[int]]) -> int:
    return sum(a != b for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def _series(values: list[float]) -> dict[str, Any]:
    return {"median_s": statistics.median(values), "samples_s": values}
