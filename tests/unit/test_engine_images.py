"""Images as files: messages, memory that is moved, the store and its locks, the key, the canary's comparison."""

from __future__ import annotations

import ast
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from belayer import protobuf as pb
from belayer.engine.images import canary, key, restore, store, thin
from belayer.engine.memory.host import Region
from belayer.engine.request import Sampling
from belayer.engine.weights.first_epoch import copy_tensors
from belayer.engine.weights.layout import Layout, Slice
from belayer.errors import WeightsError
from belayer.ownership import RunLabel
from belayer.ownership.reap import label_of_process

pytestmark = pytest.mark.unit

PAGE = 4096
LAYOUT = Layout(512, (Slice("a", 0, 256, "float32", (8, 8)), Slice("b", 256, 40, "float32", (10,))), ("tied",))


# -- messages ----------------------------------------------------------------------------------------------------------
FIELDS = st.one_of(
    st.tuples(st.integers(1, 1000), st.just(pb.VARINT), st.integers(0, (1 << 64) - 1)),
    st.tuples(st.integers(1, 1000), st.just(pb.BYTES), st.binary(max_size=300)),
    st.tuples(st.integers(1, 1000), st.just(pb.FIXED64), st.binary(min_size=8, max_size=8)),
    st.tuples(st.integers(1, 1000), st.just(pb.FIXED32), st.binary(min_size=4, max_size=4)),
)


@given(st.lists(FIELDS, max_size=8))
def test_a_message_survives_parsing(fields: list[pb.Field]) -> None:
    assert pb.parse(pb.build(fields)) == fields


def test_a_message_of_the_specification() -> None:
    # protobuf.dev/programming-guides/encoding: field 1 = 150, field 2 = "testing"
    assert pb.parse(bytes.fromhex("089601") + bytes.fromhex("120774657374696e67")) == [(1, 0, 150), (2, 2, b"testing")]


@pytest.mark.parametrize("data", [b"\x08", b"\x12\x05ab", b"\x0b", b"\x08" + b"\xff" * 10])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"cut off|wire type"):
        pb.parse(data)


# -- memory ------------------------------------------------------------------------------------------------------------
HEAP, PLAIN, STACK, SHARED, SMALL = 0x10000, 0x80000, 0x200000, 0x300000, 0x400000


