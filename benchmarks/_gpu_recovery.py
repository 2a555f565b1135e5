"""Worker recovery on the transformers backend: kill -> next token of every request, against a cold start.

    python benchmarks/_gpu_recovery.py --size 1b --device cuda --json FILE --seconds 160

Random weights, bfloat16 (tiny: float32, where every token must be the undisturbed run's). A part of gpu_check.sh.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from belayer import events as ev
from belayer.config import EngineConfig
from belayer.engine import Engine, GenerationRequest, Sampling, TokenChunk
from belayer.ownership import RunLabel

# hidden, inner, layers, heads, kv heads, head size, vocabulary
SIZES = {
    "tiny": (256, 512, 4, 4, 2, 64, 4096),
    "1b": (2048, 8192, 16, 32, 8, 64, 65536),
    "3b": (3072, 8192, 28, 24, 8, 128, 65536),
    "8b": (4096, 12288, 36, 32, 8, 128, 65536),
}
WORKLOADS = ((1, 80), (4, 272), (16, 1024))
BEFORE, AFTER = 12, 12  # tokens of each completion before and after the kill
SAMPLES = 3

COLD = """
import importlib.util, sys, torch
from transformers import AutoModelForCausalLM
folder, device, count, length = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
straight = {"device_map": device} if importlib.util.find_spec("accelerate") else {}
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **straight).to(device).eval()
ids = torch.randint(0, 4000, (count, length), device=device)
with torch.inference_mode():
    print(model(ids, logits_to_keep=1).logits.argmax(-1).flatten().tolist()[:2])
