"""Failpoints fire exactly where, when and as often as they were told, and a wrong name is never silent."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from belayer.faults import failpoints

pytestmark = pytest.mark.unit
POINT = "engine.update.after_shard"


@pytest.fixture(autouse=True)
def nothing_armed():
    failpoints.take_fired()
    yield
    for name in failpoints.NAMES:
        failpoints.disarm(name)


def test_fires_once_after_the_passages_it_skips():
    calls: list[int] = []
    failpoints.hit(POINT)
    with failpoints.armed(POINT, lambda: calls.append(1), skip=2):
        for passage in range(5):
            failpoints.hit("engine.update.begin")  # another point
            failpoints.hit(POINT)
            assert len(calls) == (passage >= 2)
    assert failpoints.take_fired() == [POINT] and failpoints.take_fired() == []


def test_what_did_not_fire_is_taken_back():
    with failpoints.armed(POINT, lambda: pytest.fail("it was taken back")):
        pass
    failpoints.hit(POINT)
    assert not failpoints.disarm(POINT) and failpoints.take_fired() == []


def test_one_of_many_threads_gets_it():
    calls: list[str] = []
    failpoints.arm(POINT, lambda: calls.append(threading.current_thread().name))
    threads = [threading.Thread(target=failpoints.hit, args=(POINT,)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_unknown_names_and_actions_are_refused():
    with pytest.raises(ValueError, match=r"engine\.update\.begin"):
        failpoints.arm("engine.update.begn", "kill")
    with pytest.raises(ValueError, match="explode"):
        failpoints.arm(POINT, "explode")
    with failpoints.armed(POINT, "raise"), pytest.raises(ValueError, match="no failpoint"):
        failpoints.hit("renamed")
    with failpoints.armed(POINT, "raise"), pytest.raises(failpoints.FailpointError):
        failpoints.hit(POINT)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("", 0),
        (f"{POINT}=kill", -9),
        (f"engine.update.begin=sleep:0 {POINT}+1=segv", -11),
        (f"{POINT}+2=kill", 0),  # passed twice only
        ("nonsense=kill", 1),
        (POINT, 1),
    ],
)
def test_armed_through_the_environment(value: str, code: int):
    program = f"from belayer.faults.failpoints import hit\nfor _ in range(2): hit({POINT!r})"
    env = os.environ | {failpoints.ENV_VAR: value}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, check=False)
    assert done.returncode == code, done.stderr.decode()


def test_the_owner_and_workers_get_nothing_heavy_with_it():
    program = "import sys, belayer.faults.failpoints; print('pydantic' in sys.modules, 'asyncio' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert done.stdout.split() == ["False", "False"]
