"""Checkpoints below `full`, and `full` on the overlay store: what comes back, and what is said about the rest."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import needs_sandboxes
from tests.sandbox_kit import State, eventually, kill_init, overlay_store, processes_like, run, sandboxes, shell

from belayer import events
from belayer.errors import CheckpointRefused, CheckpointUnfit
from belayer.ownership import cache_dir, store_dir
from belayer.ownership.labels import mounts_below
from belayer.sandbox import Sandbox, Sandboxes

pytestmark = [pytest.mark.integration, needs_sandboxes]

# a UDP socket that holds data back cannot be dumped
CORKED = """
import socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.connect(("127.0.0.1", 9))
s.setsockopt(17, 1, 1)
s.send(b"x")
open("/tmp/corked", "w")
time.sleep(600)
"""


def test_the_shell_comes_back_without_its_processes(tmp_path):
    async def body() -> None:
        async with sandboxes(tmp_path / "c", allow_level="fs") as manager:
            box = await manager.create("s")
            await shell(
                box, "mkdir -p '/d/a b' && cd /tmp && cd '/d/a b'; export E='x y'; plain=$'l1\\nl2'; unset LANG"
            )
            await shell(box, "arr=(1 'two 3'); declare -A map=([k]='v w'); declare -r ro=5; declare -i number=7")
            await shell(
                box, 'f() { echo "f: $1"; }; export -f f; cd() { builtin cd "$@"; }; alias ll=\'ls -l\' echo2=echo'
            )
            await shell(
                box, "umask 027; set -o noclobber; shopt -s extglob nullglob; trap 'echo usr' USR1; set -- p 'p 2'"
            )
            await shell(box, "digits() { case $1 in +([0-9])) echo yes;; *) echo no;; esac; }; raw=$'\\xff\\x01é'")
            await shell(box, "sleep 600 & echo background > /tmp/before")
            await eventually("it is what it shall be", lambda: processes_like(box, "sleep 600"))
            assert (await box.shell("(exit 3)")).exit_code == 3
            manifest = await box.checkpoint(action=1, level="fs+shell")
            assert manifest.level == "fs+shell" and manifest.reason and not manifest.parent
            assert [line.split(": ")[1] for line in manifest.lost] == ["sleep 600"]
            want = await said(box)
            assert (
                want.startswith("3|/d/a b|/tmp|x y|l1\nl2|two 3|v w|5|7|f: 1|0027|") and "|unset|p,p 2|yes no|" in want
            )
            assert await shell(box, "jobs | grep -c sleep") == "1\n", "the shell's own job was disturbed"
            await shell(box, "cd /; E=later; f() { :; }; unset plain; rm -f /tmp/before; unalias ll")
            kill_init(box)
            box = await manager.restore("s", manifest.id)
            assert box.restored is not None and not box.restored.complete
            assert (box.restored.level, box.restored.lost) == ("fs+shell", tuple(manifest.lost))
            assert await said(box) == want
            assert (await box.shell("jobs")).stdout == b""
            assert await run(box, "cat /tmp/before") == "background\n"
            assert await run(box, "ls -A /run") == "agent\n", "the description of the shell stayed in the file system"
            # options that end or disturb a shell, and a restore of a restored one
            await shell(box, "set -eu")
            box = await box.restore((await box.checkpoint(action=2, level="fs+shell")).id)
            options = await shell(box, "echo $-")
            assert "e" in options and "u" in options
            await shell(box, "set +eu")
            # what a background job says between two commands is heard once, although the shell was asked meanwhile
            await shell(box, "(sleep 0.2; echo from the background) & true")
            await asyncio.sleep(0.5)
            await box.checkpoint(action=2, level="fs+shell")
            heard = await shell(box, "echo next")
            assert heard.count("from the background") == 1 and heard.endswith("next\n")
            assert "background" not in await shell(box, "echo next")
            # a shell in a deleted directory cannot be described; the run accepts less, but this level was asked for
            await shell(box, "mkdir /tmp/gone; cd /tmp/gone; rmdir /tmp/gone")
            with pytest.raises(CheckpointRefused, match="directory"):
                await box.checkpoint(action=3, level="fs+shell")
            manifest = await box.checkpoint(action=3, level="fs")
            assert "the state of the shell" in manifest.lost and not manifest.images
            box = await box.restore(manifest.id)
            assert await shell(box, "pwd") == "/root\n"

    asyncio.run(body())


async def said(box: Sandbox) -> str:
    """The shell's state in its own words."""
    return await shell(
        box,
        'echo "$?|$PWD|$OLDPWD|$E|$plain|${arr[1]}|${map[k]}|$ro|$number|$(f 1)|$(umask)|$-|$(trap -p USR1)|'
        '${LANG-unset}|$1,$2|$(digits 12) $(digits x)|$(shopt extglob nullglob)|$(alias)|"; '
        'printf %s "$raw" | od -c; declare -Fx; bash -c "f sub"',
    )


