"""Images from elsewhere: imported once, checked, and what they say about running respected."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import needs_sandboxes
from tests.image_kit import archive_of, docker_archive, entry, folder, layer, link, oci_layout
from tests.sandbox_kit import run, sandboxes, shell

from belayer.errors import ImageError
from belayer.sandbox import images
from belayer.sandbox.image_import import import_image
from belayer.sandbox.store import Store

pytestmark = [pytest.mark.integration, needs_sandboxes]

PROGRAMS = ("bash", "dash", "cat", "ls", "env", "stat", "true", "rm")
# what `docker image save` and others put on top: one layer that replaces, removes and links
UPPER = [
    folder("srv"), entry("srv/app", data=b"#!/bin/bash\necho from the image\n", mode=0o755),
    link("srv/same", "srv/app", tarfile.LNKTYPE), entry("etc/.wh.removed"), entry("opt/.wh..wh..opq"), entry("opt/new"),
    entry("dev/planted", tarfile.BLKTYPE, devmajor=7, devminor=0),
]  # fmt: skip
CONFIG = {"Env": ["PATH=/srv:/usr/bin:/bin", "WHO=image", "EMPTY="], "WorkingDir": "/work/dir", "User": "nobody"}


def content_of(root: Path, path: str) -> bytes:
    """Of a file in the image, its links followed inside the image."""
    place = root / path[1:]
    while place.is_symlink():
        target = os.readlink(place)
        place = root / target[1:] if target.startswith("/") else place.parent / target
    return place.read_bytes()


@pytest.fixture(scope="module")
def layers() -> list[bytes]:
    """A root file system with bash and little else, out of the base image, and a layer above it."""
    store = Store.open()
    try:
        root = images.find(store, "base").path
        loader = next(path for folder in ("lib64", "lib") for path in sorted((root / folder).glob("ld-linux*")))
        inside = "/" + str(loader.relative_to(root))
        needed = {inside, "/bin/sh"}
        for name in PROGRAMS:
            program = next(path for path in (f"/bin/{name}", f"/usr/bin/{name}") if (root / path[1:]).is_file())
            command = ["chroot", str(root), inside, "--list", program]
            listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            needed |= {program, *(word for word in listing.split() if word.startswith("/"))}
        base = layer([entry(path[1:], data=content_of(root, path), mode=0o755) for path in sorted(needed)])
    finally:
        store.close()
    old = [
        folder("etc"),
        entry("etc/removed"),
        entry("etc/passwd", data=b"root:x:0:0::/root:/bin/bash\n"),
        entry("opt/old"),
    ]
    return [base, layer(old), layer(UPPER)]


@pytest.fixture
def store() -> Iterator[Store]:
    opened = Store.open()
    before = set(images.names(opened))
    try:
        yield opened
        assert not images.sweep(opened), "an unfinished import was left behind"
    finally:
        for name in set(images.names(opened)) - before:
            if name.startswith("t-"):  # others may import too
                images.remove(opened, name)
        opened.close()


def test_every_form_of_an_image_is_the_same_image(tmp_path, layers, store):
    layout = oci_layout(tmp_path / "layout", layers, **CONFIG)
    first = import_image(store, "t-layout", str(layout))
    tree = store.images / "t-layout"
    assert (tree / "srv/app").stat().st_ino == (tree / "srv/same").stat().st_ino
    assert not (tree / "etc/removed").exists() and not (tree / "opt/old").exists() and (tree / "opt/new").exists()
    assert not (tree / "dev/planted").exists() and (tree / "work/dir").is_dir()
    assert (first.config.env["WHO"], first.config.workdir, first.config.user) == ("image", "/work/dir", "nobody")
    said: list[str] = []
    # the same content under another name is not unpacked again
    archive = archive_of(layout, tmp_path / "image.tar")
    second = import_image(store, "t-archive", str(archive), progress=said.append)
    assert second.digest == first.digest == images.tree_digest(store.images / "t-archive")[0]
    if store.trees.kind == "btrfs":
        assert any("already" in line for line in said)
    images.remove(store, "t-layout")
    images.remove(store, "t-archive")
    docker = docker_archive(tmp_path / "docker.tar", [*layers, layers[-1]], **CONFIG)
    third = import_image(store, "t-docker", str(docker), ref="small")
    assert third.digest == first.digest
    again = import_image(store, "t-folder", str(store.images / "t-docker"))
    assert again.digest == first.digest

    async def body() -> None:
        async with sandboxes(tmp_path / "c", image="t-docker") as manager:
            box = await manager.create("s")
            assert (
                await run(box, "app; pwd; echo $WHO[$EMPTY]; echo $HOME")
                == "from the image\n/work/dir\nimage[]\n/root\n"
            )
            assert (await box.exec("echo $WHO $PATH", env={"WHO": "me", "PATH": "/bin"})).stdout == b"me /bin\n"
            assert (
                await shell(box, "app; pwd; echo $WHO; export WHO=changed; cd /srv")
                == "from the image\n/work/dir\nimage\n"
            )
            manifest = await box.checkpoint(action=1)
            images.remove(store, "t-docker")  # a checkpoint does not need it
            box = await manager.restore("s", manifest.id)
            assert await run(box, "pwd; echo $WHO") == "/work/dir\nimage\n"
            assert await shell(box, "pwd; echo $WHO") == "/srv\nchanged\n"
            assert (await box.shell("exit")).shell_ended
            assert await shell(box, "pwd; echo $WHO") == "/work/dir\nimage\n"
            await run(box, "rm -rf /work")
            assert await run(box, "echo still") == "still\n"

    asyncio.run(body())


def test_images_that_are_refused(tmp_path, layers, store):
    def refused(path: Path, match: str, **options) -> None:
        with pytest.raises(ImageError, match=match):
            import_image(store, "t-bad", str(path), **options)
        assert "t-bad" not in images.names(store)

    refused(tmp_path / "nothing", "there is no")
    refused(oci_layout(tmp_path / "arch", layers, architecture="mips"), "mips")
    refused(oci_layout(tmp_path / "shell", [layers[1]]), "/bin/sh")
    refused(oci_layout(tmp_path / "big", layers), "more than", limit_bytes=1 << 20)
    (tmp_path / "text").write_text("no archive")
    refused(tmp_path / "text", "not an image archive")

    damaged = oci_layout(tmp_path / "damaged", layers)
    blob = max((damaged / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    refused(damaged, "digest")

    swapped = oci_layout(tmp_path / "swapped", layers, compress=False)
    index = json.loads((swapped / "index.json").read_text())
    blobs = swapped / "blobs"
    manifest = json.loads((blobs / index["manifests"][0]["digest"].replace(":", "/")).read_text())
    manifest["layers"].reverse()  # every blob is itself, but not the image that the configuration describes
    text = json.dumps(manifest).encode()
    digest = hashlib.sha256(text).hexdigest()
    (blobs / "sha256" / digest).write_bytes(text)
    (swapped / "index.json").write_text(json.dumps({"manifests": [{"digest": f"sha256:{digest}"}]}))
    refused(swapped, "does not uncompress to")
    (swapped / "index.json").write_text(json.dumps({"manifests": [{"digest": "sha256:../../../etc/passwd"}]}))
    refused(swapped, "not a digest")

    zstd = oci_layout(tmp_path / "zstd", [b"\x28\xb5\x2f\xfd" + bytes(600)], compress=False)
    refused(zstd, "zstd")
    hostile = oci_layout(tmp_path / "hostile", [*layers, layer([entry("../../../../tmp/planted", data=b"x")])])
    refused(hostile, "leads out of the image")

    two = oci_layout(tmp_path / "two", layers, ref="one:1")
    oci_layout(two, layers[:2], ref="two:2")
    refused(two, "2 of 2")
    assert (
        import_image(store, "t-two", str(two), ref="two:2").files
        < import_image(store, "t-one", str(two), ref="one:1").files
    )
    for name in ("../x", ".hidden", "a/b", ""):
        with pytest.raises(ImageError, match="not a usable image name"):
            import_image(store, name, str(two))


KILLED = """
import sys
from belayer.sandbox.image_import import import_image
from belayer.sandbox.store import Store
store = Store.open()
print("begun", flush=True)
import_image(store, "t-killed", sys.argv[1], progress=lambda text: print(text, flush=True))
"""


def test_a_killed_import_leaves_nothing(tmp_path, layers, store):
    many = layer([entry(f"data/{number}", data=os.urandom(200)) for number in range(6000)])
    layout = oci_layout(tmp_path / "layout", [*layers, many], compress=False)
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(layout)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "layer 4" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert "t-killed" not in images.names(store)
    swept = images.sweep(store)
    assert swept, "it was not killed in the middle"
    assert not [path for line in swept for path in store.images.glob(f"{line.split()[-1]}*")]
    assert import_image(store, "t-killed", str(layout)).files > 6000


def test_the_command_line(tmp_path, layers, store):
    layout = oci_layout(tmp_path / "layout", layers, **CONFIG)

    def belayer(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "belayer.cli", *args], capture_output=True, text=True, check=False)

    done = belayer("image", "import", "t-cli", str(layout))
    assert done.returncode == 0 and "image t-cli:" in done.stdout, done
    listed = json.loads(belayer("image", "list", "--json").stdout)
    assert {item["name"] for item in listed} >= {"base", "t-cli"}
    assert belayer("image", "remove", "t-cli").returncode == 0
    again = belayer("image", "remove", "t-cli")
    assert again.returncode == 1 and "no sandbox image 't-cli'" in again.stderr and "next:" in again.stderr


@pytest.mark.skipif(shutil.which("podman") is None, reason="podman is not installed")
def test_from_the_store_of_podman(tmp_path, layers, store, request):
    layout = oci_layout(tmp_path / "layout", layers, ref="t-podman", **CONFIG)
    short = Path(tempfile.mkdtemp(prefix="bly-"))  # podman takes no longer path than 50 characters for its runroot
    request.addfinalizer(lambda: shutil.rmtree(short))
    options = ["--root", str(short / "root"), "--runroot", str(short / "run"), "--storage-driver", "vfs"]
    podman = tmp_path / "bin" / "podman"
    podman.parent.mkdir()
    podman.write_text(f'#!/bin/sh\nexec {shutil.which("podman")} {" ".join(options)} "$@"\n')
    podman.chmod(0o755)
    archive = archive_of(layout, tmp_path / "image.tar")
    loaded = subprocess.run([podman, "image", "load", "-i", archive], capture_output=True, text=True, check=False)
    if loaded.returncode:
        pytest.skip(f"podman cannot load an image here: {loaded.stderr.strip()[-200:]}")
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{podman.parent}:{path}"
    try:
        with pytest.raises(ImageError, match="podman cannot save"):
            import_image(store, "t-podman", "podman:no-such-image")
        info = import_image(store, "t-podman", "podman:localhost/t-podman")
    finally:
        os.environ["PATH"] = path
    assert info.config.env["WHO"] == "image"
    assert info.digest == import_image(store, "t-direct", str(layout)).digest
