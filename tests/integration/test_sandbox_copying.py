"""Folders and archives into and out of sandboxes, whatever the agent has put there."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import socket
import tarfile
from pathlib import Path

import pytest
from tests.conftest import needs_sandboxes
from tests.image_kit import entry, folder, layer, link
from tests.sandbox_kit import eventually, run, sandboxes, shell

from belayer.errors import SandboxError
from belayer.sandbox import Sandbox
from belayer.sandbox._copying import read_into

pytestmark = [pytest.mark.integration, needs_sandboxes]


def tree_of(root: Path) -> dict[str, object]:
    """Everything in a folder that a copy has to keep."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = (path.read_bytes(), path.stat().st_mode & 0o777, int(path.stat().st_mtime))
        else:
            found[name] = path.stat().st_mode & 0o777
    return found


def make_tree(root: Path) -> Path:
    (root / "deep" / ("n" * 200) / "er").mkdir(parents=True)
    (root / "deep" / ("n" * 200) / "er" / "file").write_bytes(bytes(range(256)) * 5000)
    (root / "empty").mkdir(mode=0o750)
    (root / "tool").write_text("#!/bin/sh\necho from the host\n")
    (root / "tool").chmod(0o755)
    os.utime(root / "tool", (10**9, 10**9))
    (root / "odd name\n ü").write_bytes(b"")
    (root / "inside").symlink_to("deep/../tool")
    (root / "deep" / "up").symlink_to("../tool")
    (root / "out").symlink_to("/etc/hostname")
    for number in range(500):
        (root / "empty" / f"{number}").write_bytes(b"%d" % number)
    return root


def test_folders_and_archives_round_trip(tmp_path):
    source = make_tree(tmp_path / "source")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(source / "socket"))
    expected = tree_of(source)
    del expected["socket"]

    async def body(box: Sandbox) -> None:
        copied = await box.upload(source, "/data/new/place")
        assert (copied.files, copied.skipped) == (503, ("socket",))
        assert await run(box, "/data/new/place/tool; stat -c '%a %Y' /data/new/place/tool") == (
            "from the host\n755 1000000000\n"
        )
        assert await run(box, "cat /data/new/place/out") == "sandbox\n"  # the container's own
        await box.upload(source, "/data/new/place")  # over what is there
        back = await box.download("/data/new/place", tmp_path / "back")
        # of the links only those that certainly stay inside
        assert sorted(back.skipped) == ["inside", "out"]
        assert tree_of(tmp_path / "back") == {k: v for k, v in expected.items() if k not in ("inside", "out")}
        (tmp_path / "there").mkdir()
        await box.download("/data/new/place/deep", tmp_path / "there")
        assert (tmp_path / "there" / "up").is_symlink() is False, "its target is outside of this copy"
        with pytest.raises(OSError):
            await box.download("/data/new/place", tmp_path / "there")
        await box.download("/data/new/place/tool", tmp_path / "tool")
        assert (tmp_path / "tool").read_bytes() == (source / "tool").read_bytes()

        await box.download_tar("/data/new/place", tmp_path / "all.tar")
        await box.upload_tar(tmp_path / "all.tar", "/data/again")
        assert await run(box, "diff -r --no-dereference /data/new/place /data/again && echo same") == "same\n"
        with tarfile.open(tmp_path / "small.tar.gz", "w:gz") as archive:
            archive.add(source / "tool", "a/tool")
            member = tarfile.TarInfo("a/same")
            member.type, member.linkname = tarfile.LNKTYPE, "a/tool"
            archive.addfile(member)
        await box.upload_tar(tmp_path / "small.tar.gz", "unpacked")
        assert await run(box, "cd /root/unpacked/a && [ tool -ef same ] && ./same") == "from the host\n"

        with pytest.raises(FileNotFoundError):
            await box.download("/none", tmp_path / "none")
        with pytest.raises(NotADirectoryError):
            await box.upload(source, "/data/new/place/tool")
        assert not list(tmp_path.glob(".*part")) and not (tmp_path / "none").exists()

    _with_box(tmp_path, body)


