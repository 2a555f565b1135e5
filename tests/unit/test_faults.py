"""The fault plan is seeded and complete; the injector strikes real processes and says what it could not do."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
from pathlib import Path

import pytest

from belayer.config import FaultsConfig
from belayer.faults import Fault, FaultInjector, plan
from belayer.faults.injector import damage

pytestmark = pytest.mark.unit


def test_the_plan_is_seeded_complete_and_ordered():
    config = FaultsConfig(worker_kill=4, worker_stop=2, sandbox_kill=8, sandbox_damage=4)
    first, again, other = plan(config, 1), plan(config, 1), plan(config, 2)
    assert first == again != other
    assert sorted(first) == first and all(0 < fault.progress <= 0.9 for fault in first)
    kinds = [fault.kind for fault in first]
    assert [kinds.count(k) for k in ("worker.sigkill", "worker.sigstop", "sandbox.kill", "sandbox.damage")] == [
        4,
        2,
        8,
        4,
    ]
    workers = [fault.progress for fault in first if fault.kind.startswith("worker")]
    assert min(b - a for a, b in itertools.pairwise(workers)) > 0.05


def test_the_injector_kills_what_it_is_pointed_at(tmp_path):
    (tmp_path / "root" / "usr" / "bin").mkdir(parents=True)
    victim = subprocess.Popen(["sleep", "60"])

    class Sandbox:
        root, init_pid = tmp_path / "root", victim.pid

    seen = []
    injector = FaultInjector(
        [Fault(0.0, 0.0, "sandbox.damage"), Fault(0.0, 0.0, "sandbox.kill")],
        seed=1,
        progress=lambda: 1.0,
        worker_pid=lambda: None,
        standby=lambda: True,
        sandboxes=lambda: [("r-1", Sandbox)],
        mine=lambda pid: pid == victim.pid,
        sink=seen.append,
    )
    asyncio.run(asyncio.wait_for(injector.run(), 10))
    assert victim.wait(5) == -9
    assert not (tmp_path / "root" / "usr").exists()
    assert injector.injected == ["sandbox.damage", "sandbox.kill"] and not injector.skipped
    assert [event.subject for event in seen] == ["r-1", "r-1"]


def test_a_fault_without_a_target_is_skipped_and_not_counted(monkeypatch):
    monkeypatch.setattr("belayer.faults.injector.TARGET_DEADLINE_S", 0.05)
    injector = FaultInjector(
        [Fault(0.0, 0.0, "worker.sigkill"), Fault(0.0, 0.0, "sandbox.kill")],
        seed=1,
        progress=lambda: 1.0,
        worker_pid=lambda: None,
        standby=lambda: False,
        sandboxes=list,
        mine=lambda pid: True,
        sink=lambda event: None,
    )
    asyncio.run(asyncio.wait_for(injector.run(), 10))
    assert injector.injected == [] and sorted(injector.skipped) == ["sandbox.kill", "worker.sigkill"]


def test_damage_never_leaves_the_sandbox(tmp_path):
    with pytest.raises(ValueError):
        damage(Path("/"), "usr")
    (tmp_path / "outside").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "lib").symlink_to(tmp_path / "outside")
    damage(tmp_path / "root", "lib")
    assert (tmp_path / "outside").is_dir() and not (tmp_path / "root" / "lib").is_symlink()
