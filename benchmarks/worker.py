"""Worker recovery: SIGKILL of the serving worker with a shadow standing by, against a full engine cold start.

Subject: the time from the signal until every request in flight has its first token from the promoted shadow. The signal
is sent in the middle of decoding; a token that the dead worker had still sent does not count as recovered.

Baseline `cold_start`: an engine started from nothing (processes, imports, checkpoint, warm-up) and given the same
requests with the tokens they had at the moment of the kill, until every one of them has its next token: what a restart
costs when nothing but the engine is lost. It runs between two kills, so that the ratio holds on a noisy machine, and
while the shadow stands idle, so that it has the machine to itself.

Every run, killed or not, must deliver the tokens and the logprobs of the undisturbed run.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from belayer import events as ev
from belayer.config import EngineConfig
from belayer.engine import Engine, GenerationRequest, Sampling, TokenChunk
from belayer.ownership import RunLabel, cache_dir

VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER = 4096, 256, 6, 4, 2, 64, 512
MAX_TOKENS = 32
KILL_AT = 12  # tokens that every request has when the signal is sent
READY_S = 180.0
SAMPLES = 5
WORKLOADS = {True: [(4, 64)], False: [(1, 64), (8, 256), (4, 1024)]}  # quick: (requests, prompt tokens)


def bench(quick: bool) -> dict[str, Any]:
    """Run it; the result is in the form of every bench: cells with samples, medians, ratios and checks."""
    cells = asyncio.run(_bench(WORKLOADS[quick]))
    return {"ok": all(value == 0 for cell in cells for value in cell["checks"].values()), "cells": cells}


async def _bench(workloads: list[tuple[int, int]]) -> list[dict[str, Any]]:
    model = _model(cache_dir() / "models" / f"bench-tiny-{VOCABULARY}-{HIDDEN}-{LAYERS}")
    with RunLabel.new("bench worker") as label, tempfile.TemporaryDirectory(prefix="belayer-bench-") as logs:
        watch = _Watch()
        config = EngineConfig(model=model, max_num_seqs=8)
        engine = await Engine.start(config, label, events=watch, log_dir=Path(logs) / "subject")
        try:
            return [await _cell(engine, watch, config, Path(logs), *workload) for workload in workloads]
        finally:
            await engine.close()


async def _cold_start(config: EngineConfig, logs: Path, killed: _Tape, count: int, length: int) -> tuple[_Tape, float]:
    """Start an engine and finish the requests that `killed` had in flight; seconds until each has a token again."""
    requests = _requests(count, length)
    for request in requests:
        request.resume_ids = killed.tokens_at_kill[request.id]
    tape = _Tape(killed.tokens_at_kill, killed.logprobs_at_kill)
    with RunLabel.new("bench worker, cold start") as label:
        began = time.monotonic()
        engine = await Engine.start(config.model_copy(update={"standby": "none"}), label, log_dir=logs)
        try:
            await _run(engine, requests, tape)
        finally:
            await engine.close()
    return tape, max(tape.first.values()) - began


async def _cell(
    engine: Engine, watch: _Watch, config: EngineConfig, logs: Path, count: int, length: int
) -> dict[str, Any]:
    await engine.wait_standby(READY_S)
    reference = await _run(engine, _requests(count, length), _Tape())
    subject, cold, phases = [], [], []
    checks: Counter[str] = Counter()
    for sample in range(SAMPLES):
        await engine.wait_standby(READY_S)
        tape = _Tape(kill=engine)
        await _run(engine, _requests(count, length), tape)
        subject.append(max(tape.recovered.values()) - tape.killed_at)
        phases.append({"detect_s": watch.detected_at - tape.killed_at, **watch.phases})
        await engine.wait_standby(READY_S)  # the next shadow is up: the baseline has the machine to itself
        resumed, took_s = await _cold_start(config, logs / f"cold-{count}-{length}-{sample}", tape, count, length)
        cold.append(took_s)
        for one in (tape, resumed):
            checks.update(one.compare(reference))
    return {
        "workload": f"tiny Qwen3 (6M, fp32), {count} requests, prompts of {length} tokens",
        "subject": {
            "median_s": statistics.median(subject),
            "samples_s": subject,
            "phases_s": {name: statistics.median(p[name] for p in phases if name in p) for name in phases[0]},
        },
        "baselines": {"cold_start": {"median_s": statistics.median(cold), "samples_s": cold}},
        "ratios": {"cold_start": statistics.median(c / s for c, s in zip(cold, subject, strict=True))},
        "checks": dict(checks),
    }


class _Watch:
    """Takes the newest fault's detection and the newest recovery's phases from the engine's events."""

    def __init__(self) -> None:
        self.detected_at = 0.0
        self.phases: dict[str, float] = {}

    def __call__(self, event: ev.Event) -> None:
        if event.kind == ev.FAULT_DETECTED and event.subject == "worker":
            self.detected_at = time.monotonic()
        elif event.kind == ev.RECOVERED:
            self.phases = event.data["phases"]


