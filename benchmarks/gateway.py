"""Clients stream through the gateway while the engine's worker is killed, a hundred times: what do they notice?

Four clients keep streams open, every second one in a session, over real HTTP. Whenever a shadow stands by and a stream
has tokens, the worker is killed (SIGKILL). Every completion is compared, token by token and logprob by logprob, with
what the undisturbed engine said to the same request (float32); at the end the journal of all sessions is verified.
Before that, the time that the gateway adds: the same request by HTTP and by a call of the engine, in turns.

`--kills N` kills N times (100; quick: 10), `--seed S` others.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import statistics
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console

from belayer.config import EngineConfig
from belayer.engine import GenerationRequest, Sampling, TokenChunk
from belayer.gateway import Gateway, GatewaySettings
from belayer.gateway.serving import listening
from belayer.gateway.text import Text
from belayer.gateway.upstream.own import OwnEngine
from belayer.journal import Journal
from belayer.ownership import RunLabel
from belayer.verify import verify_run

from ._models import Model, folder

KILLS = {True: 10, False: 100}
PAIRS = {True: 10, False: 40}
CLIENTS = 4
TOKENS = 160
REQUESTS = 8
STANDBY_S = 180.0
STALL_S = 120.0  # a stream that is silent for so long is hung
WRONG = ("errors", "lost", "duplicated", "changed", "logprobs_changed", "hung")
SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.02, "repetition_penalty": 1.1},
)

_console = Console(highlight=False, soft_wrap=True)


class Told(msgspec.Struct):
    """What a client got of one completion. `gap_s` is the longest silence between two of its tokens."""

    ids: list[int] = []
    logprobs: list[float] = []
    finish: str = ""
    done: bool = False
    error: str = ""
    gap_s: float = 0.0
    first_s: float = 0.0


def bench(quick: bool, kills: int | None = None, seed: int = 0) -> dict[str, Any]:
    """Run the campaign; the result is in the form of every bench."""
    return asyncio.run(_bench(quick, kills or KILLS[quick], seed))


async def _bench(quick: bool, kills: int, seed: int) -> dict[str, Any]:
    plan = tomllib.loads((Path(__file__).parent / "workloads" / "faults.toml").read_text())
    model = msgspec.convert(plan["model"], Model)
    config = EngineConfig(
        model=folder(model),
        max_model_len=model.max_model_len,
        max_num_seqs=model.max_num_seqs,
        kv_bytes=model.kv_bytes,
        threads=1,
        images=not quick,
    )
    async with AsyncExitStack() as stack:
        run = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="belayer-bench-gateway-")))
        label = stack.enter_context(RunLabel.new("bench gateway"))
        upstream = await OwnEngine.start(config, label, run)
        stack.push_async_callback(upstream.close)
        journal = Journal(run / "journal")
        stack.callback(journal.close)
        gateway = Gateway(upstream, Text(None), journal, GatewaySettings(port=0, heartbeat_s=0.5))
        url = await stack.enter_async_context(listening(gateway))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=STALL_S, trust_env=False))
        campaign = _Campaign(upstream, client, seed)
        await campaign.learn()
        latency = await campaign.latency(PAIRS[quick])
        await campaign.strike(kills)
        gateway.upstream.check()
        verdict = verify_run(run)
    counts = campaign.counts
    result: dict[str, Any] = {
        "cells": latency,
        "seed": seed,
        "kills": counts["kills"],
        "streams": counts["streams"],
        "tokens": counts["tokens"],
        "struck_streams": len(campaign.gaps),
        "gap_s": statistics.median(campaign.gaps) if campaign.gaps else 0.0,
        "gap_max_s": max(campaign.gaps, default=0.0),
        "sessions_verified": verdict.rollouts,
        "sessions_inconsistent": len(verdict.findings),
        "samples": campaign.samples,
        **{name: counts[name] for name in WRONG},
    }
    verified = verdict.consistent and verdict.rollouts > 0
    result["ok"] = counts["kills"] == kills and verified and not any(counts[name] for name in WRONG)
    return result


class _Campaign:
    def __init__(self, upstream: OwnEngine, client: httpx.AsyncClient, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.gaps: list[float] = []
        self.samples: list[str] = []
        self._upstream = upstream
        self._client = client
        self._random = random.Random(seed)
        self._requests = [self._request(number) for number in range(REQUESTS)]
        self._calm: list[Told] = []
        self._open: dict[int, Told] = {}
        self._numbers = itertools.count()
        self._over = False

    def _request(self, number: int) -> dict[str, Any]:
        prompt = [self._random.randrange(1000) for _ in range(self._random.choice((12, 40, 130)))]
        return {"prompt": prompt, "max_tokens": TOKENS, "seed": number, **SAMPLINGS[number % len(SAMPLINGS)]}

    async def learn(self) -> None:
        """What the undisturbed engine says, called directly."""
        self._calm = [await self._direct(request) for request in self._requests]

    async def _direct(self, request: dict[str, Any]) -> Told:
        told = Told()
        began = time.monotonic()

        def take(chunk: TokenChunk) -> None:
            told.first_s = told.first_s or time.monotonic() - began
            told.ids = told.ids + chunk.token_ids
            told.logprobs = told.logprobs + chunk.logprobs

        sampling = Sampling(**{key: value for key, value in request.items() if key != "prompt"})
        name = f"direct-{next(self._numbers)}"
        ask = GenerationRequest(id=name, prompt_ids=request["prompt"], sampling=sampling)
        told.finish = await self._upstream.generate(ask, take)
        told.done = True
        return told

    # -- time ----------------------------------------------------------------------------------------------------------
    async def latency(self, pairs: int) -> list[dict[str, Any]]:
        """First token and whole answer of one short request, by HTTP and by a call, in turns."""
        names = ("first http", "first call", "all http", "all call", "cpu http", "cpu call")
        times: dict[str, list[float]] = {name: [] for name in names}
        for number in range(pairs):
            request = self._requests[number % REQUESTS] | {"max_tokens": 32}
            for way in ("http", "call") if number % 2 else ("call", "http"):
                began, cpu = time.monotonic(), time.process_time()
                told = await (self._direct(request) if way == "call" else self._stream(request, "", Told()))
                times[f"all {way}"].append(time.monotonic() - began)
                times[f"cpu {way}"].append(time.process_time() - cpu)
                times[f"first {way}"].append(told.first_s)
        cells = []
        workloads = {
            "first": "time to first token",
            "all": "whole completion of 32 tokens",
            # of this process (engine's driver, gateway, client); unlike the others it does not depend on the load
            "cpu": "processor time of a completion of 32 tokens, its client's included",
        }
        for what, name in workloads.items():
            http, call = times[f"{what} http"], times[f"{what} call"]
            medians = statistics.median(http), statistics.median(call)
            baseline = {"median_s": medians[1], "samples_s": call}
            cells.append(
                {
                    "workload": name,
                    "subject": {"median_s": medians[0], "samples_s": http},
                    "baselines": {"engine called directly": baseline},
                    "ratios": {"engine called directly": medians[1] / medians[0]},
                    "added_s": statistics.median(h - c for h, c in zip(http, call, strict=True)),
                    "checks": {"pairs": pairs},
                }
            )
        return cells

    # -- kills ---------------------------------------------------------------------------------------------------------
    async def strike(self, kills: int) -> None:
        """Kill the worker `kills` times while the clients stream."""
        clients = [asyncio.create_task(self._client_loop(number)) for number in range(CLIENTS)]
        try:
            while self.counts["kills"] < kills and not any(task.done() for task in clients):
                await self._upstream.engine.wait_standby(STANDBY_S)
                await asyncio.sleep(self._random.uniform(0.0, 0.3))
                under_way = [told for told in self._open.values() if 0 < len(told.ids) < TOKENS]
                pid = self._upstream.engine.worker_pid
                if pid is None or not under_way:
                    await asyncio.sleep(0.005)
                    continue
                os.kill(pid, signal.SIGKILL)
                for told in under_way:
                    told.error = told.error or "struck"  # so that its silence is counted as a recovery's
                self.counts["kills"] += 1
                if self.counts["kills"] % 10 == 0:
                    _console.print(f"{self.counts['kills']} kills, {self.counts['streams']} streams compared")
                while self._upstream.engine.worker_pid in (pid, None):
                    await asyncio.sleep(0.002)
        finally:
            self._over = True
            await asyncio.gather(*clients)

    async def _client_loop(self, number: int) -> None:
        for turn in itertools.count(number):
            if self._over:
                return
            which = self._random.randrange(REQUESTS)
            where = f"/sessions/c{number}-{turn}" if turn % 2 else ""
            told = self._open[number] = Told()
            try:
                async with asyncio.timeout(STALL_S):
                    await self._stream(self._requests[which], where, told)
            except TimeoutError:
                self.counts["hung"] += 1
            except httpx.HTTPError as error:
                told.error = f"{type(error).__name__}: {error}"
                self.counts["errors"] += 1
            finally:
                del self._open[number]
            self._judge(told, self._calm[which])
            if where and told.done:
                (await self._client.post(f"{where}/finish", json={"reward": 0.0})).raise_for_status()

    async def _stream(self, request: dict[str, Any], where: str, told: Told) -> Told:
        body = request | {"stream": True, "return_token_ids": True, "logprobs": 0}
        began = last = time.monotonic()
        async with self._client.stream("POST", f"{where}/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise httpx.HTTPError(f"status {response.status_code}: {(await response.aread())[:200]!r}")
            async for choice in _choices(response, told):
                now = time.monotonic()
                told.first_s = told.first_s or now - began
                told.gap_s, last = max(told.gap_s, now - last), now
                told.ids = told.ids + choice["token_ids"]
                told.logprobs = told.logprobs + choice["logprobs"]["token_logprobs"]
                told.finish = choice["finish_reason"] or ""
        return told

    def _judge(self, told: Told, calm: Told) -> None:
        self.counts["streams"] += 1
        self.counts["tokens"] += len(told.ids)
        if told.error == "struck":
            self.gaps.append(told.gap_s)
        missing = len(calm.ids) - len(told.ids)
        self.counts["lost"] += max(missing, 0) or int(not told.done or told.finish != calm.finish)
        self.counts["duplicated"] += max(-missing, 0)
        changed = sum(a != b for a, b in zip(told.ids, calm.ids, strict=False))
        self.counts["changed"] += changed
        self.counts["logprobs_changed"] += sum(a != b for a, b in zip(told.logprobs, calm.logprobs, strict=False))
        if (changed or missing or not told.done) and len(self.samples) < 20:
            self.samples.append(f"{len(told.ids)} of {len(calm.ids)} tokens, {changed} changed: {told.error}")


async def _choices(response: httpx.Response, told: Told) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            told.done = True
        elif line.startswith("data: "):
            event = msgspec.json.decode(line[6:])
            if "error" in event:
                raise httpx.HTTPError(f"error event: {event['error']}")
            for choice in event["choices"]:
                yield choice


def show(result: dict[str, Any], console: Console) -> None:
    """Print what the clients noticed."""
    for cell in result["cells"]:
        console.print(f"{cell['workload']}: the gateway adds {cell['added_s'] * 1e3:.2f} ms (median of pairs)")
    console.print(
        f"{result['kills']} kills of the worker: {result['streams']} streams, {result['tokens']} tokens compared; "
        + ", ".join(f"{result[name]} {name.replace('_', ' ')}" for name in WRONG)
    )
    console.print(
        f"longest silence of a struck stream: median {result['gap_s'] * 1e3:.0f} ms, "
        f"longest {result['gap_max_s']:.2f} s ({result['struck_streams']} streams); "
        f"{result['sessions_verified']} rollouts verified, {result['sessions_inconsistent']} inconsistent"
    )
    for sample in result["samples"]:
        console.print(f"  {sample}")
