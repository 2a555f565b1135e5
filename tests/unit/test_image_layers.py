"""Layers of images: whiteouts, links and everything that a hostile layer can try against the host."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from pathlib import Path

import pytest
from tests.conftest import needs_root
from tests.image_kit import entry, folder, layer, link

from belayer.errors import ImageError
from belayer.sandbox._layers import Unpacker, exists_in

pytestmark = [pytest.mark.unit, needs_root]


def unpacked(place: Path, *layers: bytes, limit: int = 1 << 20) -> Path:
    place.mkdir(exist_ok=True)
    unpacker = Unpacker(place, limit)
    try:
        for number, item in enumerate(layers):
            unpacker.apply(io.BytesIO(item), str(number))
    finally:
        unpacker.close()
    return place


def listing(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*")}


def test_whiteouts_remove_lower_layers_only(tmp_path):
    lower = layer(
        [folder("a"), entry("a/old", data=b"1"), folder("a/deep"), entry("a/deep/x"), entry("b"), folder("c")]
    )
    # entries of the same layer before and after the marks
    upper = layer(
        [
            folder("a"), entry("a/new", data=b"2"), entry("a/.wh..wh..opq"), entry("a/newer"), folder("a/deep"),
            entry("a/deep/y"), entry(".wh.b"), entry("b2"), entry(".wh.c"), folder("c2"), entry(".wh.no"),
            entry("c2/.wh.q"),
        ]
    )  # fmt: skip
    assert listing(unpacked(tmp_path / "root", lower, upper)) == {
        "a",
        "a/new",
        "a/newer",
        "a/deep",
        "a/deep/y",
        "b2",
        "c2",
    }
    # what one layer both removes and brings stays
    again = layer([entry("b", data=b"kept"), entry(".wh.b")])
    assert (unpacked(tmp_path / "other", lower, again) / "b").read_bytes() == b"kept"


def test_a_folder_that_comes_back_is_emptied_first(tmp_path):
    lower = layer([folder("d"), folder("d/sub"), entry("d/sub/old"), entry("d/old")])
    upper = layer([folder("d/sub"), entry("d/sub/new"), entry("d/.wh..wh..opq")])
    assert listing(unpacked(tmp_path / "root", lower, upper)) == {"d", "d/sub", "d/sub/new"}


def test_kinds_owners_modes_times_and_attributes(tmp_path):
    capability = b"\x01\0\0\x02\0\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
    pax = {
        "SCHILY.xattr.user.note": "kept",
        "SCHILY.xattr.security.capability": capability.decode("utf-8", "surrogateescape"),
        "SCHILY.xattr.trusted.overlay.opaque": "y",
    }
    root = unpacked(
        tmp_path / "root",
        layer(
            [
                folder("bin", mode=0o1777, mtime=1000),
                entry("bin/tool", data=b"x", mode=0o4755, uid=12, gid=34, mtime=2000, pax_headers=pax),
                link("bin/same", "bin/tool", tarfile.LNKTYPE),
                link("bin/also", "tool"),
                entry("bin/pipe", tarfile.FIFOTYPE, mode=0o600),
                entry("bin/disk", tarfile.BLKTYPE, devmajor=7, devminor=0),
                entry("bin/mem", tarfile.CHRTYPE, devmajor=1, devminor=1),
                entry("x" * 200 + "/" + "y" * 200, data=b"long"),
            ]
        ),
    )
    tool = (root / "bin/tool").lstat()
    assert (stat.S_IMODE(tool.st_mode), tool.st_uid, tool.st_gid, tool.st_mtime, tool.st_nlink) == (
        0o4755,
        12,
        34,
        2000,
        2,
    )
    assert os.path.samefile(root / "bin/tool", root / "bin/same")
    assert os.readlink(root / "bin/also") == "tool"
    assert stat.S_ISFIFO((root / "bin/pipe").lstat().st_mode)
    assert not (root / "bin/disk").exists() and not (root / "bin/mem").exists()
    assert stat.S_IMODE((root / "bin").stat().st_mode) == 0o1777 and (root / "bin").stat().st_mtime == 1000
    assert (root / ("x" * 200) / ("y" * 200)).read_bytes() == b"long"
    names = os.listxattr(root / "bin/tool")
    assert "trusted.overlay.opaque" not in names
    assert os.getxattr(root / "bin/tool", "user.note") == b"kept"
    assert os.getxattr(root / "bin/tool", "security.capability") == capability


def test_an_entry_replaces_what_is_there(tmp_path):
    lower = layer(
        [folder("d"), entry("d/x"), entry("f"), link("l", "/etc"), folder("kept", mode=0o700), entry("kept/y")]
    )
    upper = layer([entry("d", data=b"file"), folder("f"), entry("l", data=b"file"), folder("kept", mode=0o755)])
    root = unpacked(tmp_path / "root", lower, upper)
    assert (root / "d").read_bytes() == b"file" and (root / "f").is_dir()
    assert not (root / "l").is_symlink() and (root / "kept/y").exists()


OUTSIDE = {
    "parent": [entry("../evil", data=b"x")],
    "parent in the middle": [folder("a"), entry("a/../../evil", data=b"x")],
    "parent of a hard link": [link("x", "../secret", tarfile.LNKTYPE)],
    "whiteout of a parent": [entry("a/.wh..", data=b"")],
    "hard link to nothing": [link("x", "none", tarfile.LNKTYPE)],
    "hard link to a folder": [folder("d"), link("x", "d", tarfile.LNKTYPE)],
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_hostile_layers_are_refused(tmp_path, name):
    (tmp_path / "secret").write_text("of the host")
    with pytest.raises(ImageError):
        unpacked(tmp_path / "root", layer(OUTSIDE[name]))
    assert {path.name for path in tmp_path.iterdir()} == {"root", "secret"}


def test_links_lead_nowhere_outside(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("of the host")
    up = "../" * 20
    for target in (str(outside), up + str(outside).lstrip("/"), "/proc/self/root" + str(outside)):
        for attempt in (
            entry("door/planted"),
            folder("door/below"),
            entry("door/.wh.secret"),
            entry("door/.wh..wh..opq"),
        ):
            with pytest.raises(ImageError, match="link to nothing"):
                unpacked(tmp_path / "root", layer([link("door", target), attempt]))
        assert [path.name for path in outside.iterdir()] == ["secret"]
    assert (unpacked(tmp_path / "r1", layer([entry("/absolute", data=b"y")])) / "absolute").read_bytes() == b"y"
    # where the same path is in the image too, the link leads there
    inside = unpacked(tmp_path / "r5", layer([entry(f"{outside}/old"), link("door", str(outside)), entry("door/new")]))
    assert (inside / str(outside).lstrip("/") / "new").exists() and not (outside / "new").exists()
    # a hard link through a link reaches the image's own file only
    with pytest.raises(ImageError, match="not there"):
        unpacked(tmp_path / "r2", layer([link("door", str(outside)), link("x", "door/secret", tarfile.LNKTYPE)]))
    # neither is a last part followed
    unpacked(tmp_path / "r3", layer([link("f", str(outside / "secret")), entry("f", data=b"replaced")]))
    assert (outside / "secret").read_text() == "of the host"
    assert not exists_in(tmp_path / "r2", str(outside / "secret"))
    with pytest.raises(ImageError, match="circle"):
        unpacked(tmp_path / "r4", layer([link("a", "b"), link("b", "a"), entry("a/x")]))


def test_a_lower_link_is_followed_inside(tmp_path):
    """Images with /bin → usr/bin have layers that name /bin/…"""
    lower = layer([folder("usr"), folder("usr/bin"), link("bin", "usr/bin"), link("lib", "/usr/lib")])
    root = unpacked(tmp_path / "root", lower, layer([entry("bin/tool", data=b"x")]))
    assert (root / "usr/bin/tool").read_bytes() == b"x" and (root / "bin").is_symlink()
    assert exists_in(root, "bin/tool") and not exists_in(root, "bin/none") and not exists_in(root, "bin/tool/x")


def test_size_and_damage(tmp_path):
    with pytest.raises(ImageError, match="more than"):
        unpacked(tmp_path / "a", layer([entry("big", data=bytes(3 << 20))]), limit=2 << 20)
    whole = layer([entry("big", data=bytes(1 << 20))])
    with pytest.raises(ImageError):
        unpacked(tmp_path / "b", whole[: len(whole) // 2], limit=2 << 20)
    with pytest.raises(ImageError):
        unpacked(tmp_path / "c", b"no archive at all, but long enough for one header" * 20)
