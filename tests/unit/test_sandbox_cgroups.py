"""Which cgroup mounts are used, from what hosts of all kinds have in /proc/self/mountinfo."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from belayer.sandbox import _cgroup
from belayer.sandbox._cgroup import choose

pytestmark = pytest.mark.unit

# a virtual machine with v1 controllers, and v2 without any beside them
MIXED = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
33 31 0:30 / /sys/fs/cgroup/cpuacct rw,relatime - cgroup cgroup rw,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
36 31 0:33 / /sys/fs/cgroup/devices rw,relatime - cgroup cgroup rw,devices
37 31 0:34 / /sys/fs/cgroup/freezer rw,relatime - cgroup cgroup rw,freezer
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
# systemd on Debian 12, Ubuntu 24.04, Fedora: v2 alone
V2 = """\
22 61 0:21 / /proc rw,nosuid,nodev,noexec,relatime shared:13 - proc proc rw
29 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot
30 23 0:27 / /sys/fs/pstore rw,nosuid,nodev,noexec,relatime shared:5 - pstore pstore rw
"""
# in a container with a cgroup namespace of its own, --privileged, and the same without
IN_CONTAINER = "612 611 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw,nsdelegate\n"
UNPRIVILEGED = "612 611 0:26 / /sys/fs/cgroup ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw,nsdelegate\n"
# a container with the host's cgroup namespace: its own part is mounted, and the whole elsewhere
HOST_NAMESPACE = """\
700 699 0:26 /docker/0a1b2c /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw,nsdelegate
701 699 0:26 / /host/sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw,nsdelegate
"""
# v1 alone, controllers mounted together
V1 = """\
25 18 0:22 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpuacct,cpu
26 18 0:23 / /sys/fs/cgroup/memory rw,nosuid shared:10 - cgroup cgroup rw,memory
27 18 0:24 / /sys/fs/cgroup/pids ro,nosuid shared:11 - cgroup cgroup rw,pids
28 18 0:25 / /sys/fs/cgroup/cpuset rw,nosuid shared:12 - cgroup cgroup rw,cpuset,clone_children
"""
ODD_NAME = "29 23 0:26 / /mnt/c\\040group rw - cgroup2 none rw\n29 23 short line\n\n"


def paths(*names: str) -> list[Path]:
    return [Path(name) for name in names]


def test_mixed():
    asked: list[Path] = []
    found = choose(MIXED, lambda path: asked.append(path) or set())
    assert found.unified == Path("/sys/fs/cgroup/unified") and asked == [found.unified]
    assert found.flavour == "mixed (v1 and v2)" and found.delegable == frozenset()
    assert found.limits == {"memory", "pids", "cpu", "devices"}
    top = "/sys/fs/cgroup"
    assert found.bases() == paths(*(f"{top}/{name}/belayer" for name in ("memory", "pids", "cpu", "unified")))


@pytest.mark.parametrize("table", [V2, IN_CONTAINER])
def test_v2_alone(table):
    found = choose(table, lambda _: {"cpuset", "cpu", "io", "memory", "hugetlb", "pids", "misc"})
    assert (found.unified, found.v1, found.flavour) == (Path("/sys/fs/cgroup"), {}, "v2")
    assert found.delegable == {"cpu", "memory", "pids"}
    assert found.limits == {"memory", "pids", "cpu", "devices"}, "devices by a program, without a controller"
    assert found.bases() == paths("/sys/fs/cgroup/belayer")


def test_a_mount_that_cannot_be_written_is_none():
    found = choose(UNPRIVILEGED, lambda _: {"memory", "pids"})
    assert found.bases() == [] and found.flavour == "none" and found.limits == set()


def test_the_mount_that_shows_most():
    assert choose(HOST_NAMESPACE, lambda _: set()).unified == Path("/host/sys/fs/cgroup")
    part = HOST_NAMESPACE.splitlines()[0]
    assert choose(part, lambda _: set()).unified == Path("/sys/fs/cgroup"), "a part is better than nothing"


def test_v1_alone():
    found = choose(V1, lambda _: {"memory"})
    assert found.unified is None and found.delegable == frozenset()
    assert found.v1 == {"cpu": Path("/sys/fs/cgroup/cpu,cpuacct"), "memory": Path("/sys/fs/cgroup/memory")}
    assert found.limits == {"cpu", "memory"}


def test_names_with_blanks_and_nonsense():
    assert choose(ODD_NAME, lambda _: set()).unified == Path("/mnt/c group")
    assert choose("", lambda _: set()).bases() == []


def test_controllers_are_passed_down_where_the_host_lets_us(tmp_path, monkeypatch):
    """v2 alone, on plain files: every level gets each controller; a refusal costs that limit and nothing else."""
    table = f"29 23 0:26 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    host = choose(table, lambda _: {"memory", "pids"})
    monkeypatch.setattr(_cgroup, "hierarchies", lambda: host)
    (tmp_path / "cgroup.subtree_control").mkdir()  # a root with processes in it answers EBUSY: here, any OSError
    _cgroup.make_run("bly-00000000")
    run = tmp_path / "belayer" / "bly-00000000"
    assert (run / "cgroup.subtree_control").read_text() in ("+memory", "+pids")
    assert (tmp_path / "belayer" / "cgroup.subtree_control").exists()
    sandbox = _cgroup.SandboxCgroup("bly-00000000", "s-1")
    (run / "s-1").mkdir()
    for name in ("memory.max", "memory.swap.max", "pids.max"):
        (run / "s-1" / name).touch()
    sandbox.make(memory_bytes=1 << 20, pids=5)
    assert (run / "s-1" / "memory.max").read_text() == str(1 << 20)
    assert (run / "s-1" / "pids.max").read_text() == "5"
    (run / "s-1" / "memory.events").write_text("low 0\noom 2\noom_kill 2\n")
    assert sandbox.oom_kills() == 2


def test_a_group_that_goes_away_while_it_is_read_has_nothing_in_it(tmp_path):
    group = _cgroup.SandboxCgroup("no-such-run", "s")
    group.folders = [tmp_path / "group"]
    over = threading.Event()

    def come_and_go():
        while not over.is_set():
            group.folders[0].mkdir()
            group.folders[0].rmdir()

    other = threading.Thread(target=come_and_go)
    other.start()
    try:
        for _ in range(3000):
            assert group.oom_kills() == 0 and group.pids() == []
    finally:
        over.set()
        other.join()
