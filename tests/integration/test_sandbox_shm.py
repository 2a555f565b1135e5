"""Memory for process images: mounted with the run, bounded by what it lies in, gone with it whoever clears it away."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.conftest import needs_root, needs_sandboxes

from belayer.ownership import labels, store_dir
from belayer.sandbox import _claims, _memory, images
from belayer.sandbox.store import Store

pytestmark = [pytest.mark.integration, needs_root]


def mounted_below(folder: Path) -> list[str]:
    return labels.mounts_below(folder)


def test_small_files_take_little_and_the_rest_is_one_budget(small_disk):
    """The file system below has 1 MB: that is what all such folders in it have together."""
    homes = [small_disk / name for name in ("data-a", "data-b")]
    for home in homes:
        home.mkdir()
        _memory.make(home / "images")
        _memory.make(home / "images")  # again: there is one mount
    first, second = (home / "images" for home in homes)
    assert mounted_below(small_disk)[:2] and len(mounted_below(small_disk)) == 3
    before = _memory.free_bytes(first)
    for number in range(20):
        (first / str(number)).write_bytes(b"x" * 100)
    used = before - _memory.free_bytes(first)
    assert 0 < used <= 20 * 4096 and _memory.free_bytes(second) == _memory.free_bytes(first)
    with pytest.raises(OSError, match="No space left"):
        (second / "big").write_bytes(bytes(2 << 20))
    assert _memory.free_bytes(first) == 0
    for folder in (first, second):
        _memory.remove(folder)
        _memory.remove(folder)
        folder.rmdir()
    assert len(mounted_below(small_disk)) == 1


def test_a_dead_folder_goes_with_what_is_mounted_in_it(tmp_path):
    home = tmp_path / "data-x"
    os.close(_claims.claim(home))  # its owner is dead
    _memory.make(home / "images")
    (home / "images" / "left").write_bytes(b"x" * 10000)
    with _claims.if_dead(home) as dead:
        assert dead
        _claims.delete_dead(home)
    assert not home.exists() and not mounted_below(tmp_path)


@needs_sandboxes
def test_a_dead_folder_with_snapshots_goes_too():
    """A snapshot is another device than its folder, and still no mount. And: tests have a store of their own."""
    store = Store.open(durable=False)
    try:
        assert store_dir().name != "store"
        home = store.root / "runs-data" / "0123456789abcdef"
        os.close(_claims.claim(home))
        root = store.trees.root(store.root / "runs" / "shm-test", store.root)
        try:
            store.trees.make_root(images.find(store, "base").path, root)
            store.trees.snapshot(root, home / "snapshot")
        finally:
            store.trees.remove_root(root)
        with _claims.if_dead(home) as dead:
            assert dead
            _claims.delete_dead(home)
        assert not list(home.parent.glob("*0123456789abcdef*"))
    finally:
        store.close()
