"""Manifests, image files, retention and the host check: the parts of a checkpoint that need no sandbox."""

from __future__ import annotations

import os
import random
import threading

import msgspec
import pytest

from belayer.checkpoint.host import Host, misfits, this_host
from belayer.checkpoint.manifest import (
    ImageFile,
    Manifest,
    ProcessState,
    Timings,
    decode_manifest,
    encode_manifest,
    read_manifest,
    write_manifest,
)
from belayer.checkpoint.retention import garbage
from belayer.errors import CheckpointDamaged
from belayer.sandbox import _pins
from belayer.sandbox._image_files import copy_images, describe_images, verify_images

pytestmark = pytest.mark.unit

HERE = Host("x86_64", "6.18.4-x", ["avx2", "sse2"], "4.2.1")


def manifest(checkpoint: str = "a", sandbox: str = "s", **changes) -> Manifest:
    whole = Manifest(
        id=checkpoint,
        sandbox=sandbox,
        rollout="r",
        attempt=0,
        generation=1,
        action=1,
        context_hash="h",
        level="full",
        image="base",
        image_digest="sha256:0",
        hostname="sandbox",
        fs_identity="u:1",
        process=ProcessState(1, 2, 3),
        images={"pages-1.img": ImageFile(3, 4)},
        netns=1,
        parent=None,
        created=1.5,
        sequence=1,
        image_bytes=10,
        timings=Timings(dump_s=1, frozen_s=1, fs_s=1, total_s=1),
        host=HERE,
    )
    return msgspec.structs.replace(whole, **changes)


def test_no_flipped_bit_of_a_manifest_goes_unseen():
    data = encode_manifest(manifest())
    assert decode_manifest(data, "x") == manifest()
    assert msgspec.json.decode(data)["id"] == "a", "it is JSON for everybody else"
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << random.Random(at).randrange(8)
        with pytest.raises(CheckpointDamaged):
            decode_manifest(bytes(damaged), "x")
    for cut in range(0, len(data) - 1, 50):
        with pytest.raises(CheckpointDamaged):
            decode_manifest(data[:cut], "x")
    with pytest.raises(CheckpointDamaged, match="format 1"):
        decode_manifest(encode_manifest(manifest(format=1)), "x")


def test_manifests_appear_whole(tmp_path):
    path = tmp_path / "a.b.json"
    for durable in (False, True):
        write_manifest(path, manifest(durability="host"), durable=durable)
        assert read_manifest(path).durability == "host"
        assert [entry.name for entry in tmp_path.iterdir()] == ["a.b.json"]
    with pytest.raises(CheckpointDamaged, match="there is no checkpoint none"):
        read_manifest(tmp_path / "none.json")
    with pytest.raises(CheckpointDamaged, match="cannot be read"):
        read_manifest(tmp_path)


def test_image_files_are_copied_as_described_or_not_at_all(tmp_path, monkeypatch):
    on_disk = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (on_disk.append(os.fstat(fd).st_size), real(fd)))
    source = tmp_path / "source"
    source.mkdir()
    (source / "pages-1.img").write_bytes(os.urandom((9 << 20) + 123))
    (source / "core-1.img").write_bytes(b"")
    (source / "dump.log").write_text("not an image")
    files = describe_images(source)
    assert sorted(files) == ["core-1.img", "pages-1.img"]
    pauses = []
    copy_images(source, tmp_path / "copy", files, lambda: pauses.append(1))
    assert len(pauses) == 10 and describe_images(tmp_path / "copy") == files
    assert on_disk == [8 << 20], "more than that waited for the disk"
    verify_images(tmp_path / "copy", files)
    with pytest.raises(FileExistsError):
        copy_images(source, tmp_path / "copy", files, lambda: None)
    with open(source / "pages-1.img", "r+b") as file:
        file.seek(5 << 20)
        file.write(b"damage")
    with pytest.raises(CheckpointDamaged, match=r"pages-1\.img is damaged: its checksum"):
        copy_images(source, tmp_path / "other", files, lambda: None)
    (tmp_path / "copy" / "pages-1.img").write_bytes(b"short")
    with pytest.raises(CheckpointDamaged, match="has 5 bytes"):
        verify_images(tmp_path / "copy", files)
    (tmp_path / "copy" / "pages-1.img").unlink()
    with pytest.raises(CheckpointDamaged, match=r"pages-1\.img is missing"):
        verify_images(tmp_path / "copy", files)
    with pytest.raises(CheckpointDamaged, match="cannot be read"):
        verify_images(tmp_path / "nowhere", files)