def test_a_lower_level_is_taken_only_if_the_run_accepts_it_and_says_so(tmp_path):
    seen: list[events.Event] = []

    async def with_corked(manager: Sandboxes) -> Sandbox:
        box = await manager.create("s")
        await box.write("/root/corked.py", CORKED.encode())
        await shell(box, "cd /tmp; x=kept; python3 /root/corked.py & true")
        await eventually("the socket is corked", lambda: box.exists("/tmp/corked"))
        return box

    async def body() -> None:
        async with sandboxes(tmp_path / "strict") as manager:
            box = await with_corked(manager)
            with pytest.raises(CheckpointRefused, match="corked") as refusal:
                await box.checkpoint(action=1)
            assert refusal.value.kept and 'allow_level = "fs+shell"' in (refusal.value.next_step or "")
            with pytest.raises(CheckpointRefused, match="allow_level is full"):
                await box.checkpoint(action=1, level="fs")
            assert manager.manifests("s") == []
            assert await shell(box, "echo $x") == "kept\n"
        async with sandboxes(tmp_path / "lax", events=seen.append, allow_level="fs+shell") as manager:
            box = await with_corked(manager)
            with pytest.raises(CheckpointRefused, match="corked"):
                await box.checkpoint(action=1, level="full")
            manifest = await box.checkpoint(action=1)
            assert manifest.level == "fs+shell" and "corked" in manifest.reason
            assert any("corked.py" in line for line in manifest.lost)
            box = await manager.restore("s", manifest.id)
            assert box.restored is not None and "corked" in box.restored.reason
            assert await shell(box, "echo $x $PWD; ls /tmp") == "kept /tmp\ncorked\n"
            assert (await box.checkpoint(action=2)).level == "full", "what stood in the way is gone"
        levels = [event for event in seen if event.kind in (events.CHECKPOINT_LEVEL, events.RESTORE_LEVEL)]
        assert [event.kind for event in levels] == [events.CHECKPOINT_LEVEL, events.RESTORE_LEVEL]
        for event in levels:
            assert event.subject == "s" and event.data["level"] == "fs+shell" and event.data["id"] == manifest.id
            assert "corked" in event.data["reason"] and "corked.py" in event.data["lost"][0]
        # the same folder, opened by a run that accepts only full ones
        async with sandboxes(tmp_path / "lax") as manager:
            with pytest.raises(CheckpointUnfit, match="accepts full"):
                await manager.restore("s", manifest.id)
            newest = manager.newest("s")
            assert newest is not None and newest.level == "full"
            box = await manager.restore("s", newest.id)
            assert await shell(box, "echo $x") == "kept\n"

    asyncio.run(body())