"""


def make_model(size: str, folder: Path, device: str) -> int:
    """Write a Qwen3 folder with random weights; returns the number of parameters."""
    hidden, inner, layers, heads, kv_heads, head, vocabulary = SIZES[size]
    dtype = torch.float32 if size == "tiny" else torch.bfloat16
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    source = torch.Generator(device).manual_seed(0)
    count = 0

    def matrix(rows: int, columns: int) -> torch.Tensor:
        nonlocal count
        count += rows * columns
        return (torch.randn(rows, columns, generator=source, device=device) / columns**0.5).to(dtype).cpu()

    def ones(length: int) -> torch.Tensor:
        return torch.ones(length, dtype=dtype)

    ends = {"model.embed_tokens.weight": matrix(vocabulary, hidden), "lm_head.weight": matrix(vocabulary, hidden)}
    save_file(ends | {"model.norm.weight": ones(hidden)}, folder / "model-ends.safetensors")
    for layer in range(layers):
        name = f"model.layers.{layer}"
        tensors = {
            f"{name}.self_attn.q_proj.weight": matrix(heads * head, hidden),
            f"{name}.self_attn.k_proj.weight": matrix(kv_heads * head, hidden),
            f"{name}.self_attn.v_proj.weight": matrix(kv_heads * head, hidden),
            f"{name}.self_attn.o_proj.weight": matrix(hidden, heads * head),
            f"{name}.self_attn.q_norm.weight": ones(head),
            f"{name}.self_attn.k_norm.weight": ones(head),
            f"{name}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.down_proj.weight": matrix(hidden, inner),
            f"{name}.input_layernorm.weight": ones(hidden),
            f"{name}.post_attention_layernorm.weight": ones(hidden),
        }
        save_file(tensors, folder / f"model-{layer:03}.safetensors")
    # a plain loader finds shards by their index
    names: dict[str, str] = {}
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as content:
            names |= dict.fromkeys(content.keys(), file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return count


class Tape:
    """What came of some requests, and when each got its token number `BEFORE`."""

    def __init__(self, count: int, kill: Any = None) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.resumed: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self.gaps = 0
        self.killed_at = 0.0
        self.noticed = False  # what was on its way before the death is noticed still arrives, and is nobody's recovery
        self._count = count
        self._kill = kill

    def __call__(self, chunk: TokenChunk) -> None:
        now = time.monotonic()
        tokens = self.tokens.setdefault(chunk.request_id, [])
        self.gaps += chunk.start != len(tokens)
        tokens += chunk.token_ids
        self.first.setdefault(chunk.request_id, now)
        if self.noticed:
            self.resumed.setdefault(chunk.request_id, now)
        elif (
            self._kill
            and not self.killed_at
            and len(self.tokens) == self._count
            and min(map(len, self.tokens.values())) >= BEFORE
        ):
            self.killed_at = time.monotonic()
            self._kill()


def requests(count: int, length: int, seed: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            id=f"{seed}-{i}",
            prompt_ids=[(7 * j + 31 * i + 101 * seed) % 4000 for j in range(length - BEFORE)],
            sampling=Sampling(max_tokens=BEFORE + AFTER, temperature=0.0 if i % 2 else 1.0, seed=i),
        )
        for i in range(count)
    ]


async def complete(engine: Engine, work: list[GenerationRequest], tape: Tape) -> Tape:
    await asyncio.wait_for(asyncio.gather(*(engine.generate(one, tape) for one in work)), 60)
    return tape


class Events(list[ev.Event]):
    """What the engine reports; tells the tape that runs when a death is noticed."""

    tape: Tape | None = None

    def sink(self, event: ev.Event) -> None:
        self.append(event)
        if event.kind == ev.FAULT_DETECTED and self.tape is not None and self.tape.killed_at:
            self.tape.noticed = True


async def recover(engine: Engine, events: Events, count: int, length: int, seed: int, exact: bool):
    """One kill: seconds until every request had its next token, the phases, and what must be zero."""
    await engine.wait_standby(60)

    def kill() -> None:
        assert engine.worker_pid
        os.kill(engine.worker_pid, signal.SIGKILL)

    work = requests(count, length, seed)
    seen = len(events)
    events.tape = Tape(count, kill)
    tape = await complete(engine, work, events.tape)
    async with asyncio.timeout(20):
        while not (found := [e for e in events[seen:] if e.kind == ev.RECOVERED]):
            await asyncio.sleep(0.005)
    checks = {
        "tokens lost": sum(max(0, BEFORE + AFTER - len(tokens)) for tokens in tape.tokens.values()),
        "gaps or repetitions": tape.gaps,
        "not a promotion": int(found[-1].data["how"] != "promotion"),
    }
    if exact:
        again = await complete(engine, work, Tape(count))
        checks["tokens changed"] = sum(
            a != b for key in tape.tokens for a, b in zip(tape.tokens[key], again.tokens[key], strict=True)
        )
    return max(tape.resumed.values()) - tape.killed_at, found[-1].data["phases"], checks


async def floor(engine: Engine, count: int, length: int, seed: int) -> float:
    """Seconds of nothing but prefill: prompts of `length` that no cache knows, until every request has a token."""
    work = requests(count, length + BEFORE, seed)
    began = time.monotonic()
    tape = await complete(engine, work, Tape(count))
    return max(tape.first.values()) - began


def cold(folder: Path, device: str, count: int, length: int, limit_s: float) -> float:
    """Seconds of a plain cold start: a new interpreter, imports, weights, a forward pass."""
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-c", COLD, str(folder), device, str(count), str(length)],
        check=True,
        timeout=limit_s,
        stdout=subprocess.DEVNULL,
    )
    return time.monotonic() - began


async def bench(
    size: str, device: str, folder: Path, label: RunLabel, until: float, save: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    exact = size == "tiny"
    workloads = WORKLOADS if device == "cuda" else WORKLOADS[:2]
    events = Events()
    config = EngineConfig(
        backend="transformers",
        device=device,  # pyright: ignore[reportArgumentType]
        model=folder,
        dtype="float32" if exact else "bfloat16",
        max_model_len=2048,
        max_num_seqs=16,
        kv_bytes=(128 << 20) if size == "tiny" else (8 << 30),
        hang_s=20.0,
        start_timeout_s=150.0,
    )
    cells = []
    began = time.monotonic()
    engine = await Engine.start(config, label, events=events.sink)
    print(f"engine up in {time.monotonic() - began:.1f} s", flush=True)
    try:
        await engine.wait_standby(120)
        for number, (count, length) in enumerate(workloads):
            samples, floors, colds, phases = [], [], [], []
            checks: dict[str, int] = {}
            for sample in range(SAMPLES):
                if time.monotonic() > until and samples:
                    break
                seed = 10 * number + sample
                seconds, parts, found = await recover(engine, events, count, length, seed, exact)
                samples.append(seconds)
                phases.append(parts)
                checks = {key: checks.get(key, 0) + value for key, value in found.items()}
                await engine.wait_standby(60)
                floors.append(await floor(engine, count, length, 1000 + seed))
                if sample == 0 or time.monotonic() < until - 60:
                    colds.append(await asyncio.to_thread(cold, folder, device, count, length, 120.0))
                print(
                    f"{count} x {length}: {seconds:.4f} s, floor {floors[-1]:.4f} s, cold {colds[-1]:.2f} s", flush=True
                )
            names = sorted(set().union(*phases))
            cells.append(
                {
                    "workload": f"{size}, {count} x {length}",
                    "subject": {
                        "median_s": statistics.median(samples),
                        "samples_s": samples,
                        "phases_s": {n: statistics.median(p.get(n, 0.0) for p in phases) for n in names},
                    },
                    "baselines": {
                        "cold start": {"median_s": statistics.median(colds), "samples_s": colds},
                        "prefill floor": {"median_s": statistics.median(floors), "samples_s": floors},
                    },
                    "ratios": {
                        "cold start": statistics.median(colds) / statistics.median(samples),
                        "prefill floor": statistics.median(floors) / statistics.median(samples),
                    },
                    "checks": checks,
                }
            )
            save(cells)  # the next one may not end
    finally:
        await engine.close()
    return cells


def print_logs(label: RunLabel) -> None:
    """What the engine's processes said; the label's folder goes away."""
    for log in sorted((label.dir / "engine").glob("*.log")):
        text = log.read_text(errors="replace")
        if text.strip():
            print(f"-- {log.name}\n{text[-1500:]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=tuple(SIZES), required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=160.0)
    options = parser.parse_args()
    until = time.monotonic() + options.seconds * 0.6
    parameters = 0

    def save(cells: list[dict[str, Any]], ok: bool = False) -> None:
        options.json.write_text(json.dumps({"parameters": parameters, "cells": cells, "ok": ok}))

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is closed
    with RunLabel.new("gpu recovery") as label:
        disk = None
        base = label.shm
        if shutil.disk_usage(base).free < 24 << 30 and options.size != "tiny":
            disk = base = Path(tempfile.mkdtemp(prefix="belayer-gpu-"))
        try:
            began = time.monotonic()
            parameters = make_model(options.size, base / "model", options.device)
            if options.device == "cuda":
                torch.cuda.empty_cache()
            print(f"{parameters / 1e9:.2f}B parameters in {time.monotonic() - began:.1f} s at {base}", flush=True)
            cells = asyncio.run(bench(options.size, options.device, base / "model", label, until, save))
        finally:
            print_logs(label)
            shutil.rmtree(base / "model", ignore_errors=True)
            if disk is not None:
                shutil.rmtree(disk, ignore_errors=True)
    ok = all(not any(cell["checks"].values()) for cell in cells)
    save(cells, ok)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
