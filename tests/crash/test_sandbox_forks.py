"""Forks are exact copies that know that they are: host name, network, seed, and a notice to programs inside."""

from __future__ import annotations

import asyncio
import json
import os
import time

import pytest
from tests.conftest import needs_sandboxes
from tests.sandbox_kit import died, eventually, kill_init, run, sandboxes, shell

from belayer.errors import SandboxError
from belayer.sandbox import Sandbox
from belayer.sandbox._identity import HOOKS, NOTICE, fork_hostname

pytestmark = [pytest.mark.crash, needs_sandboxes]

FORKS = 8
# two generators seeded alike: one watches the notice, one does not
PROGRAM = f"""
import json, os, random, time
random.seed(1)
other = random.Random(1)
told = None
print("ready", flush=True)
while True:
    if os.path.exists("/tmp/ask"):
        if told is None and os.path.exists("{NOTICE}"):
            told = json.load(open("{NOTICE}"))
            random.seed(told["seed"])
        open("/tmp/answer.tmp", "w").write(f"{{random.getrandbits(64)}} {{other.getrandbits(64)}}")
        os.rename("/tmp/answer.tmp", "/tmp/answer")
        os.unlink("/tmp/ask")
    time.sleep(0.01)
"""
HOOK = '#!/bin/sh\necho "$BELAYER_FORK $BELAYER_FORKS $BELAYER_HOSTNAME $(uname -n) $BELAYER_SEED" >> /root/hooked\n'


async def drawn(box: Sandbox) -> list[str]:
    await box.write("/tmp/ask", b"")

    async def answered() -> bool:
        return await box.exists("/tmp/answer")

    await eventually("the program answers", answered)
    return (await box.read("/tmp/answer")).decode().split()


def test_eight_forks_at_once_each_with_its_own_identity(tmp_path):
    async def body() -> None:
        async with sandboxes(tmp_path / "c") as manager:
            box = await manager.create("s")
            await box.write(f"{HOOKS}/10-note", HOOK.encode(), mode=0o755)
            await box.write(f"{HOOKS}/20-not-executable", b"exit 1\n", mode=0o644)
            await box.write("/srv/program.py", PROGRAM.encode())
            await shell(box, "python3 /srv/program.py > /tmp/said & export MINE=yes; cd /srv")

            async def ready() -> bool:
                return await box.exists("/tmp/said") and await box.read("/tmp/said") == b"ready\n"

            await eventually("the program runs", ready)
            begun = time.perf_counter()
            forks = await box.fork(FORKS)
            took = time.perf_counter() - begun
            print(f"fork of {FORKS}: {took * 1000:.0f} ms, {took * 1000 / FORKS:.0f} ms each")
            everybody = [box, *forks]
            hostnames = [(await run(one, "uname -n")).strip() for one in everybody]
            assert hostnames == ["sandbox", *(f"sandbox-{number}" for number in range(1, FORKS + 1))]
            assert [one.hostname for one in everybody] == hostnames
            assert len({os.stat(f"/proc/{one.init_pid}/ns/net").st_ino for one in everybody}) == FORKS + 1
            notices = []
            for number, fork in enumerate(forks, 1):
                assert await shell(fork, "echo $MINE $PWD") == "yes /srv\n"
                notice = json.loads(await fork.read(NOTICE))
                assert (notice["fork"], notice["of"], notice["hostname"]) == (number, FORKS, hostnames[number])
                assert abs(notice["time"] - time.time()) < 60 and notice["checkpoint"] == forks[0].parent
                notices.append(notice)
                hooked = (await fork.read("/root/hooked")).decode().split()
                assert hooked == [str(number), str(FORKS), hostnames[number], hostnames[number], notice["seed"]]
                ask = "python3 -c 'import socket; print(socket.gethostbyname(socket.gethostname()))'"
                assert number > 1 or await run(fork, ask) == "127.0.0.1\n"
            assert len({notice["seed"] for notice in notices}) == FORKS
            assert not await box.exists(NOTICE) and not await box.exists("/root/hooked")
            # the kernel's randomness differs by itself, a program's own only if it listens
            assert len({await run(one, "head -c 16 /dev/urandom | sha256sum") for one in everybody}) == FORKS + 1
            values = [await drawn(fork) for fork in forks]
            assert len({value[0] for value in values}) == FORKS, "a program that watches the notice draws its own"
            assert len({value[1] for value in values}) == 1, "one that does not goes on as the copy that it is"
            # a fork's identity is part of its state
            manifest = await forks[3].checkpoint(action=1)
            kill_init(forks[3])
            await died(forks[3])
            back = await manager.restore(forks[3].name, manifest.id)
            assert (back.hostname, await run(back, "uname -n")) == ("sandbox-4", "sandbox-4\n")
            below = await back.fork(2)
            assert [(await run(one, "uname -n")).strip() for one in below] == ["sandbox-4-1", "sandbox-4-2"]
            assert await run(back, "uname -n") == "sandbox-4\n"

    asyncio.run(body())


def test_a_failing_hook_fails_the_fork_and_leaves_nothing(tmp_path):
    async def body() -> None:
        async with sandboxes(tmp_path / "c") as manager:
            box = await manager.create("s")
            await box.write(
                f"{HOOKS}/fails", b"#!/bin/sh\n[ $BELAYER_FORK != 2 ] || { echo no seed >&2; exit 7; }\n", mode=0o755
            )
            with pytest.raises(SandboxError, match=r"(?s)fork 2 of 3.*no seed.*exit code 7"):
                await box.fork(3)
            assert {sandbox.name for sandbox in manager._sandboxes.values()} == {"s"}
            assert await run(box, "echo on") == "on\n"
            await run(box, f"rm {HOOKS}/fails; rm -rf /run/belayer; ln -s /nowhere/at/all /run/belayer; rm /etc/hosts")
            assert len(await box.fork(2)) == 2, "what the agent did to the notice's place is its own affair"
            await run(box, "rm /bin/sh /bin/dash")
            assert len(await box.fork(2)) == 2

    asyncio.run(body())


def test_clocks_after_a_restore(tmp_path):
    """A sandbox does not notice how long it was away, except by the time of day. CRIU sees to that with a namespace."""
    ask = "python3 -c 'import time; print(time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME), time.time())'"
    away_s = 3.0

    async def clocks(box: Sandbox) -> list[float]:
        return [float(word) for word in (await run(box, ask)).split()]

    async def body() -> None:
        async with sandboxes(tmp_path / "c") as manager:
            box = await manager.create("s")
            for _ in range(2):
                before, at = await clocks(box), time.monotonic()
                manifest = await box.checkpoint(action=1)
                await asyncio.sleep(away_s)
                box = await manager.restore("s", manifest.id)
                after = await clocks(box)
                passed = time.monotonic() - at
                seen = [b - a for a, b in zip(before, after, strict=True)]
                assert seen[2] == pytest.approx(passed, abs=1.0), "the time of day is always the host's"
                for clock in seen[:2]:
                    assert clock >= 0
                    assert clock == pytest.approx(passed - away_s, abs=1.0)

    asyncio.run(body())


def test_names_of_forks_of_forks_stay_short():
    name = "sandbox"
    seen = set()
    for _ in range(60):
        name = fork_hostname(name, 3)
        assert len(name) <= 63 and name not in seen
        seen.add(name)