def test_full_checkpoints_on_the_overlay_store(tmp_path):
    async def body() -> None:
        folder = overlay_store()
        async with sandboxes(tmp_path / "c", store=folder, store_kind="overlay", allow_level="fs") as manager:
            assert manager.store.trees.kind == "overlay"
            box = await manager.create("s")
            state = await State.prepare(box)
            await state.advance(box)
            await run(box, "rm /usr/bin/tar; mv /usr/lib/git-core /usr/lib/git-core-2; ln /etc/passwd /etc/second-name")
            box.accept()
            manifest = await box.checkpoint(action=1)
            assert manifest.level == "full"
            kept = state.copy()
            await state.advance(box)
            await state.check(box)
            kill_init(box)
            for _ in range(2):  # twice from the same one, then on from there
                box = await manager.restore("s", manifest.id)
                assert box.restored is not None and box.restored.level == "full" and not box.restored.complete
                assert ["inode numbers" in line for line in box.restored.lost] == [True]
                await kept.copy().check(box)
            assert await run(box, "test ! -e /usr/bin/tar && ls /usr/lib/git-core-2 | wc -l && stat -c %h /etc/passwd")
            assert await box.healthy() is None
            kept.asked += 1  # by the check above
            await kept.advance(box)
            forks = await box.fork(2)
            for fork in forks:
                await kept.copy().check(fork)
            # damage of a part of the image is seen in an overlay too
            await run(forks[0], "rm /usr/bin/env")
            assert "lost entries" in (await forks[0].healthy() or "")
            await run(forks[1], "rm -rf /usr/share/perl5 /usr/lib/git-core-2; mkdir /usr/lib/new")
            assert await forks[1].healthy() is not None
            # without CRIU on the same store: frozen while its files are copied
            low = await box.checkpoint(action=2, level="fs+shell")
            box = await box.restore(low.id)
            assert await shell(box, "echo $plain; cat /data/turn") == f"two words\n{kept.turn}\n"
            assert [path for path in mounts_below(manager.label.dir) if "root" in path], "roots are mounted by label"
            await manager.discard("s")
        assert not mounts_below(manager.label.dir)
        assert not (folder / "overlay" / "runs" / manager.label.name).exists()

    asyncio.run(body())


def test_a_host_without_criu(tmp_path):
    """Another process that finds no CRIU: refused with a way out, or open at the level that the run accepts."""
    program = tmp_path / "program.py"
    program.write_text(
        """
import asyncio, json, sys
from pathlib import Path
from tests.sandbox_kit import kill_init, sandboxes, shell
from belayer.errors import BelayerError

async def main(place, store):
    try:
        async with sandboxes(Path(place) / "full", store=Path(store)):
            print("opened")
    except BelayerError as error:
        first = str(error)
    async with sandboxes(Path(place) / "low", store=Path(store), allow_level="fs+shell") as manager:
        box = await manager.create("s")
        await shell(box, "cd /tmp; x=kept; echo y > file")
        manifest = await box.checkpoint(action=1)
        kill_init(box)
        box = await manager.restore("s", manifest.id)
        said = await shell(box, "echo $x $PWD; cat file")
    print(json.dumps([first, manifest.level, manifest.reason, box.restored.level, said]))

asyncio.run(main(*sys.argv[1:]))
"""
    )
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "native").symlink_to(cache_dir() / "native")
    environment = {**os.environ, "BELAYER_CACHE": str(cache), "PATH": "/usr/bin:/bin", "BELAYER_CRIU": ""}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "run"), str(store_dir())],
        check=False,
        env={**environment, "PYTHONPATH": f"{root / 'src'}:{root}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    if "opened" in done.stdout:
        pytest.skip("this host has a CRIU of its own in a system folder")
    first, level, reason, restored, said_then = json.loads(done.stdout)
    assert "CRIU" in first and 'allow_level = "fs+shell"' in first
    assert (level, restored, said_then) == ("fs+shell", "fs+shell", "kept /tmp\ny\n")
    assert "no CRIU 4.2" in reason
