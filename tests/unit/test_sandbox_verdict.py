"""Which level and which store follow from what a host can do, and why not more."""

from __future__ import annotations

import pytest

from belayer.sandbox._verdict import BTRFS, CONTAINER, CRIU, OVERLAY, Capability, best_level, best_store, verdict

pytestmark = pytest.mark.unit


def host(**broken: str) -> list[Capability]:
    """A host that can do everything but `broken` (by the first word of its name)."""
    names = ("root", *CONTAINER, CRIU, BTRFS, OVERLAY)
    keys = {"root": "root", "seccomp": "seccomp", "namespaces": "namespaces"}
    keys |= {CRIU: "criu", BTRFS: "btrfs", OVERLAY: "overlay", "sandbox program": "program"}
    return [Capability(name, keys[name] not in broken, broken.get(keys[name], "fine"), f"get {name}") for name in names]


@pytest.mark.parametrize(
    ("broken", "level", "store", "words"),
    [
        ({}, "full", "btrfs", ["full, on a store of btrfs"]),
        ({"btrfs": "no mkfs.btrfs"}, "full", "overlay", ["full", "overlay", "no mkfs.btrfs"]),
        ({"criu": "no CRIU 4.2"}, "fs+shell", "btrfs", ["fs+shell", "processes do not come back", "no CRIU 4.2"]),
        ({"criu": "c", "btrfs": "b"}, "fs+shell", "overlay", ["fs+shell", "since c", "since b"]),
        ({"btrfs": "b", "overlay": "o"}, None, None, ["none", "b", "o"]),
        ({"seccomp": "no filter"}, None, "btrfs", ["none", "no filter"]),
        ({"root": "user 1000"}, None, "btrfs", ["none"]),
    ],
)
def test_the_level_of_a_host(broken, level, store, words):
    found = host(**broken)
    assert (best_level(found), best_store(found)) == (level, store)
    line = verdict(found)
    assert line.ok == (level is not None) and line.required
    for word in words:
        assert word in line.detail
    if level == "fs+shell":
        assert 'allow_level = "fs+shell"' in line.how_to_get
