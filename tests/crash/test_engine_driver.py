"""SIGKILL of the driver: owner, worker, shadow and everything beside them end with it."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.engine_kit import make_model

from belayer.ownership import ENV_VAR
from belayer.ownership.reap import reap

pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the vLLM backend"),
]

DRIVER = """
import asyncio, sys
from pathlib import Path
from belayer.config import EngineConfig
from belayer.engine import Engine, GenerationRequest, Sampling
from belayer.ownership import RunLabel

async def main():
    label = RunLabel.new("engine driver test")
    print(label.name, flush=True)
    config = EngineConfig(model=Path(sys.argv[1]), max_model_len=512, max_num_seqs=8, kv_bytes=32 << 20)
    starting = asyncio.create_task(Engine.start(config, label))
    if sys.argv[2] == "starting":
        await asyncio.sleep(2.0)
        print("starting", flush=True)
    engine = await starting
    await engine.wait_standby(120)
    request = GenerationRequest(id="r", prompt_ids=[1, 2, 3], sampling=Sampling(max_tokens=400))
    said = []
    def first(chunk):
        if not said:
            said.append(print(engine.owner_pid, engine.worker_pid, engine.shadow_pid, flush=True))
    await engine.generate(request, first)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def labelled(name: str) -> set[int]:
    """Processes that carry the label and are not just waiting to be reaped."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"{ENV_VAR}={name}".encode() in environment:
                found.add(int(entry.name))
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize("moment", ["starting", "generating"])
def test_nothing_outlives_the_driver(tmp_path: Path, moment: str) -> None:
    model = make_model(tmp_path / "model")
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(model), moment], stdout=subprocess.PIPE, text=True
    ) as driver:
        try:
            assert driver.stdout is not None
            name = driver.stdout.readline().strip()
            said = driver.stdout.readline().split()  # it got there
            alive = labelled(name)
            if moment == "starting":
                assert said == ["starting"] and alive
            else:
                assert {int(pid) for pid in said} <= alive and len(said) == 3
        finally:
            driver.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 2.0
    while labelled(name) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not labelled(name)
    reap()
    assert not Path("/run/belayer", name).exists() and not Path("/dev/shm/belayer", name).exists()
