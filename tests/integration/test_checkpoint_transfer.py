"""A checkpoint as one file: exported, everything else deleted, imported elsewhere, restored as it was."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.checkpoint_kit import make_tiny_image
from tests.conftest import needs_sandboxes
from tests.sandbox_kit import kill_init, shell

from belayer.checkpoint.manifest import decode_manifest, encode_manifest, read_manifest
from belayer.cli.checkpoint import list_command
from belayer.config import SandboxConfig
from belayer.errors import CheckpointDamaged, CheckpointRefused, CheckpointUnfit, RunInUse, StorageFull
from belayer.ownership import RunLabel
from belayer.sandbox import Sandboxes, _pins
from belayer.sandbox.store import Store
from belayer.sandbox.transfer import export_checkpoint, import_checkpoint

pytestmark = [pytest.mark.integration, needs_sandboxes]

ROOT = Path(__file__).parents[2]
STATE = """
cd /work/deep
x='two words'; declare -A map=([a]=1 [b]=2); greet() { echo "hello $1"; }; alias ll='ls -l'
(n=0; while :; do n=$((n+1)); echo $n >> /work/count; sleep 0.05; done) &
until test -s /work/count; do sleep 0.01; done
exec 7<>/work/open; echo unread >&7
"""
CHECK = 'echo "$PWD|$x|${map[b]}|$(greet you)|$(alias ll)|$(jobs -r | { read a; echo ${a:0:3}; })"'


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> dict[str, Path]:
    """A store of each kind, with the image that a run needs to start; nothing else goes from one to the other."""
    folders = {kind: tmp_path_factory.mktemp(f"{kind}-store") for kind in ("btrfs", "overlay")}
    for kind, folder in folders.items():
        with the_store(folder, kind) as store:
            make_tiny_image(store, folder)
    return folders


@asynccontextmanager
async def opened(checkpoints: Path, store: Path, kind: str, **more: str) -> AsyncIterator[Sandboxes]:
    config = SandboxConfig.model_validate(
        {"image": "test-tiny", "store": store, "store_bytes": 1 << 30, "store_kind": kind, **more}
    )
    with RunLabel.new("transfer test") as label:
        manager = await Sandboxes.open(config, label, checkpoints=checkpoints)
        try:
            yield manager
        finally:
            await manager.close()


@contextmanager
def the_store(folder: Path, kind: str) -> Iterator[Store]:
    store = Store.open(folder, 1 << 30, kind=kind)  # type: ignore[arg-type]
    try:
        yield store
    finally:
        store.close()


def make_files(root: Path) -> None:
    """One of each kind that a file system can hold."""
    work = root / "work"
    (work / "deep").mkdir(parents=True)
    (work / "plain").write_text("plain")
    os.link(work / "plain", work / "hard-link")
    (work / "link").symlink_to("/no/where")
    with open(work / "sparse", "wb") as file:
        file.truncate(16 << 20)
        file.seek(8 << 20)
        file.write(b"in the middle")
    (work / "set-id").write_text("#!/bin/sh\n")
    os.chown(work / "set-id", 65534, 65534)
    (work / "set-id").chmod(0o6755)
    os.setxattr(work / "plain", "user.note", b"\0binary\xff")
    os.setxattr(work / "deep", "trusted.note", b"t")
    os.mkfifo(work / "fifo", 0o640)
    os.mknod(work / "device", 0o020600, os.makedev(1, 3))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(work / "socket"))
    (work / "socket").chmod(0o750)
    (work / "empty \n name é").touch()
    (work / ("long-" * 40)).write_text("x")
    (work / "open").write_text("")
    os.utime(work / "plain", ns=(1, 1_234_567_890_123_456_789))


def described(root: Path) -> dict[str, tuple]:
    """Everything below /work that a program can see, except for what the background job changes."""
    found = {}
    for folder, folders, names in os.walk(root / "work"):
        for name in [*folders, *names]:
            path = Path(folder, name)
            status = path.lstat()
            content: object = os.readlink(path) if path.is_symlink() else ""
            if path.is_file() and not path.is_symlink():
                content = path.read_bytes()
            attributes = {
                key: os.getxattr(path, key, follow_symlinks=False) for key in os.listxattr(path, follow_symlinks=False)
            }
            if name != "count":
                size, links = (0, 0) if path.is_dir() else (status.st_size, status.st_nlink)
                found[str(path.relative_to(root))] = (
                    status.st_mode, status.st_uid, status.st_gid, status.st_rdev, size, links, status.st_mtime_ns,
                    content, attributes,
                )  # fmt: skip
    return found


@pytest.mark.parametrize(("source_kind", "target_kind"), [("overlay", "btrfs"), ("btrfs", "overlay")])
def test_a_checkpoint_moves_to_another_store(tmp_path, stores, source_kind, target_kind):
    here, there, archive = stores[source_kind], stores[target_kind], tmp_path / "one.tar"

    async def export() -> tuple[str, dict[str, tuple], int]:
        async with opened(tmp_path / "run" / "checkpoints", here, source_kind) as manager:
            box = await manager.create("s")
            make_files(box.root)
            for line in (STATE,):
                await shell(box, line)
            manifest = await box.checkpoint(action=7)
            kill_init(box)
            await manager.retire(box)
            files = await asyncio.to_thread(snapshot_files, manager, manifest.id)
            count = files.pop("count")[0]
            # the run is alive, and its checkpoint in memory only
            await asyncio.to_thread(
                export_checkpoint, tmp_path / "run" / "checkpoints", manifest.id, archive, manager.store
            )
            with pytest.raises(CheckpointRefused, match="exists already"):
                export_checkpoint(tmp_path / "run" / "checkpoints", manifest.id, archive, manager.store)
            with pytest.raises(RunInUse):
                import_checkpoint(archive, tmp_path / "run" / "checkpoints", manager.store)
            await manager.discard("s")
            return manifest.id, files, count

    checkpoint, files, count = asyncio.run(export())
    shutil.rmtree(tmp_path / "run")

    async def restore() -> None:
        async with opened(tmp_path / "new" / "checkpoints", there, target_kind) as manager:
            newest = manager.newest("s")
            assert newest is not None and (newest.id, newest.action) == (checkpoint, 7)
            box = await manager.restore("s", checkpoint)
            assert await shell(box, CHECK) == "/work/deep|two words|2|hello you|alias ll='ls -l'|[1]\n"
            assert await shell(box, "read -t 0 -u 7; cat /work/open") == "unread\n"
            now = described(box.root)
            assert now == files, [name for name in files if files[name] != now.get(name)]
            assert (box.root / "work" / "sparse").stat().st_blocks < 1000, "holes were filled"
            numbers = [int(line) for line in (await box.read("/work/count")).split()]
            assert numbers == list(range(1, len(numbers) + 1))
            await asyncio.sleep(0.3)
            assert len((await box.read("/work/count")).split()) > max(count, len(numbers)), "the job does not go on"
            # and it is a checkpoint like any other: from here on everything works as usual
            again = await box.checkpoint(action=8)
            box = await manager.restore("s", again.id)
            assert (await shell(box, "echo $x")) == "two words\n"
            await manager.discard("s")

    with the_store(there, target_kind) as store:
        imported = import_checkpoint(archive, tmp_path / "new" / "checkpoints", store)
        assert imported.durability == "host"
        with pytest.raises(CheckpointRefused, match="already"):
            import_checkpoint(archive, tmp_path / "new" / "checkpoints", store)
        assert not list(store.images.glob(".import-*"))
    asyncio.run(restore())


@pytest.mark.parametrize("level", ["fs+shell", "fs"])
def test_lower_levels_travel_too(tmp_path, stores, level):
    """Without process images: an archive fits every host, and what the level promises comes back."""
    archive = tmp_path / "one.tar"

    async def export() -> str:
        async with opened(tmp_path / "run" / "checkpoints", stores["btrfs"], "btrfs", allow_level=level) as manager:
            box = await manager.create("s")
            await shell(box, "export x=1; echo 1 > /x")
            manifest = await box.checkpoint(action=1, level=level)
            assert manifest.level == level and manifest.host is None
            await asyncio.to_thread(
                export_checkpoint, tmp_path / "run" / "checkpoints", manifest.id, archive, manager.store
            )
            await manager.discard("s")
            return manifest.id

    async def restore(checkpoint: str) -> None:
        async with opened(tmp_path / "new" / "checkpoints", stores["overlay"], "overlay", allow_level=level) as manager:
            box = await manager.restore("s", checkpoint)
            assert await shell(box, "echo $x; cat /x") == ("1\n1\n" if level == "fs+shell" else "\n1\n")
            await manager.discard("s")

    checkpoint = asyncio.run(export())
    with the_store(stores["overlay"], "overlay") as store:
        import_checkpoint(archive, tmp_path / "new" / "checkpoints", store)
    asyncio.run(restore(checkpoint))


def snapshot_files(manager: Sandboxes, checkpoint: str) -> dict:
    """What is in the snapshot, by way of a root that is made from it; and how far the job had counted."""
    with RunLabel.new("transfer test, look") as label:
        root = manager.store.trees.root(manager.store.root / "runs" / manager.label.name / "look", label.dir / "look")
        manager.store.trees.make_root(manager.checkpoints.data.snapshots / checkpoint, root)
        try:
            found: dict = described(root.path)
            counted = root.path / "work" / "count"
            found["count"] = (len(counted.read_text().split()) if counted.exists() else 0,)
            return found
        finally:
            manager.store.trees.remove_root(root)


def test_archives_that_cannot_be_imported(tmp_path, stores):
    """Damaged anywhere, cut off, of another host, with no room: nothing of them stays."""
    folder, archive = stores["btrfs"], tmp_path / "one.tar"

    async def make() -> str:
        async with opened(tmp_path / "run" / "checkpoints", folder, "auto") as manager:
            box = await manager.create("s")
            await shell(box, "x=1")
            manifest = await box.checkpoint(action=1)
            data = manager.checkpoints.data

            # while somebody exports it, it is not deleted; afterwards it is
            with _pins.pinned(data.checkpoints, manifest.id) as there:
                assert there
                assert not data.remove(manifest.id)
                await manager.discard("s")
                assert not manager.manifests("s")
                await asyncio.to_thread(
                    export_checkpoint, tmp_path / "run" / "checkpoints", manifest.id, archive, manager.store
                )
            manager.checkpoints.collect()
            for _ in range(100):
                await asyncio.sleep(0.02)
                if not data.manifest_path(manifest.id).exists():
                    break
            else:
                raise AssertionError("the checkpoint stays after its export")

            box = await manager.create("other")
            second = await box.checkpoint(action=1)
            small = tmp_path / "small"
            small.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "belayer-test", str(small)], check=True)
            try:
                with pytest.raises(StorageFull, match=r"one\.tar"):
                    export_checkpoint(data.checkpoints, second.id, small / "one.tar", manager.store)
                assert not list(small.iterdir()), "half an archive"
                assert await shell(box, "echo on") == "on\n"
                with pytest.raises(StorageFull), the_store(folder, "auto") as store:
                    import_checkpoint(padded(archive, tmp_path), small / "checkpoints", store)
                assert not list((small / "checkpoints").glob("*.json"))
                assert not list((small / "checkpoints" / "images").iterdir())
            finally:
                subprocess.run(["umount", "-l", str(small)], check=True)
            await manager.discard("other")
            return manifest.id

    asyncio.run(make())
    whole = archive.read_bytes()
    size = len(whole)
    with tarfile.open(archive) as members:
        manifest = decode_manifest(members.extractfile("manifest.json").read(), "")  # type: ignore[union-attr]
        contents = [(m.offset_data, m.size) for m in members if m.size]
    assert manifest.host is not None
    with the_store(folder, "auto") as store:
        before = [sorted(path.name for path in place.iterdir()) for place in (store.images, store.root / "runs-data")]

        def refused(content: bytes, kind: type[Exception], match: str | None = None) -> None:
            bad = tmp_path / "bad.tar"
            bad.write_bytes(content)
            with pytest.raises(kind, match=match):
                import_checkpoint(bad, tmp_path / "new" / "checkpoints", store)
            left = [path.name for path in (tmp_path / "new" / "checkpoints").rglob("*") if path.is_file()]
            assert set(left) <= {"run_id"}, left
            now = [sorted(path.name for path in place.iterdir()) for place in (store.images, store.root / "runs-data")]
            assert now == before, "something was left in the store"

        (tmp_path / "new").mkdir()
        for offset, length in [*contents[:2], *contents[2:-1:9], contents[-2], contents[-1]]:
            damaged = bytearray(whole)
            damaged[offset + length // 2] ^= 1
            refused(bytes(damaged), CheckpointDamaged)
        for cut in (0, 300, contents[0][0] + 10, size // 3, contents[-1][0] - 600):
            refused(whole[:cut], CheckpointDamaged, "not a checkpoint archive, or is damaged|damaged|missing")
        for changed, match in (
            ({"kernel": "99.1.0"}, "made on kernel 99.1.0"),
            ({"criu": "99.0"}, "CRIU 99.0"),
            ({"machine": "riscv64"}, "riscv64"),
            ({"cpu": [*manifest.host.cpu, "amx_tile", "avx512f"]}, "this CPU lacks"),
        ):
            other = msgspec.structs.replace(manifest, host=msgspec.structs.replace(manifest.host, **changed))
            refused(with_manifest(whole, encode_manifest(other)), CheckpointUnfit, match)
        imported = import_checkpoint(archive, tmp_path / "new" / "checkpoints", store)
        assert read_manifest(tmp_path / "new" / "checkpoints" / f"{imported.id}.json") == imported


def padded(archive: Path, folder: Path) -> Path:
    """The archive with one image file that is larger than the disk it is imported to."""
    with tarfile.open(archive) as source:
        manifest = decode_manifest(source.extractfile("manifest.json").read(), "")  # type: ignore[union-attr]
        target = folder / "padded.tar"
        with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as out:
            for member in source:
                content = source.extractfile(member).read()  # type: ignore[union-attr]
                if member.name.startswith("images/pages"):
                    content += bytes(8 << 20)
                    member.size = len(content)
                out.addfile(member, io.BytesIO(content))
    assert manifest.images
    return target


def with_manifest(archive: bytes, manifest: bytes) -> bytes:
    """The archive with another manifest: what another kind of host would have written."""
    out = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as source,
        tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as target,
    ):
        for member in source:
            content = source.extractfile(member).read()  # type: ignore[union-attr]
            if member.name == "manifest.json":
                content, member.size = manifest, len(manifest)
            target.addfile(member, io.BytesIO(content))
    return out.getvalue()


def test_the_command_line(tmp_path, stores, capsys):
    """list, export, import, as a user types them."""
    folder = stores["btrfs"]

    async def make() -> str:
        async with opened(tmp_path / "run" / "checkpoints", folder, "auto") as manager:
            return (await (await manager.create("s")).checkpoint(action=3)).id

    checkpoint = asyncio.run(make())
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT / "src"),
        "BELAYER_SANDBOX__STORE": str(folder), "BELAYER_SANDBOX__STORE_BYTES": str(1 << 30),
    }  # fmt: skip

    def belayer(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "belayer.cli", "checkpoint", *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert list_command(tmp_path / "run") == 0
    listed = capsys.readouterr().out
    assert checkpoint in listed and "the driver" in listed and "1 checkpoints" in listed, listed
    exported = belayer("export", tmp_path / "run", checkpoint, tmp_path / "one.tar")
    assert exported.returncode == 0 and "action 3" in exported.stdout, exported
    imported = belayer("import", tmp_path / "one.tar", tmp_path / "new")
    assert imported.returncode == 0, imported
    path = tmp_path / "new" / "checkpoints" / f"{checkpoint}.json"
    path.write_text(path.read_text().replace('"action": 3', '"action": 4'))
    damaged = belayer("list", tmp_path / "new")
    assert damaged.returncode == 1 and checkpoint in damaged.stdout and "checksum" in damaged.stdout, damaged