class _Tape:
    """A sink that keeps every chunk with its time and, given an engine, kills its worker once on the way."""

    def __init__(
        self,
        tokens: dict[str, list[int]] | None = None,
        logprobs: dict[str, list[float]] | None = None,
        *,
        kill: Engine | None = None,
    ) -> None:
        self.tokens = {key: list(ids) for key, ids in (tokens or {}).items()}
        self.logprobs = {key: list(values) for key, values in (logprobs or {}).items()}
        self.first: dict[str, float] = {}
        self.killed_at = 0.0
        self.tokens_at_kill: dict[str, list[int]] = {}
        self.logprobs_at_kill: dict[str, list[float]] = {}
        self.recovered: dict[str, float] = {}  # first token from another generation than the killed one
        self.expected: list[str] = []
        self._duplicated = 0
        self._engine = kill
        self._victim: int | None = None

    def __call__(self, chunk: TokenChunk) -> None:
        now = time.monotonic()
        tokens = self.tokens.setdefault(chunk.request_id, [])
        self._duplicated += max(0, len(tokens) - chunk.start)
        tokens += chunk.token_ids
        self.logprobs.setdefault(chunk.request_id, []).extend(chunk.logprobs)
        self.first.setdefault(chunk.request_id, now)
        if self._engine is None:
            return
        if self._victim is None:
            if all(len(self.tokens.get(key, ())) >= KILL_AT for key in self.expected):
                self._kill(self._engine)
        elif self._engine.worker_generation != self._victim:
            self.recovered.setdefault(chunk.request_id, now)

    def _kill(self, engine: Engine) -> None:
        assert engine.worker_pid is not None
        self._victim = engine.worker_generation
        self.tokens_at_kill = {key: list(ids) for key, ids in self.tokens.items()}
        self.logprobs_at_kill = {key: list(values) for key, values in self.logprobs.items()}
        self.killed_at = time.monotonic()
        os.kill(engine.worker_pid, signal.SIGKILL)

    def compare(self, reference: _Tape) -> dict[str, int]:
        """How many tokens or logprobs differ from the undisturbed run, and how."""
        found = {"tokens_lost": 0, "tokens_duplicated": self._duplicated, "tokens_changed": 0, "logprobs_changed": 0}
        for key, wanted in reference.tokens.items():
            got = self.tokens.get(key, [])
            found["tokens_lost"] += max(0, len(wanted) - len(got))
            found["tokens_duplicated"] += max(0, len(got) - len(wanted))
            found["tokens_changed"] += sum(a != b for a, b in zip(wanted, got, strict=False))
            pairs = zip(reference.logprobs[key], self.logprobs.get(key, []), strict=False)
            found["logprobs_changed"] += sum(a != b for a, b in pairs)
        return found


async def _run(engine: Engine, requests: list[GenerationRequest], tape: _Tape) -> _Tape:
    tape.expected = [request.id for request in requests]
    await asyncio.gather(*(engine.generate(request, tape) for request in requests))
    return tape


def _requests(count: int, length: int) -> list[GenerationRequest]:
    """Half of them greedy, half sampled."""
    return [
        GenerationRequest(
            id=f"r{index}",
            prompt_ids=[(7 * position + 131 * index) % VOCABULARY for position in range(length)],
            sampling=Sampling(max_tokens=MAX_TOKENS, seed=index, temperature=float(index % 2)),
        )
        for index in range(count)
    ]


def _model(folder: Path) -> Path:
    """The model folder, made at first use."""
    if folder.is_dir():
        return folder
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix="unfinished-"))
    try:
        (unfinished / "config.json").write_text(json.dumps(config))
        save_file(dict(_weights()), unfinished / "model.safetensors")
        unfinished.rename(folder)
    except OSError:
        shutil.rmtree(unfinished)
        if not folder.is_dir():  # nobody else made it meanwhile either
            raise
    return folder


def _weights() -> Iterator[tuple[str, torch.Tensor]]:
    source = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn((rows, columns), generator=source) / math.sqrt(columns)

    yield "model.embed_tokens.weight", matrix(VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj.weight", matrix(HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.k_proj.weight", matrix(KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.v_proj.weight", matrix(KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", matrix(HIDDEN, HEADS * HEAD_DIM)
        yield f"{prefix}.self_attn.q_norm.weight", torch.ones(HEAD_DIM)
        yield f"{prefix}.self_attn.k_norm.weight", torch.ones(HEAD_DIM)
        yield f"{prefix}.mlp.gate_proj.weight", matrix(INNER, HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", matrix(INNER, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", matrix(HIDDEN, INNER)
        yield f"{prefix}.input_layernorm.weight", torch.ones(HIDDEN)
        yield f"{prefix}.post_attention_layernorm.weight", torch.ones(HIDDEN)
    yield "model.norm.weight", torch.ones(HIDDEN)
    yield "lm_head.weight", matrix(VOCABULARY, HIDDEN)