def keep(groups: dict[str, list[Manifest]], **options) -> set[str]:
    everything = {m.id for group in groups.values() for m in group}
    rules = {"keep": 2, "pinned": set(), "running": set(), "budget": 1000, **options}
    dead = garbage(groups, **rules)
    assert [m.sequence for m in dead] == sorted(m.sequence for m in dead)
    return everything - {m.id for m in dead}


def test_what_is_kept():
    group = [manifest(str(n), sequence=n) for n in range(1, 6)]
    assert keep({"s": group}) == {"4", "5"}
    assert keep({"s": group}, pinned={"1", "nothing of ours"}) == {"1", "4", "5"}
    group[1] = msgspec.structs.replace(group[1], durability="host")
    assert keep({"s": group}) == {"2", "4", "5"}, "the newest that survives a reboot"
    group[4] = msgspec.structs.replace(group[4], durability="host")
    assert keep({"s": group}) == {"4", "5"}
    assert keep({}) == set() and keep({"s": []}) == set()


def test_the_budget_takes_the_least_needed_first():
    groups = {
        name: [manifest(f"{name}{n}", name, sequence=10 * n + at) for n in (1, 2)] for at, name in enumerate("abc")
    }
    assert keep(groups, budget=60) == {"a1", "a2", "b1", "b2", "c1", "c2"}
    assert keep(groups, budget=59) == {"a2", "b1", "b2", "c1", "c2"}
    assert keep(groups, budget=30) == {"a2", "b2", "c2"}
    assert keep(groups, budget=29) == {"b2", "c2"}
    assert keep(groups, budget=29, running={"a"}) == {"a2", "c2"}
    assert keep(groups, budget=0, running={"a", "c"}) == {"a2", "c2"}, "a running sandbox can always be restored"
    assert keep(groups, budget=0, pinned={"b1"}) == {"b1"}
    groups["c"][0] = msgspec.structs.replace(groups["c"][0], durability="host")
    groups["b"][0] = msgspec.structs.replace(groups["b"][0], sequence=99)
    assert keep(groups, budget=40) >= {"c1"}, "what survives a reboot goes after the other spare ones"


def test_which_hosts_can_take_over_process_images():
    def change(**fields) -> list[str]:
        return misfits(msgspec.structs.replace(HERE, **fields), HERE)

    assert change() == []
    assert change(kernel="6.1.0", criu="4.2", cpu=["sse2"]) == [], "newer and more is fine"
    assert change(kernel="6.18.99") == [], "a patch level says nothing about what a kernel can do"
    assert change(kernel="6.19.0-rc1") == ["it was made on kernel 6.19.0-rc1, this is 6.18.4-x"]
    assert change(criu="4.10") == ["it was made by CRIU 4.10, here is 4.2.1"]
    assert change(cpu=["sse2", "avx512f"]) == ["this CPU lacks avx512f"]
    assert change(machine="aarch64", criu="9") == ["it was made on aarch64, this is x86_64"]
    assert len(change(kernel="7.0", criu="5.0", cpu=["amx_tile"])) == 3
    real = this_host("4.2.1")
    assert misfits(real, real) == [] and real.cpu and real.kernel == os.uname().release


def test_pins(tmp_path):
    with _pins.pinned(tmp_path, "a") as first, _pins.pinned(tmp_path, "a") as second:
        assert first and second
        with _pins.unpinned(tmp_path, "a") as free, _pins.unpinned(tmp_path, "b") as other:
            assert not free and other
    with _pins.unpinned(tmp_path, "a") as free:
        assert free
        with _pins.pinned(tmp_path, "a") as there:
            assert not there, "it is being deleted"
    assert not list((tmp_path / "pins").iterdir())

    # readers and the one who deletes, over and over: never both
    reading, deleting, clashes = [False, False], [False], []

    def read(mine: int) -> None:
        for _ in range(300):
            with _pins.pinned(tmp_path, "c") as there:
                reading[mine] = there
                if there and deleting[0]:
                    clashes.append("a reader came in")
                reading[mine] = False

    def delete() -> None:
        for _ in range(300):
            with _pins.unpinned(tmp_path, "c") as free:
                deleting[0] = free
                if free and any(reading):
                    clashes.append("deleted under a reader")
                deleting[0] = False

    threads = [threading.Thread(target=read, args=(mine,)) for mine in (0, 1)] + [threading.Thread(target=delete)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes
    _pins.forget_unknown(tmp_path, set())
    assert not list((tmp_path / "pins").iterdir())
