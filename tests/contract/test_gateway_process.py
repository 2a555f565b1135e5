"""`belayer serve` as a process: killed and started again, told to stop, reached from outside."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.conftest import needs_root, needs_vllm
from tests.engine_kit import has_image
from tests.gateway_kit import Cli, make_chat_model, stream, tokens_of, wait_for

from belayer.cli.train import resume_command
from belayer.errors import RunError
from belayer.observe import write_report, write_timeline
from belayer.observe.status import RunReader
from belayer.ownership.labels import ENV_VAR, RUNTIME_DIR
from belayer.ownership.reap import reap
from belayer.verify import verify_run

pytestmark = [pytest.mark.contract, needs_root]

PROMPT = [(7 * j) % 256 for j in range(30)]
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "return_token_ids": True}
KEY = {"Idempotency-Key": "the call"}


def engine_processes(run: Path) -> list[int]:
    """Living processes of gateways on `run`, their engine's too."""
    labels = [d.name for d in RUNTIME_DIR.glob("bly-*") if str(run) in (d / "info.json").read_text()]
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            content = environ.read_bytes()
        except OSError:
            continue
        if any(f"{ENV_VAR}={label}".encode() in content for label in labels):
            found.append(int(environ.parent.name))
    return found


@needs_vllm
def test_a_killed_gateway_goes_on_where_it_was(tmp_path: Path) -> None:
    """SIGKILL in the middle of a streamed call; on the same run directory the retry gets every token, and the same."""
    model = make_chat_model(tmp_path / "model")
    images = str(has_image((model / "config.json").read_text())).lower()
    settings = f"images = {images}\nmax_num_seqs = 8\nkv_bytes = 33554432\n"  # those of the suite's image
    (tmp_path / "serve.toml").write_text(f"[engine]\nstandby = 'none'\n{settings}")
    arguments = (str(model), "--config", str(tmp_path / "serve.toml"), "--max-model-len", "512")
    run = tmp_path / "run"

    async def leave(url: str, first: Cli) -> list[int]:
        events: list[Any] = []
        with pytest.raises(httpx.HTTPError):
            async for event in stream(url, "/sessions/s/v1/completions", BODY, headers=KEY):
                events.append(event)
                if len(tokens_of(events)) >= 8 and first.process.poll() is None:
                    first.kill()
        return tokens_of(events)

    with Cli(run, *arguments) as first:
        seen = asyncio.run(leave(first.wait_url(), first))
    assert 8 <= len(seen) < 300
    with Cli(run, *arguments) as second:
        url = second.wait_url()
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
            (before,) = client.get("/sessions/s").json()["trajectories"][0]["turns"]
            assert before["completion_tokens"] >= len(seen) and before["finish_reason"] is None
            answer = client.post("/sessions/s/v1/completions", json=BODY, headers=KEY).json()["choices"][0]["token_ids"]
            assert answer[: len(seen)] == seen and len(answer) == 300
            again = client.post("/sessions/s/v1/completions", json=BODY, headers=KEY)
            assert again.json()["choices"][0]["token_ids"] == answer
            # what an engine says that was never disturbed
            fresh = client.post("/sessions/s2/v1/completions", json=BODY | {"seed": seed_of(run)})
            assert fresh.json()["choices"][0]["token_ids"] == answer
            client.post("/sessions/s/finish", json={"reward": 1.0}).raise_for_status()
        held = engine_processes(run)
        assert held
        second.process.send_signal(signal.SIGTERM)
        assert second.process.wait(30) == 0, second.log.read_text()
    assert not engine_processes(run) and not (run / "gateway.json").exists()
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in held), 10)
    reap()
    said = second.log.read_text()
    assert all(step in said for step in ("run directory", "starting the engine", "tokenizer", "is served at")), said
    # what people look at: both processes wrote on one page
    status = RunReader(run).status()
    assert (status.rollouts_finished, status.state) == (1, "stopped") and status.rollouts_started >= 2
    assert [rollout.rollout for rollout in status.in_flight] == ["s2"]
    assert "belayer serve" in status.message
    assert write_report(run).stat().st_size and write_timeline(run).stat().st_size
    with pytest.raises(RunError, match="belayer serve"):
        resume_command(run, plain=True)
    verdict = verify_run(run)
    assert verdict.consistent, verdict.findings


def seed_of(run: Path) -> int:
    from belayer.gateway.sessions.intent import read
    from belayer.journal import read_histories

    return read("s", read_histories(run / "journal")["s"].calls[0].asked).sampling.seed


def test_from_outside_a_token_is_needed(tmp_path: Path) -> None:
    """In front of a server that is not there yet: what is checked before anything is asked, and that it waits."""
    command = [sys.executable, "-m", "belayer.cli", "serve", "--upstream", "http://127.0.0.1:9", "--port", "0"]
    command += ["--run-dir", str(tmp_path / "open"), "--host", "0.0.0.0"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2 and "no token" in refused.stderr, refused.stderr
    assert not (tmp_path / "open").exists()
    waiting = [*command, "--recover", "0.3"]
    env = {**os.environ, "BELAYER_TOKEN": "sesame"}
    gone = subprocess.run(waiting, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert gone.returncode == 1 and "no server answers" in gone.stderr, gone.stderr
    assert not (tmp_path / "open").exists(), "it is bound to nothing"
