"""Is a sandbox as its newest checkpoint has it? Every change of state in the list is seen; reading is none."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.conftest import needs_sandboxes
from tests.sandbox_kit import eventually, kill_init, run, sandboxes, shell

from belayer.checkpoint import make_policy
from belayer.checkpoint.turns import Turn, TurnState
from belayer.config import PolicyConfig, RecoveryConfig
from belayer.errors import CheckpointAbandoned, CheckpointRefused
from belayer.events import ignore
from belayer.journal import Journal, scan
from belayer.journal import records as r
from belayer.recovery import EnvironmentKeeper
from belayer.recovery.actions import Exists, Read, Shell
from belayer.recovery.breaker import CircuitBreaker
from belayer.sandbox import Sandbox
from belayer.sandbox._unchanged import timers
from belayer.verify import verify_records

pytestmark = [pytest.mark.integration, needs_sandboxes]

MMAP = "import mmap,os; f=open('/tmp/f','r+b'); m=mmap.mmap(f.fileno(),0); m[0]=ord('!'); m.flush(); os._exit(0)"

# what a command may do; each ends before the look
BY_COMMAND = {
    "nothing": ":",
    "write": "echo more >> /tmp/f",
    "write of the same bytes": "cat /tmp/f > /tmp/copy; cat /tmp/copy > /tmp/f",
    "truncate": "truncate -s 1 /tmp/f",
    "chmod": "chmod 600 /tmp/f",
    "chown": "chown 1000:1000 /tmp/f",
    "setxattr": "python3 -c \"import os; os.setxattr('/tmp/f', 'user.a', b'b')\"",
    "rename": "mv /tmp/f /tmp/g; mv /tmp/g /tmp/f",
    "link": "ln /tmp/f /tmp/h",
    "unlink": "rm -f /tmp/h",
    "mkdir": "mkdir -p /tmp/d",
    "touch": "touch -d @1000000000 /tmp/f",
    "mmap write": f'python3 -c "{MMAP}"',
    "shared memory that nobody holds": 'ipcmk -M 100 >/dev/null || python3 -c \'open("/dev/shm/x", "w").write("x")\'',
    "a signal": "kill -WINCH 2; true",
}
BY_SHELL = {
    "variable": "changed=1",
    "directory": "cd /",
    "function": "f() { echo f; }",
    "trap": "trap 'got=1' USR1",
    "umask": "umask 077",
}
# what a background process does while no command is sent, and how it tells that it has begun
IN_THE_BACKGROUND = {
    "time passing": "sleep 1000 & ",
    "a change of memory": "python3 -c 'import time\nn=0\nwhile True: n+=1; time.sleep(0.01)' &",
    "a mapped write": (
        'python3 -c \'import mmap,time\nf=open("/tmp/f","r+b"); m=mmap.mmap(f.fileno(),0)\n'
        "while True: m[0]=(m[0]+1)%256; time.sleep(0.01)' &"
    ),
    "a timer that fires": (
        "python3 -c 'import signal,time\nsignal.pthread_sigmask(signal.SIG_BLOCK,{signal.SIGALRM})\n"
        "signal.setitimer(signal.ITIMER_REAL,0.2)\nsignal.sigwait({signal.SIGUSR1})' &"
    ),
    "a socket that receives": (
        "python3 -c 'import socket,time,os\na,b=socket.socketpair()\nwhile True: a.send(b\"x\"); time.sleep(0.02)' &"
    ),
    "a stopped process": "sleep 1000 & kill -STOP $!",
}


async def is_unchanged(sandbox: Sandbox, checkpoint: str) -> bool:
    return await sandbox.changed_since(checkpoint) == ""


async def shell_ran(sandbox: Sandbox, checkpoint: str) -> bool:
    return await sandbox.changed_since(checkpoint) != ""


async def checkpointed(sandbox: Sandbox) -> str:
    for _ in range(20):
        try:
            return (await sandbox.checkpoint(action=1)).id
        except CheckpointRefused:  # a background process in the middle of its start
            await asyncio.sleep(0.1)
    raise AssertionError("no checkpoint could be taken")


async def still(sandbox: Sandbox) -> str:
    """A checkpoint from which the sandbox is unchanged: also after some time, and after reading."""
    checkpoint = await checkpointed(sandbox)
    await eventually("the container goes on to where it waits", lambda: is_unchanged(sandbox, checkpoint))
    await sandbox.read("/tmp/f")
    assert not await sandbox.exists("/tmp/nothing")
    assert await sandbox.healthy() is None
    assert await sandbox.changed_since(checkpoint) == ""
    return checkpoint


def test_every_change_is_seen(tmp_path: Path) -> None:
    async def main() -> None:
        async with sandboxes(tmp_path / "c") as manager:
            sandbox = await manager.create("seen")
            assert await sandbox.changed_since("none") != ""
            await shell(sandbox, "echo content > /tmp/f")
            missed = []

            async def check(what: str, change: Callable[[], Awaitable[object]]) -> None:
                checkpoint = await still(sandbox)
                await change()
                if not await sandbox.changed_since(checkpoint):
                    missed.append(what)

            for what, command in BY_COMMAND.items():
                await check(what, lambda command=command: sandbox.exec(command))
            for what, command in BY_SHELL.items():
                await check(what, lambda command=command: sandbox.shell(command))
            await check("written by a file call", lambda: sandbox.write("/tmp/new", b"x"))
            await check("copied in", lambda: sandbox.upload(__file__, "/tmp/copied"))
            await check("another host name", lambda: sandbox.rename("other"))
            assert not missed, f"not seen as changed: {missed}"

    asyncio.run(main())


def test_what_a_background_process_does_is_seen(tmp_path: Path) -> None:
    async def main() -> None:
        async with sandboxes(tmp_path / "c") as manager:
            sandbox = await manager.create("beside")
            await shell(sandbox, "echo content > /tmp/f")
            missed = []
            for what, command in IN_THE_BACKGROUND.items():
                await shell(sandbox, command)
                checkpoint = await checkpointed(sandbox)
                if not await sandbox.changed_since(checkpoint):
                    missed.append(what)
                await shell(sandbox, "kill -9 $!; wait $! 2>/dev/null; true")
                if not await sandbox.changed_since(checkpoint):
                    missed.append(f"{what}, and its end")
            assert not missed, f"not seen as changed: {missed}"
            await eventually("its processes are gone", lambda: len(sandbox.processes()) == 2)
            await still(sandbox)

    asyncio.run(main())


def test_a_change_without_any_command_is_seen(tmp_path: Path) -> None:
    """What the argument says cannot happen: made to happen from the host, it is seen nevertheless."""

    async def main() -> None:
        async with sandboxes(tmp_path / "c") as manager:
            sandbox = await manager.create("hole")
            await shell(sandbox, "echo content > /tmp/f; trap 'got=1' USR1")
            checkpoint = await still(sandbox)
            os.chmod(sandbox.root / "tmp/f", 0o600)
            assert await sandbox.changed_since(checkpoint) == "the file system has changed"
            checkpoint = await still(sandbox)
            (bash,) = [pid for pid in sandbox.processes() if pid != sandbox.init_pid]
            os.kill(bash, signal.SIGUSR1)
            await eventually("the shell runs its trap", lambda: shell_ran(sandbox, checkpoint))
            assert await sandbox.changed_since(checkpoint) == "the shell has run"
            checkpoint = await still(sandbox)
            os.kill(sandbox.init_pid, signal.SIGSTOP)
            os.kill(sandbox.init_pid, signal.SIGCONT)
            # a handle of the shell to something that the kernel changes
            await shell(sandbox, "exec 9<>/dev/ptmx; coproc cat; kill $COPROC_PID; wait 2>/dev/null; true")
            assert await sandbox.changed_since(checkpoint) != ""
            other = await checkpointed(sandbox)
            assert await sandbox.changed_since(checkpoint) == "its newest checkpoint is another one"
            assert other != checkpoint
            kill_init(sandbox)
            await eventually("it is dead", lambda: sandbox.dead)
            assert await sandbox.changed_since(other) != ""

    asyncio.run(main())


def test_timers_are_found_in_the_images(tmp_path: Path) -> None:
    async def main() -> None:
        async with sandboxes(tmp_path / "c") as manager:
            sandbox = await manager.create("timers")
            quiet = await checkpointed(sandbox)
            assert timers(manager.checkpoints.data.memory / quiet) is False
            for start in ("signal.setitimer(signal.ITIMER_REAL, 1000)", "signal.setitimer(signal.ITIMER_PROF, 1000)"):
                program = f'import signal, time\n{start}\nopen("/tmp/ready", "w")\ntime.sleep(900)'
                await shell(sandbox, f"rm -f /tmp/ready; python3 -c '{program}' &")
                await eventually("its timer runs", lambda: sandbox.exists("/tmp/ready"), 20)
                found = await checkpointed(sandbox)
                assert timers(manager.checkpoints.data.memory / found) is True
                await shell(sandbox, "kill -9 $!; wait $! 2>/dev/null; true")

    asyncio.run(main())


def test_a_rollback_to_an_unchanged_state_is_exactly_right(tmp_path: Path) -> None:
    async def main() -> None:
        async with sandboxes(tmp_path / "c") as manager:
            sandbox = await manager.create("back")
            await shell(
                sandbox,
                "echo f > /tmp/f; mkdir -p /data && cd /data && echo one > a && ln a b && x=7 && f() { echo f$x; }",
            )
            checkpoint = await still(sandbox)
            listing = "find /data -printf '%p %i %m %n %T@ %s\\n' | sort"
            for _ in range(3):
                await sandbox.read("/data/a")
            assert await sandbox.changed_since(checkpoint) == ""
            begun = time.perf_counter()
            for _ in range(200):
                await sandbox.changed_since(checkpoint)
            assert (time.perf_counter() - begun) / 200 < 0.02, "it is not cheap"
            before = await run(sandbox, listing)
            kill_init(sandbox)
            again = await sandbox.restore(checkpoint)
            assert await run(again, listing) == before
            assert (await shell(again, "pwd; f; umask")).split() == ["/data", "f7", "0022"]
            assert await again.changed_since(checkpoint) != "", "nobody has compared the restored one"

    asyncio.run(main())


def test_an_action_that_only_read_needs_no_checkpoint_and_is_not_lost(tmp_path: Path) -> None:
    """Through the whole stack: skipped as unchanged, and after a loss the older checkpoint and a replay are right."""

    async def main() -> None:
        async with sandboxes(tmp_path / "c") as manager:
            journal = Journal(tmp_path / "journal")
            journal.record(r.RolloutStarted(rollout="r", group="g", task=0, seed=0))
            keeper = EnvironmentKeeper(
                "r",
                0,
                sandboxes=manager,
                journal=journal,
                policy=make_policy(PolicyConfig(name="always")),
                config=RecoveryConfig(),
                breaker=CircuitBreaker(100),
                sink=ignore,
            )
            actions = [
                Shell(command="mkdir -p /srv && cd /srv && echo one > a && x=7"),
                Read(path="/srv/a"),
                Exists(path="/srv/b"),
                Read(path="/srv/a"),
                Shell(command="pwd; cat a; echo $x"),
            ]
            results = []
            for number, action in enumerate(actions):
                if number == 4:
                    assert keeper.sandbox is not None
                    kill_init(keeper.sandbox)
                results.append(await keeper.act(number, action))
                keeper.bubble_begins()
                if number == 0:
                    await keeper._checkpoint.settle()
                    box, (newest,) = keeper.sandbox, journal.history("r").checkpoints
                    assert box is not None
                    await eventually("it waits", lambda box=box, id=newest.id: is_unchanged(box, id))
                await asyncio.sleep(0.1)
                keeper.bubble_ends(0.1, 10)
            await keeper.close(keep_checkpoints=False)
            journal.close()
            assert results[1] == results[3] == b"one\n" and results[4].stdout == b"/srv\none\n7\n"
            records = list(scan(tmp_path / "journal"))
            skipped = [record for record in records if isinstance(record, r.CheckpointSkipped)]
            assert [record.k for record in skipped] == [2, 3, 4]
            assert all(record.why.startswith("unchanged: r.0-g1-") for record in skipped)
            (restored,) = [record for record in records if isinstance(record, r.EnvRestored)]
            assert (restored.k, restored.replayed) == (4, 3) and restored.checkpoint
            assert verify_records(records).consistent

    asyncio.run(main())


def test_real_dumps_stand_in_one_order(tmp_path: Path) -> None:
    """One at once: the third is promoted and goes before the second, which is given up and touches nothing."""

    async def main() -> None:
        async with sandboxes(tmp_path / "c", max_dumps=1) as manager:
            boxes = [await manager.create(f"box{number}") for number in range(3)]
            turns = [Turn() for _ in boxes]
            ended: list[int] = []

            async def take(number: int) -> str:
                try:
                    manifest = await boxes[number].checkpoint(action=0, turn=turns[number])
                except CheckpointAbandoned:
                    return "given up"
                ended.append(number)
                return manifest.id

            for box in boxes:
                await shell(box, "python3 -c 'import time; x = bytes(60_000_000); time.sleep(900)' & sleep 0.2")
            tasks = [asyncio.create_task(take(number)) for number in range(3)]
            await eventually("the first dumps", lambda: manager.dumping == 1)
            first = next(number for number in range(3) if turns[number].state is TurnState.BEGUN)
            second, third = [number for number in range(3) if number != first]
            assert turns[third].promote() and turns[second].abandon() and not turns[first].abandon()
            done = await asyncio.gather(*tasks)
            assert ended == [first, third] and done[second] == "given up"
            assert manager.newest(f"box{second}") is None
            assert (await shell(boxes[second], "echo it runs on")).strip() == "it runs on"

    asyncio.run(main())
