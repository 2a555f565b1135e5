"""Weights under fire: damaged in memory, updates cut off at every point, silent owners, versions that meet."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.engine_kit import Journal, complete, engine_config, make_model, random_weights, requests

from belayer import events as ev
from belayer.engine import Engine
from belayer.errors import EngineUnavailable, TurnRestarted, WeightsError
from belayer.faults import failpoints
from belayer.ownership import RunLabel

pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the vLLM backend"),
]

COUNT = 3
WAIT_S = 120.0
BEFORE_COMMIT = ("engine.update.begin", "engine.update.after_shard", "engine.update.before_commit")
AFTER_COMMIT = ("engine.update.after_commit", "engine.update.between_switches", "engine.update.switched")


class Story:
    """One engine, the sets of weights it is given, and what it must say with each of them."""

    def __init__(self) -> None:
        self.events: list[ev.Event] = []
        self.began = time.monotonic()
        self.version = 1
        self.seed_of = {1: 0}  # policy version: seed of its random weights
        self.said: dict[int, Journal] = {}
        self.engine: Engine

    def sink(self, event: ev.Event) -> None:
        self.events.append(event)
        print(f"{time.monotonic() - self.began:7.2f} {event.kind} {event.subject} {event.data}", flush=True)

    def source(self, version: int) -> Iterable[tuple[str, Any]]:
        return random_weights(seed=self.seed_of[version])

    def count(self, kind: str, **data: Any) -> int:
        return sum(e.kind == kind and all(e.data.get(k) == v for k, v in data.items()) for e in self.events)

    async def until(self, condition: Any, what: str) -> None:
        try:
            async with asyncio.timeout(WAIT_S):
                while not condition():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"waited in vain until {what}") from None

    async def update(self, seed: int) -> None:
        self.version += 1
        self.seed_of[self.version] = seed
        await self.engine.update_weights(random_weights(seed=seed), self.version)

    async def says(self, seed: int, journal: Journal | None = None) -> None:
        """The engine makes the tokens and logprobs of the weights of `seed`, and of no others."""
        got = await asyncio.wait_for(complete(self.engine, requests(COUNT), journal), WAIT_S)
        if seed not in self.said:
            self.said[seed] = got
        assert got.tokens == self.said[seed].tokens
        assert got.logprobs == self.said[seed].logprobs

    def damage(self) -> None:
        """Flip one bit of the weights in force."""
        care = self.engine._fleet.owner
        assert care.clean is not None and care.epochs is not None
        place = next(p for p in care.epochs.layout.slices if p.name.endswith("mlp.down_proj.weight"))
        region = care.epochs._slots[care.clean.slot]
        byte = region.copy_out(place.offset + 3, 1)[0]
        region.copy_in(place.offset + 3, bytes([byte ^ 0x10]))


@pytest.mark.timeout(900)
def test_weights_under_fire(tmp_path: Path) -> None:
    async def scenario() -> None:
        story = Story()
        config = engine_config(make_model(tmp_path / "model"), scrub_s=0.5, version_policy="restart_turn")
        with RunLabel.new("test engine weights") as label:
            story.engine = await Engine.start(config, label, events=story.sink, policy_version=1, source=story.source)
            try:
                await story.says(0)
                await story.update(1)
                await story.says(1)
                await damaged(story)
                await cut_off(story)
                await owner_falls_silent(story)
                await versions_meet(story)
                await without_a_source(story)
            finally:
                for name in failpoints.NAMES:
                    failpoints.disarm(name)
                await story.engine.close()

    async def damaged(story: Story) -> None:
        engine = story.engine
        await engine.wait_standby(WAIT_S)
        story.damage()  # nobody makes tokens: the shadow's scrubbing has to find it
        await story.until(lambda: story.count(ev.FAULT_DETECTED, fault="weights.damaged"), "the damage is found")
        await story.until(lambda: story.count(ev.RECOVERED, fault="weights.damaged"), "it is repaired")
        await story.says(1)
        assert engine.policy_version == story.version

        # found at a promotion, with requests in flight
        await engine.wait_standby(WAIT_S)
        journal = Journal()

        def damage_and_kill() -> None:
            story.damage()
            os.kill(engine.worker_pid or 0, signal.SIGKILL)

        journal.when_all_have(6, COUNT, damage_and_kill)
        await story.says(1, journal)
        assert story.count(ev.FAULT_DETECTED, fault="weights.damaged") >= 2

    async def cut_off(story: Story) -> None:
        engine = story.engine
        for point in BEFORE_COMMIT:  # the update fails, and the old weights are all there is
            old = engine.policy_version
            with failpoints.armed(point, "raise"):
                story.version += 1
                story.seed_of[story.version] = 2
                with pytest.raises(failpoints.FailpointError):
                    await engine.update_weights(random_weights(seed=2), story.version)
            assert engine.policy_version == old
            await story.says(1)
        for seed, point in zip((2, 1, 2), AFTER_COMMIT, strict=True):  # it is done, whatever the caller is told
            await engine.wait_standby(WAIT_S)
            with failpoints.armed(point, "raise"), pytest.raises(failpoints.FailpointError):
                await story.update(seed)
            assert engine.policy_version == story.version
            await story.says(seed)
        for seed, point in zip((1, 2, 1, 2, 1), BEFORE_COMMIT + AFTER_COMMIT[:2], strict=True):
            await engine.wait_standby(WAIT_S)
            # the worker dies in the middle of an update: the next one serves the new weights, and never the old
            with failpoints.armed(point, lambda: os.kill(engine.worker_pid or 0, signal.SIGKILL)):
                await story.update(seed)
            await story.says(seed)
            assert engine.policy_version == story.version

        for seed, point in zip((2, 1, 2), BEFORE_COMMIT, strict=True):
            await engine.wait_standby(WAIT_S)
            # the owner dies with a half-written epoch: the next owner gets the old one, and then the whole new one
            with failpoints.armed(point, lambda: os.kill(engine.owner_pid, signal.SIGKILL)):
                await story.update(seed)
            await story.says(seed)
        await story.update(1)

        # a shard that never comes does not block for ever, and leaves nothing behind
        updates = engine._updates
        updates.deadline, deadline = (lambda: asyncio.get_running_loop().time() + 0.2), updates.deadline
        story.version += 1
        story.seed_of[story.version] = 2
        with failpoints.armed("engine.update.after_shard", "sleep:0.4"), pytest.raises(WeightsError, match="within"):
            await engine.update_weights(random_weights(seed=2), story.version)
        updates.deadline = deadline
        await story.says(1)

    async def owner_falls_silent(story: Story) -> None:
        engine = story.engine
        await engine.wait_standby(WAIT_S)
        owner = engine.owner_pid
        journal = Journal()

        def stop_owner_and_kill_worker() -> None:
            os.kill(owner, signal.SIGSTOP)
            os.kill(engine.worker_pid or 0, signal.SIGKILL)

        journal.when_all_have(5, COUNT, stop_owner_and_kill_worker)
        await story.says(1, journal)
        assert engine.owner_pid != owner
        await engine.wait_standby(WAIT_S)
        owner = engine.owner_pid
        os.kill(owner, signal.SIGSTOP)  # nobody needs it now; it is noticed all the same
        await story.until(lambda: engine.owner_pid != owner, "the silent owner is replaced")
        await engine.wait_standby(WAIT_S)
        await story.update(0)
        await story.says(0)

    async def versions_meet(story: Story) -> None:
        engine = story.engine
        with pytest.raises(WeightsError, match="is not newer"):
            await engine.update_weights(random_weights(seed=0), engine.policy_version)

        # restart_turn: what was begun with the old weights is given up, and nothing of it mixes with the new
        journal, updates = Journal(), list[asyncio.Task[None]]()
        journal.when_all_have(3, COUNT, lambda: updates.append(asyncio.create_task(story.update(1))))
        work = requests(COUNT, max_tokens=400)
        ended = await asyncio.gather(*(engine.generate(request, journal) for request in work), return_exceptions=True)
        await updates[0]
        assert all(isinstance(end, TurnRestarted) for end in ended), ended
        assert all(set(versions) == {story.version - 1} for versions in journal.versions.values())
        await story.says(1)

        # finish_on_old: the update waits for a trajectory that has begun, and a new one waits for the update
        engine._gate.policy = "finish_on_old"
        first, second = requests(2)
        first.trajectory = "old"
        journal = Journal()
        await engine.generate(first, journal)
        update = asyncio.create_task(story.update(0))
        await asyncio.sleep(0.3)
        waiting = asyncio.create_task(engine.generate(second, journal))
        turn = requests(3)[2]
        turn.trajectory = "old"
        await engine.generate(turn, journal)  # its next turn is let in
        assert set(journal.versions[turn.id]) == set(journal.versions[first.id]) == {story.version - 1}
        await asyncio.sleep(0.3)
        assert not update.done() and not waiting.done()
        await engine.end_trajectory("old")
        await update
        await waiting
        assert set(journal.versions[second.id]) == {story.version}

    async def without_a_source(story: Story) -> None:
        engine = story.engine
        engine._fleet.owner.source = None
        await engine.wait_standby(WAIT_S)
        story.damage()
        await story.until(lambda: engine._fleet.failure is not None, "the engine gives up")
        with pytest.raises(EngineUnavailable, match=r"damaged|digest"):
            await engine.generate(requests(1)[0], Journal())

    asyncio.run(scenario())
