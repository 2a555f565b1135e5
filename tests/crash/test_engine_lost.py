"""An engine that is lost says so once, to whoever asked it for something, and to nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.engine_kit import Journal, engine_config, make_model, random_weights, requests

from belayer.engine import Engine
from belayer.errors import EngineError
from belayer.faults import failpoints
from belayer.ownership import RunLabel

pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the vLLM backend"),
]

WAIT_S = 60.0


def test_nothing_complains_about_an_error_that_nobody_can_hear(tmp_path: Path) -> None:
    """The engine is lost while an update is written, after the callers of both have gone."""
    complaints: list[dict[str, Any]] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        config = engine_config(make_model(tmp_path / "model"), standby="none")
        with RunLabel.new("test engine lost") as label:
            engine = await Engine.start(config, label)
            try:
                await lose(engine)
            finally:
                failpoints.disarm("engine.update.before_commit")
                await engine.close()

    async def lose(engine: Engine) -> None:
        journal = Journal()
        begun, written = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        journal.when_all_have(3, 2, begun.set)
        asked = [asyncio.create_task(engine.generate(request, journal)) for request in requests(2, 400)]
        await asyncio.wait_for(begun.wait(), WAIT_S)

        def owner_dies() -> None:  # in the thread that writes; it then waits for an owner that is gone
            loop.call_soon_threadsafe(written.set)
            os.kill(engine.owner_pid, signal.SIGKILL)

        failpoints.arm("engine.update.before_commit", owner_dies)
        update = asyncio.create_task(engine.update_weights(random_weights(seed=1), 1))
        await asyncio.wait_for(written.wait(), WAIT_S)
        update.cancel()
        asked[0].cancel()  # its end and the engine's come in the same turn of the loop
        engine._fleet._lose(EngineError("lost, by the test"))
        with pytest.raises(EngineError, match="by the test"):
            await asked[1]
        for gone in (update, asked[0]):
            with pytest.raises(asyncio.CancelledError):
                await gone
        await engine.close()  # in the middle of the update
        with contextlib.suppress(EngineError):
            engine.check()
        del asked, update

    asyncio.run(scenario())
    gc.collect()
    assert complaints == []
