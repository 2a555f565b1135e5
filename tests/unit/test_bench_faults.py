"""The fault campaign would notice: its checks find what they are there to find, and its plan holds what it says."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from belayer.faults.engine_kinds import WEIGHTS, needs_shadow, stream
from belayer.faults.engine_strikes import Striker, children, parent
from belayer.ownership import RunLabel

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the benchmarks make models with torch"),
]


def test_the_plan_is_seeded_and_holds_every_kind_early():
    first, again, other = (list(itertools.islice(stream(seed), 1000)) for seed in (1, 1, 2))
    assert first == again != other
    assert {fault.kind for fault in first[: len(WEIGHTS)]} == WEIGHTS.keys()
    assert sum(WEIGHTS.values()) == 1000
    counts = Counter(fault.kind for fault in first)
    assert all(counts[kind] >= 1 for kind in WEIGHTS) and counts["worker.sigkill"] > counts["nursery.sigkill"]
    assert all(fault.protected for fault in first if needs_shadow(fault.kind))
    assert not all(fault.protected for fault in first)


def test_a_strike_falls_on_the_engine_s_own_processes_only():
    victim = subprocess.Popen(["sleep", "60"])
    engine: Any = SimpleNamespace(worker_pid=victim.pid, shadow_pid=None, owner_pid=victim.pid)
    assert victim.pid in children() and parent(victim.pid) == os.getpid()
    try:
        assert not Striker(engine, lambda _pid: False).strike_pid(victim.pid, "sigkill")
        assert victim.poll() is None
        striker = Striker(engine, lambda pid: pid == victim.pid)
        assert striker.pid("shadow") is None and striker.pid("nursery") is None
        assert striker.strike_pid(victim.pid, "sigabrt") and victim.wait(5) == -6
        assert not striker.strike_pid(victim.pid, "sigkill")
    finally:
        victim.kill()
        victim.wait()


def _load() -> Any:
    from benchmarks._fault_load import Answer, Load, pool

    engine: Any = SimpleNamespace(policy_version=3)
    load = Load(engine, pool(1000, 0), slots=1, seed=0)
    load.references = {
        (0, 2): Answer([5, 6, 7, 8], [-0.5, -0.6, -0.7, -0.8], []),
        (1, 2): Answer([1, 2, 3, 4], [-0.1, -0.2, -0.3, -0.4], []),
    }
    return load


@pytest.mark.parametrize(
    ("tokens", "logprobs", "versions", "found"),
    [
        ([1, 2, 3, 4], [-0.1, -0.2, -0.3, -0.4], [3, 3, 3, 3], {}),
        ([5, 6, 7, 8], [-0.5, -0.6, -0.7, -0.8], [2, 2, 2, 2], {}),
        ([5, 6, 7, 8], [-0.5, -0.6, -0.7, -0.8], [3, 3, 3, 3], {"changed": 4, "logprobs_changed": 4}),
        ([1, 2, 3], [-0.1, -0.2, -0.3], [3, 3, 3], {"lost": 1}),
        ([1, 2, 3, 4, 4], [-0.1, -0.2, -0.3, -0.4, -0.4], [3] * 5, {"duplicated": 1}),
        ([1, 2, 9, 4], [-0.1, -0.2, -0.3, -0.4], [3, 3, 3, 3], {"changed": 1}),
        ([1, 2, 3, 4], [-0.1, -0.2, -0.30001, -0.4], [3, 3, 3, 3], {"logprobs_changed": 1}),
        ([1, 2, 7, 8], [-0.1, -0.2, -0.7, -0.8], [3, 3, 2, 2], {"changed": 1}),  # back to older weights
        ([5, 6, 3, 4], [-0.5, -0.6, -0.3, -0.4], [2, 2, 3, 3], {}),  # what follows an update is checked later
        ([5, 9, 3, 4], [-0.5, -0.6, -0.3, -0.4], [2, 2, 3, 3], {"changed": 1}),
    ],
)
def test_what_differs_from_the_reference_is_counted(tokens, logprobs, versions, found):
    from benchmarks._fault_load import Answer

    load = _load()
    load._check(2, Answer(tokens, logprobs, versions))
    assert dict(load.found) == found and len(load.details) == len(found)
    part = load._due_part()
    assert (part is None) == (versions != [2, 2, 3, 3])
    if part is not None:
        assert (part.start, part.end, part.last, part.weights) == (2, 4, True, 1)


def test_requests_differ_and_some_share_a_prefix():
    from benchmarks._fault_load import pool

    requests = pool(1000, 0)
    assert requests == pool(1000, 0) != pool(1000, 1)
    assert {request.sampling.temperature for request in requests} >= {0.0, 1.0, 0.7, 1.4}
    assert any(request.sampling.stop_token_ids for request in requests)
    assert requests[0].prompt_ids[:64] == requests[3].prompt_ids[:64] != requests[1].prompt_ids[:64]


def test_growth_is_a_leak_and_noise_is_not():
    from benchmarks._fault_usage import Usage, growth, leaks

    def sample(number: int, grows: int) -> Usage:
        noise = number % 2
        return Usage(20 + noise + grows * number, 3, 400, 4, 9 + grows * number, 7, 100 + (number > 50), 200)

    steady, growing = ([sample(number, grows) for number in range(40)] for grows in (0, 1))
    assert leaks(growth(steady)) == {}
    assert leaks(growth(growing)).keys() == {"driver_fds", "owner_fds"}
    assert growth(steady[:9]) == {}  # too few to say anything


def test_what_is_left_behind_is_seen():
    from benchmarks._fault_usage import left_behind

    with RunLabel.new("test bench faults") as label:
        assert left_behind(label) == []
        survivor = subprocess.Popen(["sleep", "60"], env=os.environ | label.env)
        (label.shm / "arena").write_text("x")
        try:
            assert left_behind(label) == [f"process {survivor.pid}", str(label.shm / "arena")]
        finally:
            survivor.kill()
            survivor.wait()
