"""The core of all adapters: sandboxes for harnesses that keep the model's context themselves."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import needs_sandboxes
from tests.sandbox_kit import OWN_FOLDERS, labelled

from belayer.config import Config, PolicyConfig
from belayer.errors import ContextDiverged, RequestRefused
from belayer.integrations import ProtectedHost, ProtectedSandbox
from belayer.journal.journal import read_histories

pytestmark = [pytest.mark.contract, needs_sandboxes]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ProtectedHost]]:
    """One host that checkpoints after every action, one that never does."""
    folder = tmp_path_factory.mktemp("hosts")
    made = {
        name: ProtectedHost.open(folder / name, Config(policy=PolicyConfig(name=name)), sink=lambda event: None)
        for name in ("always", "never")
    }
    yield made
    for host in made.values():
        host.close()
        left = [thing for thing in labelled(host._label.name) if thing.kind not in OWN_FOLDERS]
        assert not left, left


def kill(sandbox: ProtectedSandbox) -> None:
    assert sandbox.current is not None
    os.kill(sandbox.current.init_pid, signal.SIGKILL)


@pytest.mark.parametrize("policy", ["always", "never"])
def test_state_outlives_a_kill(hosts, policy, tmp_path):
    host = hosts[policy]
    source = tmp_path / "tree"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "large").write_bytes(os.urandom(600_000))
    (source / "script.sh").write_text("#!/bin/sh\necho from the script\n")
    (source / "script.sh").chmod(0o755)
    sandbox = host.block(host.sandbox("kill", task={"why": "test"}))
    box = sandbox.blocking
    assert box.shell("cd /tmp && counter=1").exit_code == 0
    box.upload(source, "/data")
    box.upload(source / "sub" / "large", "/data/renamed")
    kill(sandbox)
    assert box.shell("counter=$((counter+1)); echo $counter $PWD").stdout == b"2 /tmp\n"
    kill(sandbox)
    assert box.exec("/data/script.sh").stdout == b"from the script\n"
    box.download("/data", tmp_path / "back")
    assert (tmp_path / "back" / "sub" / "large").read_bytes() == (source / "sub" / "large").read_bytes()
    assert (tmp_path / "back" / "renamed").read_bytes() == (source / "sub" / "large").read_bytes()
    assert sandbox.restores == 2
    with pytest.raises(FileNotFoundError):
        box.read("/no/such/file")
    box.close(reward=0.5)
    history = read_histories(host.directory / "journal")[sandbox.id]
    assert history.reward == 0.5 and len(history.actions()) == 6
    with pytest.raises(RequestRefused):
        box.exec("true")


def test_a_replay_that_shows_something_else_is_an_error_that_stays(hosts):
    host = hosts["never"]
    sandbox = host.block(host.sandbox("diverges"))
    box = sandbox.blocking
    box.exec("cat /proc/sys/kernel/random/uuid")  # nobody can make this come out the same
    kill(sandbox)
    with pytest.raises(ContextDiverged, match="0 actions of the context hold") as caught:
        box.exec("echo on we go")
    assert "sandbox" in caught.value.first
    for again in (lambda: box.exec("true"), lambda: box.download("/etc/hostname", "/nowhere")):
        with pytest.raises(ContextDiverged):
            again()
    box.close(reward=1.0)  # too late for a reward
    history = read_histories(host.directory / "journal")[sandbox.id]
    assert history.reward is None and history.failed is not None and history.failed.error == "ContextDiverged"


def test_the_same_with_a_checkpoint_is_no_error(hosts):
    host = hosts["always"]
    sandbox = host.block(host.sandbox("holds"))
    box = sandbox.blocking
    box.exec("cat /proc/sys/kernel/random/uuid > /tmp/id; cat /tmp/id")
    first = box.read("/tmp/id")
    kill(sandbox)
    assert box.read("/tmp/id") == first
    box.close()


def test_a_cancelled_command_keeps_what_it_did_also_after_a_kill(hosts):
    """As when a harness's agent runs out of time and its work is then scored."""
    host = hosts["never"]

    async def use() -> None:
        sandbox = await host.sandbox("cancelled")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await sandbox.exec("echo half > /tmp/work; sleep 60; echo whole > /tmp/work", timeout_s=90)
        assert await sandbox.read("/tmp/work") == b"half\n"
        kill(sandbox)
        assert await sandbox.read("/tmp/work") == b"half\n"
        assert sandbox.restores == 1
        processes = await sandbox.exec("cat /proc/[0-9]*/comm")
        assert "sleep" not in processes.text
        await sandbox.close()

    begun = time.monotonic()
    asyncio.run(use())
    assert time.monotonic() - begun < 30


def test_many_loops_and_threads_share_a_host(hosts):
    host = hosts["always"]

    async def one(number: int) -> str:
        sandbox = await host.sandbox("shared")
        await asyncio.gather(*(sandbox.exec(f"echo {number}.{step} >> /tmp/log") for step in range(3)))
        if number == 1:
            kill(sandbox)
        text = (await sandbox.read("/tmp/log")).decode()
        await sandbox.close()
        return text

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(asyncio.to_thread(asyncio.run, one(number)) for number in range(3)))

    assert asyncio.run(all_of_them()) == [f"{n}.0\n{n}.1\n{n}.2\n" for n in range(3)]


def test_a_process_that_just_ends_leaves_nothing(tmp_path):
    program = textwrap.dedent(f"""
        from belayer.integrations import ProtectedHost
        host = ProtectedHost.open({str(tmp_path / "run")!r})
        box = host.block(host.sandbox("left open")).blocking
        print(host._label.name, box.exec("echo hello").text.strip())
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
    )
    label, said = done.stdout.split()
    assert said == "hello" and not done.stderr
    assert not labelled(label)
    history = read_histories(tmp_path / "run" / "journal")["left open"]
    assert history.failed is not None and "process of its harness ended" in history.failed.reason
