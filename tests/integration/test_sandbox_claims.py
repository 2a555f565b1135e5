"""Folders of dead runs are cleared whatever is mounted in them, and whichever version gave them up."""

from __future__ import annotations

import os

import pytest
from tests.conftest import needs_root

from belayer.sandbox import _claims, _memory

pytestmark = [pytest.mark.integration, needs_root]


@pytest.mark.parametrize("name", [".dead-data-1-2", ".new-data-1-2"])
def test_an_older_version_s_remains_with_memory_in_them_are_cleared(tmp_path, name):
    left = tmp_path / name
    left.mkdir()
    _memory.make(left / "images")
    (left / "images" / "pages.img").write_bytes(b"x" * 4096)
    assert _claims.claimed_folders(tmp_path) == [] and left.is_dir()  # somebody may be at it just now
    os.utime(left, (0, 0))
    assert _claims.claimed_folders(tmp_path) == [] and not left.exists()


def test_a_claimed_folder_goes_with_its_memory(tmp_path):
    fd = _claims.claim(tmp_path / "data-1")
    _memory.make(tmp_path / "data-1" / "images")
    _claims.release(tmp_path / "data-1", fd)
    assert list(tmp_path.iterdir()) == []