def test_limits(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_bytes(bytes(3 << 20))
    with tarfile.open(tmp_path / "bomb.tar.gz", "w:gz") as archive:
        archive.add(source / "file", "file")

    async def body(box: Sandbox) -> None:
        for attempt in (
            box.upload(source, "/data", limit_bytes=2 << 20),
            box.upload(source / "file", "/data/file", limit_bytes=2 << 20),
            box.upload_tar(tmp_path / "bomb.tar.gz", "/data", limit_bytes=2 << 20),
        ):
            with pytest.raises(SandboxError, match="larger than 2 MB"):
                await attempt
        assert not await box.exists("/data")
        await run(box, "mkdir /big; truncate -s 1T /big/sparse; mkdir /many; cd /many; touch $(seq 1000)")
        with pytest.raises(OSError) as caught:
            await box.download("/big", tmp_path / "big", limit_bytes=2 << 20)
        assert caught.value.errno == errno.EFBIG and not (tmp_path / "big").exists()
        # what is mounted below is not part of it
        assert set((await box.download("/run", tmp_path / "run")).skipped) == {"agent"}
        assert (await box.download("/many", tmp_path / "many")).files == 1000

    _with_box(tmp_path, body)


HOSTILE = {
    "absolute": [entry("/etc/planted", data=b"x")],
    "parent": [entry("../planted", data=b"x")],
    "hard link out": [link("x", "../../etc/hostname", tarfile.LNKTYPE)],
}


def test_hostile_archives(tmp_path):
    async def body(box: Sandbox) -> None:
        for name, entries in HOSTILE.items():
            (tmp_path / "hostile.tar").write_bytes(layer([folder("a"), *entries]))
            with pytest.raises(SandboxError, match="leads out"):
                await box.upload_tar(tmp_path / "hostile.tar", f"/data/{name}")
            assert not await box.exists("/data/planted") and not await box.exists("/etc/planted")
        # through a link of its own: refused inside the container
        (tmp_path / "hostile.tar").write_bytes(layer([link("door", "/etc"), entry("door/planted", data=b"x")]))
        with pytest.raises(OSError) as caught:
            await box.upload_tar(tmp_path / "hostile.tar", "/data/link")
        assert caught.value.errno == errno.ELOOP and not await box.exists("/etc/planted")
        (tmp_path / "hostile.tar").write_bytes(b"no archive")
        with pytest.raises(SandboxError, match="not a usable tar archive"):
            await box.upload_tar(tmp_path / "hostile.tar", "/data/x")

    _with_box(tmp_path, body)


# a stream as a taken-over init could send it: (kind, path, content)
STREAMS = {
    "parent": [("f", "../planted", b"x")],
    "absolute": [("f", "/tmp/belayer-planted", b"x")],
    "through a link": [("l", "door", b"."), ("f", "door/planted", b"x")],
    "twice": [("f", "a", b"x"), ("f", "a", b"y")],
    "file as folder": [("f", "a", b"x"), ("f", "a/b", b"y")],
    "link over a folder": [("d", "a", b""), ("l", "a", b"b")],
    "folder without a name": [("d", "", b"")],
    "unknown kind": [("x", "a", b"")],
    "long link": [("l", "a", b"x" * 70000)],
    "no end": [],
}


@pytest.mark.parametrize("name", STREAMS)
def test_hostile_streams(tmp_path, name):
    from belayer.sandbox._copying import _END, _HEAD

    stream = io.BytesIO()
    for kind, path, content in STREAMS[name]:
        stream.write(_HEAD.pack(ord(kind), 0o7777, 0, len(path), len(content)) + path.encode() + content)
    if name != "no end":
        stream.write(_END)
    stream.seek(0)
    with pytest.raises((SandboxError, OSError)):
        read_into(stream, tmp_path / "target", 1 << 20)
    assert not list(tmp_path.iterdir()) and not Path("/tmp/belayer-planted").exists()


def test_links_of_a_download_stay_inside(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("of the host")

    async def body(box: Sandbox) -> None:
        await run(
            box,
            f"""mkdir -p /d/a/b/c; cd /d; echo mine > f; ln -s {outside}/secret s1; ln -s {outside} s2
            ln -s ../../../outside/secret a/b/s3; ln -s ../../../.. a/b/c/s4; ln -s ../.. a/b/up; ln -s a/b/up/../x s5
            ln -s ../../f a/b/good; mkfifo pipe; cp -a /dev/null null 2>/dev/null; ln f hard; chmod 6755 f; true""",
        )
        copied = await box.download("/d", tmp_path / "got")
        assert set(copied.skipped) >= {"s1", "s2", "a/b/s3", "a/b/c/s4", "s5", "pipe"}
        for path in (tmp_path / "got").rglob("*"):
            if path.is_symlink():
                assert (tmp_path / "got") in (path.resolve(), *path.resolve().parents), path
        assert (tmp_path / "got/a/b/good").read_text() == "mine\n"
        assert (tmp_path / "got/f").stat().st_mode & 0o7000 == 0
        # a folder that becomes a link, and back, while it is copied
        swap = "while :; do mv w o; mv l w; mv w l; mv o w; done"
        await shell(box, f"(cd /d; mkdir w; echo x > w/secret; ln -s {outside} l; {swap}) >/dev/null 2>&1 &")
        await eventually("the swapping began", lambda: box.exists("/d/w"))
        for number in range(15):
            try:
                await box.download("/d", tmp_path / f"try{number}")
            except OSError:
                continue
            for secret in (tmp_path / f"try{number}").rglob("secret"):
                assert secret.read_text() == "x\n"
        assert (outside / "secret").read_text() == "of the host"

    _with_box(tmp_path, body)


def _with_box(tmp_path: Path, check) -> None:
    async def body() -> None:
        async with sandboxes(tmp_path / "checkpoints") as manager:
            box = await manager.create("s")
            await check(box)
            assert await box.healthy() is None

    asyncio.run(body())