def _image(folder: Path) -> dict[int, bytes]:
    """Five mappings: two that can be moved, and what must stay; returns every page by address.

    The heap and the mapping behind it are adjacent, and one run of pages reaches over both.
    """
    magics = b"MAGIC--1"
    mappings = [
        (HEAP, HEAP + 0x40000, 0x22, 1 << 0 | 1 << 9 | 1 << 5),
        (HEAP + 0x40000, HEAP + 0x60000, 0x22, 1 << 0 | 1 << 9),
        (PLAIN, PLAIN + 0x100000, 0x22 | 0x4000, 1 << 0 | 1 << 9),
        (STACK, STACK + 0x40000, 0x22 | 0x100, 1 << 0 | 1 << 9),
        (SHARED, SHARED + 0x40000, 0x21, 1 << 0 | 1 << 8),
        (SMALL, SMALL + 0x40000, 0x22, 1 << 0 | 1 << 9),
    ]
    vmas = [
        pb.build([(1, 0, s), (2, 0, e), (3, 0, 0), (4, 0, 0), (5, 0, 3), (6, 0, flags), (7, 0, status), (8, 0, 1)])
        for s, e, flags, status in mappings
    ]
    mm = pb.build([(6, 0, HEAP), *((14, 2, vma) for vma in vmas), (15, 0, 1)])
    pb.write_image(folder / "mm-2.img", magics, [mm])
    runs = [(HEAP + 0x1000, 90), (PLAIN, 20), (PLAIN + 0x80000, 3), (STACK, 30), (SHARED, 30), (SMALL, 2)]
    pages: dict[int, bytes] = {}
    for start, count in runs:
        for i in range(count):
            pages[start + i * PAGE] = struct.pack("<Q", start + i) * (PAGE // 8)
    (folder / "pages-7.img").write_bytes(b"".join(pages.values()))
    entries = [pb.build([(1, 0, start), (2, 0, count), (4, 0, 4)]) for start, count in runs]
    pb.write_image(folder / "pagemap-2.img", magics, [pb.build([(1, 0, 7)]), *entries])
    pb.write_image(folder / "files.img", magics, [pb.build([(1, 0, 1), (2, 0, 41), (3, 2, b"")])])
    return pages


def test_moved_memory_is_where_the_mappings_say(tmp_path: Path) -> None:
    pages = _image(tmp_path)
    moved = thin.make_thin(tmp_path, Path("/published"), 2)

    _magics, (mm,) = pb.read_image(tmp_path / "mm-2.img")
    fields = pb.parse(mm)
    assert [number for number, _, _ in fields] == [6, *[14] * 6, 15]
    mappings = [pb.numbers(pb.parse(vma)) for vma in pb.messages(fields, 14)]
    _magics, entries = pb.read_image(tmp_path / "files.img")
    added = pb.messages(pb.parse(entries[-1]), 3)[0]
    file_id = pb.numbers(pb.parse(added))[1]
    memory = (tmp_path / thin.MEMORY).read_bytes()
    assert pb.messages(pb.parse(added), 6) == [b"/published/memory.img"] and file_id == 42
    assert pb.numbers(pb.parse(added))[8] == len(memory)

    found: dict[int, bytes] = {}
    for vma in mappings:
        start, end, private_file = vma[1], vma[2], bool(vma[7] & 1 << 6)
        assert private_file == (start in (HEAP, HEAP + 0x40000, PLAIN))
        if private_file:
            assert vma[4] == file_id and not vma[6] & 0x20 and not vma[7] & 1 << 9 and vma[10] == os.O_RDONLY
            for page in range(0, end - start, PAGE):
                content = memory[vma[3] + page : vma[3] + page + PAGE]
                if content.strip(b"\0"):
                    found[start + page] = content
                else:
                    assert start + page not in pages
        else:
            assert vma[4] == 0 and 10 not in vma
    assert moved == len(found) * PAGE

    _magics, (_head, *left) = pb.read_image(tmp_path / "pagemap-2.img")
    rest, at = (tmp_path / "pages-7.img").read_bytes(), 0
    for entry in left:
        numbers = pb.numbers(pb.parse(entry))
        assert numbers[4] == 4
        for i in range(numbers[2]):
            found[numbers[1] + i * PAGE] = rest[at : at + PAGE]
            at += PAGE
    assert at == len(rest) and found == pages
    # holes cost nothing
    assert (tmp_path / thin.MEMORY).stat().st_blocks * 512 < len(memory)


def test_an_image_that_builds_on_another_is_refused(tmp_path: Path) -> None:
    _image(tmp_path)
    magics, (head, first, *rest) = pb.read_image(tmp_path / "pagemap-2.img")
    pb.write_image(tmp_path / "pagemap-2.img", magics, [head, first + pb.build([(3, 0, 1)]), *rest])
    with pytest.raises(ValueError, match="builds on another"):
        thin.make_thin(tmp_path, tmp_path, 2)


def test_a_cut_image_is_refused(tmp_path: Path) -> None:
    _image(tmp_path)
    os.truncate(tmp_path / "pages-7.img", 5 * PAGE + 1)
    with pytest.raises(ValueError, match="cut off"):
        thin.make_thin(tmp_path, tmp_path, 2)


# -- the store ---------------------------------------------------------------------------------------------------------
def _publish(images: store.ImageStore, name: str, nbytes: int = 1 << 20) -> key.Key:
    """Put an image of `nbytes` there, a part of it a hole."""
    made_for = key.Key({"name": name})
    with images.building(made_for) as folder:
        assert folder is not None
        with open(folder / "memory.img", "wb") as file:
            file.write(os.urandom(nbytes // 2))
            file.seek(nbytes, os.SEEK_CUR)
            file.write(os.urandom(nbytes // 2))
        (folder / "core.img").write_bytes(name.encode())
        meta = store.Meta(
            key=made_for.parts,
            sources={"files.py": key._digest(key.PACKAGE / "files.py")},
            layout=LAYOUT,
            canary=[canary.Words("c", [1], [-0.5])],
            inherited={},
            files=store.check_files(folder),
            made_at=time.time(),
            build_s=1.0,
        )
        images.publish(folder, meta)
    return made_for


def test_published_images_are_found_and_others_are_not(tmp_path: Path) -> None:
    images = store.ImageStore(1 << 30, tmp_path)
    first = _publish(images, "first")
    image = images.find(first)
    assert image is not None and image.meta.layout == LAYOUT and image.nbytes >= 1 << 20
    assert images.find(key.Key({"name": "second"})) is None


@pytest.mark.parametrize("file", ["memory.img", "core.img"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "longer"])
@pytest.mark.parametrize("seen_before", [False, True])
def test_damage_is_found_and_the_image_is_gone(tmp_path: Path, file: str, damage: str, seen_before: bool) -> None:
    images = store.ImageStore(1 << 30, tmp_path)
    made_for = _publish(images, "first")
    if seen_before:
        assert images.find(made_for) is not None
    path = tmp_path / made_for.name / file
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-1] ^= 4
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(content[:-1])
    elif damage == "longer":
        path.write_bytes(content + b"x")
    else:
        path.unlink()
    with pytest.raises(store.ImageRefused, match=f"damaged.*{file}"):
        images.find(made_for)
    assert not (tmp_path / made_for.name).exists() and images.find(made_for) is None


def test_a_stale_image_is_refused_by_name(tmp_path: Path) -> None:
    images = store.ImageStore(1 << 30, tmp_path)
    made_for = _publish(images, "first")
    file = tmp_path / made_for.name / "meta.json"
    meta = msgspec.json.decode(file.read_bytes(), type=store.Meta)
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(meta, sources={"files.py": "other"})))
    with pytest.raises(store.ImageRefused, match=r"belayer/files\.py has changed"):
        images.find(made_for)
    assert images.find(made_for) is None


def test_an_unreadable_description_is_refused(tmp_path: Path) -> None:
    images = store.ImageStore(1 << 30, tmp_path)
    made_for = _publish(images, "first")
    (tmp_path / made_for.name / "meta.json").write_bytes(b"{")
    with pytest.raises(store.ImageRefused, match="cannot be read"):
        images.find(made_for)


def test_the_least_recently_used_images_make_room(tmp_path: Path) -> None:
    images = store.ImageStore(int(3.5 * (1 << 20)), tmp_path)
    made = [_publish(images, name) for name in ("a", "b", "c")]
    for age, made_for in enumerate(made):
        os.utime(tmp_path / made_for.name / "meta.json", (1000 + age, 1000 + age))
    assert images.find(made[0]) is not None  # used just now
    newest = _publish(images, "d")
    left = [images.find(made_for) is not None for made_for in (*made, newest)]
    assert left == [True, False, True, True]


def test_an_image_in_use_is_not_evicted(tmp_path: Path) -> None:
    images = store.ImageStore(int(1.5 * (1 << 20)), tmp_path)
    first = _publish(images, "first")
    image = images.find(first)
    assert image is not None
    with image.in_use():
        _publish(images, "second")
        assert image.folder.exists()
    _publish(images, "third")
    assert not image.folder.exists()
    with pytest.raises(store.ImageRefused, match="being removed"), image.in_use():
        pass


def test_an_image_larger_than_the_budget_is_not_published(tmp_path: Path) -> None:
    images = store.ImageStore(1 << 20, tmp_path)
    with pytest.raises(store.ImageRefused, match="budget"):
        _publish(images, "large", 4 << 20)
    assert images.find(key.Key({"name": "large"})) is None and not (tmp_path / key.Key({"name": "large"}).name).exists()


def test_one_builder_at_a_time_and_none_leaves_half_an_image(tmp_path: Path) -> None:
    images, others = store.ImageStore(1 << 30, tmp_path), store.ImageStore(1 << 30, tmp_path)
    wanted = key.Key({"name": "first"})
    with images.building(wanted) as folder:
        assert folder is not None
        (folder / "memory.img").write_bytes(b"half")
        assert others.find(wanted) is None
        with others.building(wanted) as second:
            assert second is None
    assert not folder.exists()
    folder.mkdir()  # as a builder leaves it that was killed
    (folder / "memory.img").write_bytes(b"half")
    with others.building(wanted) as third:
        assert third == folder and not list(folder.iterdir())


def test_a_failed_build_is_remembered_for_a_while(tmp_path: Path) -> None:
    images = store.ImageStore(1 << 30, tmp_path)
    wanted = key.Key({"name": "first"})
    assert images.failure(wanted) is None
    images.note_failure(wanted, "CRIU cannot")
    assert images.failure(wanted) == "CRIU cannot"
    old = time.time() - store.RETRY_S - 1
    os.utime(tmp_path / f"{wanted.name}.failed", (old, old))
    assert images.failure(wanted) is None


# -- key, label, canary, weights ---------------------------------------------------------------------------------------
def test_an_image_gets_no_secret_and_no_label() -> None:
    env = {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "2",
        "VLLM_API_KEY": "s1",
        "HF_TOKEN": "s2",
        "HF_HUB_TOKEN": "s3",
        "AWS_SECRET_ACCESS_KEY": "s4",
        "WANDB_API_KEY": "s5",
        "BELAYER_RUN": "bly-00000000",
        "SSH_AUTH_SOCK": "/s6",
    }
    assert key.template_environment(env) == {"PATH": "/bin", "OMP_NUM_THREADS": "2"}


def test_a_key_is_its_parts() -> None:
    assert key.Key({"a": "1", "b": "2"}).name == key.Key({"b": "2", "a": "1"}).name
    assert len({key.Key(parts).name for parts in ({"a": "1"}, {"a": "2"}, {"b": "1"}, {"a": "1", "b": "1"})}) == 4


def test_sources_of_this_process_are_known_and_changes_found(tmp_path: Path) -> None:
    found = key.sources()
    assert "engine/images/store.py" in found and "files.py" in found
    assert key.changed_source(found) is None
    assert key.changed_source(found | {"engine/images/store.py": "other"}) == "engine/images/store.py"
    assert key.changed_source({"engine/gone.py": "x"}) == "engine/gone.py"


def test_the_label_is_written_into_another_process() -> None:
    with RunLabel.new("test engine images") as label:
        assert len(label.name) == len(restore.NOBODY)
    env = {"PATH": os.environ["PATH"], "A": "1", "BELAYER_RUN": restore.NOBODY, "Z": "2"}
    with subprocess.Popen(["sleep", "60"], env=env) as sleeper:
        try:
            assert label_of_process(sleeper.pid) == ""
            restore.set_label(sleeper.pid, "bly-0123abcd")
            assert label_of_process(sleeper.pid) == "bly-0123abcd"
            variables = Path(f"/proc/{sleeper.pid}/environ").read_bytes().split(b"\0")
            assert b"A=1" in variables and b"Z=2" in variables
            with pytest.raises(OSError, match="no room"):
                restore.set_label(sleeper.pid, "bly-0123abcd0")
        finally:
            sleeper.kill()


def test_the_canary_hears_every_difference() -> None:
    before = [canary.Words("a", [1, 2], [-0.5, -1.5])]
    assert canary.difference(before, [canary.Words("a", [1, 2], [-0.5, -1.5])], exact=True) is None
    near = [canary.Words("a", [1, 2], [-0.5, -1.501])]
    assert canary.difference(before, near, exact=False) is None
    assert "logprob" in str(canary.difference(before, near, exact=True))
    assert "tokens" in str(canary.difference(before, [canary.Words("a", [1, 3], [-0.5, -1.5])], exact=False))
    assert "logprob" in str(canary.difference(before, [canary.Words("a", [1, 2], [-0.5, -1.6])], exact=False))


def test_canary_requests_fit_small_models() -> None:
    for length in (16, 64, 4096):
        for work in canary.requests(vocab_size=7, max_model_len=length):
            assert all(0 <= token < 7 for token in work.prompt_ids)
            assert len(work.prompt_ids) + work.sampling.max_tokens <= length and isinstance(work.sampling, Sampling)


def test_the_layout_fills_an_epoch() -> None:
    region = Region(LAYOUT.nbytes)
    a, b = torch.arange(64, dtype=torch.float32).view(8, 8), torch.arange(10, dtype=torch.float64)
    copy_tensors(LAYOUT, region, [("a", a), ("b", b), ("tied", a), ("unknown", a)])
    stored = region.tensor()
    assert torch.equal(stored[:256].view(torch.float32).view(8, 8), a)
    assert torch.equal(stored[256:296].view(torch.float32), b.to(torch.float32))
    with pytest.raises(WeightsError, match="no tensor b"):
        copy_tensors(LAYOUT, region, [("a", a)])
    with pytest.raises(WeightsError, match="shape"):
        copy_tensors(LAYOUT, region, [("a", a.view(64)), ("b", b)])
    region.close()


# -- builds that never came to an end ----------------------------------------------------------------------------------
def test_a_build_that_was_killed_is_told_from_one_that_ended(tmp_path: Path) -> None:
    images, one = store.ImageStore(1 << 30, tmp_path / "images"), key.Key({"a": "1"})
    assert images.unfinished() == (0, 0)
    with images.building(one) as folder:
        assert folder is not None and images.unfinished() == (1, 0)
    assert images.unfinished() == (0, 0)  # it has failed, and said so
    pid = os.fork()
    if pid == 0:
        with images.building(one):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert images.unfinished() == (0, 1)
    with images.building(one):
        assert images.unfinished() == (1, 0)
    assert images.unfinished() == (0, 0)


def test_what_a_program_has_imported_is_no_part_of_the_key() -> None:
    """Else `belayer prepare`, which imports no torch, would make images that no program finds."""
    before = {"PATH": "/bin", "OMP_NUM_THREADS": "2"}
    code = "import os, torch._inductor.runtime.cache_dir_utils as c; c.cache_dir(); print(dict(os.environ))"
    done = subprocess.run([sys.executable, "-c", code], env=before, capture_output=True, text=True, check=True)
    after = ast.literal_eval(done.stdout)
    assert "TORCHINDUCTOR_CACHE_DIR" in after
    assert key.template_environment(after) == key.template_environment(before | {"LC_CTYPE": "C.UTF-8"})
