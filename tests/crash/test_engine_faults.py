"""Real faults of real processes: not one token lost, repeated or changed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engine_kit import Journal, complete, engine_config, make_model, random_weights, requests

from belayer import events as ev
from belayer.engine import Engine, Sampling
from belayer.errors import RequestRefused, WeightsError
from belayer.ownership import RunLabel

pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the vLLM backend"),
]

COUNT = 5
STANDBY_S = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("engine") / "model")


class Watched:
    """An engine with its events, and the comparisons that every scenario makes."""

    def __init__(self, engine: Engine, events: list[ev.Event]) -> None:
        self.engine = engine
        self.events = events
        self.reference: Journal

    def last(self, kind: str) -> dict[str, Any]:
        return next(e for e in reversed(self.events) if e.kind == kind).data

    def count(self, kind: str) -> int:
        return sum(e.kind == kind for e in self.events)

    async def fault(self, position: int, action: Callable[[], None], reference: Journal | None = None) -> Journal:
        """Do `action` when every request has `position` tokens; the outcome must be that of the undisturbed run."""
        reference = reference or self.reference
        journal = Journal()
        journal.when_all_have(position, COUNT, action)
        before = self.count(ev.RECOVERED)
        await asyncio.wait_for(complete(self.engine, requests(COUNT), journal), STANDBY_S)
        assert journal.tokens == reference.tokens
        assert journal.logprobs == reference.logprobs  # to the bit: nothing depends on who computed it, nor beside what
        async with asyncio.timeout(STANDBY_S):
            while self.count(ev.RECOVERED) == before:  # a fast worker may have sent its last token before it died
                await asyncio.sleep(0.01)
        assert self.count(ev.RECOVERED) == before + 1
        return journal

    def kill(self, number: int = signal.SIGKILL) -> Callable[[], None]:
        def action() -> None:
            assert self.engine.worker_pid
            os.kill(self.engine.worker_pid, number)

        return action


def ev_sink(events: list[ev.Event]) -> ev.EventSink:
    """Keep events, and print them: pytest shows the print when the test fails."""
    began = time.monotonic()

    def sink(event: ev.Event) -> None:
        events.append(event)
        print(f"{time.monotonic() - began:7.2f} {event.kind} {event.subject} {event.data}", flush=True)

    return sink


@pytest.mark.timeout(900)  # about 70 s on a quiet machine
def test_every_fault_of_one_engine(model: Path) -> None:
    """One engine lives through everything; starting one for each fault would take minutes."""

    async def scenario() -> None:
        events: list[ev.Event] = []
        with RunLabel.new("test engine faults") as label:
            sink = ev_sink(events)
            engine = await Engine.start(engine_config(model, images=False), label, events=sink, policy_version=3)
            try:
                await live_through(Watched(engine, events))
            finally:
                await engine.close()
            assert not _labelled(label.name)

    async def live_through(watched: Watched) -> None:
        engine = watched.engine
        watched.reference = await complete(engine, requests(COUNT))
        assert all(len(tokens) == 40 for tokens in watched.reference.tokens.values())
        assert set(watched.reference.versions["r0"]) == {3}

        # alone, in any company and with the prefix cached: the same tokens and logprobs, bit for bit
        for request in requests(COUNT):
            alone = await complete(engine, [request])
            assert alone.tokens[request.id] == watched.reference.tokens[request.id]
            assert alone.logprobs[request.id] == watched.reference.logprobs[request.id]

        await resumed_at_every_position(watched)
        await refused(engine)
        await cancelled(watched)

        # killed by a signal, at the very first token
        await engine.wait_standby(STANDBY_S)
        first = engine.worker_generation
        assert first is not None
        await watched.fault(1, watched.kill())
        recovery = watched.last(ev.RECOVERED)
        assert recovery["how"] == "promotion" and recovery["fault"] == "worker.exit"
        assert recovery["total_s"] < 2.0
        assert {"fence_s", "health_s", "map_s", "prefill_s", "first_token_s"} <= recovery["phases"].keys()
        assert engine.worker_generation is not None and engine.worker_generation > first

        # nobody stands by yet: the half-started shadow becomes the worker
        await watched.fault(20, watched.kill(signal.SIGSEGV))
        assert watched.last(ev.RECOVERED)["how"] == "cold start"

        # stopped: alive, and silent
        await engine.wait_standby(STANDBY_S)
        await watched.fault(7, watched.kill(signal.SIGSTOP))
        assert watched.last(ev.RECOVERED)["fault"] == "worker.hang"
        assert watched.last(ev.RECOVERED)["how"] == "promotion"

        await new_weights(watched)
        await owner_dies(watched)
        await nursery_dies(watched)

    async def resumed_at_every_position(watched: Watched) -> None:
        for at in range(1, 40):
            work = requests(COUNT)
            journal = Journal()
            for request in work:
                request.resume_ids = watched.reference.tokens[request.id][:at]
                journal.tokens[request.id] = list(request.resume_ids)
            await complete(watched.engine, work, journal)
            assert journal.tokens == watched.reference.tokens, f"resumed at {at}"
        done = requests(1)[0]
        done.resume_ids = watched.reference.tokens[done.id]
        journal = Journal()
        journal.tokens[done.id] = list(done.resume_ids)
        assert await watched.engine.generate(done, journal) == "length"
        assert journal.tokens[done.id] == watched.reference.tokens[done.id]

    async def refused(engine: Engine) -> None:
        for change in (
            {"prompt_ids": []},
            {"prompt_ids": [1000]},
            {"prompt_ids": [-1]},
            {"prompt_ids": [1] * 512},
            {"sampling": Sampling(max_tokens=0)},
            {"sampling": Sampling(max_tokens=4, temperature=-1.0)},
            {"sampling": Sampling(max_tokens=4, top_p=0.0)},
            {"sampling": Sampling(max_tokens=4, temperature=1 << 64)},
            {"sampling": Sampling(max_tokens=4, stop_token_ids=(10**30,))},
            {"id": "\ud800"},  # cannot be written to a worker: not to this one, and not to the next
        ):
            request = requests(1)[0]
            for name, value in change.items():
                setattr(request, name, value)
            with pytest.raises(RequestRefused):
                await engine.generate(request, Journal())
        # a stop token ends it and is part of it
        request = requests(1)[0]
        tokens = (await complete(engine, [request])).tokens["r0"]
        request.sampling = Sampling(max_tokens=40, temperature=0.0, stop_token_ids=(tokens[5],))
        journal = Journal()
        assert await engine.generate(request, journal) == "stop"
        assert journal.tokens["r0"] == tokens[: tokens.index(tokens[5]) + 1]

    async def cancelled(watched: Watched) -> None:
        engine = watched.engine
        journal = Journal()
        task = asyncio.create_task(engine.generate(requests(1, max_tokens=400)[0], journal))
        while not journal.tokens:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        seen = len(journal.tokens["r0"])
        assert (await complete(engine, requests(COUNT))).tokens == watched.reference.tokens
        assert len(journal.tokens["r0"]) == seen

        class DiskFull(Exception):
            pass

        def sink(_chunk: object) -> None:
            raise DiskFull

        with pytest.raises(DiskFull):  # what the journal says comes out, and only that request ends
            await engine.generate(requests(1)[0], sink)
        assert (await complete(engine, requests(COUNT))).tokens == watched.reference.tokens

    async def new_weights(watched: Watched) -> None:
        engine = watched.engine
        with pytest.raises(WeightsError, match="no_such_tensor"):
            await engine.update_weights([("no_such_tensor", next(random_weights())[1])], 4)
        good = dict(random_weights(seed=1))
        # a source that breaks in the middle
        bad = [*list(good.items())[:5], ("model.norm.weight", good["lm_head.weight"])]
        with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
            await engine.update_weights(bad, 4)
        assert engine.policy_version == 3
        assert (await complete(engine, requests(COUNT))).tokens == watched.reference.tokens

        # the shadow dies: nobody notices, another one comes, and finds the weights that were committed meanwhile
        await engine.wait_standby(STANDBY_S)
        shadow = engine.shadow_pid
        assert shadow
        os.kill(shadow, signal.SIGKILL)
        assert (await complete(engine, requests(COUNT))).tokens == watched.reference.tokens
        epoch = await engine.update_weights(good.items(), 4)
        assert epoch.policy_version == engine.policy_version == 4
        changed = await complete(engine, requests(COUNT))
        assert changed.tokens != watched.reference.tokens
        assert {v for versions in changed.versions.values() for v in versions} == {4}
        await engine.wait_standby(STANDBY_S)
        assert engine.shadow_pid not in (shadow, engine.worker_pid)
        promoted = await watched.fault(9, watched.kill(), changed)
        assert watched.last(ev.RECOVERED)["how"] == "promotion"
        assert {v for versions in promoted.versions.values() for v in versions} == {4}

        # back to the first weights in the middle of requests: each token says which weights made it, and the KV of
        # the old weights is not used for the new
        work = requests(3, max_tokens=250)  # long enough for the update to arrive before the worker is through
        old = await complete(engine, work)
        journal = Journal()
        update: list[asyncio.Task[Any]] = []
        journal.when_all_have(
            5,
            len(work),
            lambda: update.append(asyncio.create_task(engine.update_weights(list(random_weights(seed=0)), 5))),
        )
        await complete(engine, work, journal)
        await update[0]
        for request in work:
            versions = journal.versions[request.id]
            assert versions == sorted(versions) and set(versions) == {4, 5}
            before = versions.index(5)
            assert journal.tokens[request.id][:before] == old.tokens[request.id][:before]
            request.resume_ids = journal.tokens[request.id][:before]
            again = Journal()
            again.tokens[request.id] = list(request.resume_ids)
            await complete(engine, [request], again)
            assert again.tokens[request.id] == journal.tokens[request.id]
        assert (await complete(engine, requests(COUNT))).tokens == watched.reference.tokens

    async def owner_dies(watched: Watched) -> None:
        engine = watched.engine
        owner, worker = engine.owner_pid, engine.worker_pid
        journal = Journal()
        journal.when_all_have(2, COUNT, lambda: os.kill(owner, signal.SIGKILL))
        await complete(engine, requests(COUNT), journal)
        assert journal.tokens == watched.reference.tokens
        assert engine.worker_pid == worker  # it served on
        await engine.wait_standby(STANDBY_S)
        assert engine.owner_pid != owner
        # the new owner is as good as the old one: promotion onto it, then new weights through it
        await watched.fault(4, watched.kill())
        assert watched.last(ev.RECOVERED)["how"] == "promotion"
        await engine.update_weights(list(random_weights(seed=1)), 6)
        await complete(engine, requests(COUNT))
        await engine.update_weights(list(random_weights(seed=0)), 7)
        assert (await complete(engine, requests(COUNT))).tokens == watched.reference.tokens

    async def nursery_dies(watched: Watched) -> None:
        engine = watched.engine
        await engine.wait_standby(STANDBY_S)
        nursery = _parent(engine.worker_pid or 0)
        await watched.fault(6, lambda: os.kill(nursery, signal.SIGKILL))  # worker and shadow end with it
        await engine.wait_standby(STANDBY_S)
        assert _parent(engine.worker_pid or 0) == _parent(engine.shadow_pid or 0) != nursery

    asyncio.run(scenario())


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _labelled(label: str) -> list[int]:
    """Processes that carry the label."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"BELAYER_RUN={label}".encode() in environment:
                found.append(int(entry.name))
    return found
