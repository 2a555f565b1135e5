"""What an engine must live through whichever backend and device it has: kills, a new policy, the owner's death."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from tests.engine_kit import Journal, complete, engine_config, random_weights, requests

from belayer import events as ev
from belayer.engine import Engine
from belayer.ownership import RunLabel

COUNT = 5
WAIT_S = 180.0


async def live_through_everything(model: Path, backend: str, device: str) -> None:
    """Kill the worker while it prefills and while it decodes, update the weights, kill the owner, kill again.

    Every outcome must be that of the undisturbed run: tokens, and logprobs to the last bit.
    """
    events: list[ev.Event] = []

    def recovered() -> list[ev.Event]:
        return [event for event in events if event.kind == ev.RECOVERED]

    async def disturbed(engine: Engine, position: int) -> Journal:
        await engine.wait_standby(WAIT_S)
        before = len(recovered())
        journal = Journal()

        def kill() -> None:
            assert engine.worker_pid
            os.kill(engine.worker_pid, signal.SIGKILL)

        journal.when_all_have(position, COUNT, kill)
        await asyncio.wait_for(complete(engine, requests(COUNT), journal), WAIT_S)
        async with asyncio.timeout(WAIT_S):
            while len(recovered()) == before:
                await asyncio.sleep(0.01)
        assert recovered()[-1].data["how"] == "promotion"
        return journal

    with RunLabel.new(f"test {backend} on {device}") as label:
        config = engine_config(model, backend=backend, device=device)
        engine = await Engine.start(config, label, events=events.append)
        try:
            first = await asyncio.wait_for(complete(engine, requests(COUNT)), WAIT_S)
            for position in (1, 17):
                journal = await disturbed(engine, position)
                assert journal.tokens == first.tokens and journal.logprobs == first.logprobs
            await engine.update_weights(random_weights(seed=1), policy_version=7)
            second = await asyncio.wait_for(complete(engine, requests(COUNT)), WAIT_S)
            assert second.tokens != first.tokens
            assert {version for versions in second.versions.values() for version in versions} == {7}
            assert engine.owner_pid
            os.kill(engine.owner_pid, signal.SIGKILL)
            await asyncio.sleep(0.1)
            journal = await disturbed(engine, 5)
            assert journal.tokens == second.tokens and journal.logprobs == second.logprobs
        finally:
            await engine.close()
