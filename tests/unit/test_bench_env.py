"""The environment benchmark holds itself against its limits, and its picture shows every sample."""

from __future__ import annotations

import csv
import importlib.util
import io
import zipfile

import pytest
from benchmarks import _env_workloads
from benchmarks._env_cell import series
from benchmarks._env_claims import FORK_S, LIMITS, RATIOS, claims
from benchmarks._env_plot import plot

pytestmark = pytest.mark.unit


def cell(name: str, *, frozen_s: float, recovery_s: float, replay: float) -> dict:
    return {
        "workload": name,
        "actions": 3,
        "subject": {**series([recovery_s, recovery_s]), "phases_s": {}},
        "checkpoint": {"frozen": series([frozen_s])},
        "fork_of_8": series([0.1]),
        "baselines": {"new_container_replay": series([recovery_s * replay] * 2), "podman": {"skipped": "not here"}},
        "ratios": {"new_container_replay": replay},
        "checks": {"restores_checked": 2},
    }


def test_a_limit_is_kept_missed_or_undecided():
    found = claims(
        [
            cell("idle shell", frozen_s=0.029, recovery_s=0.041, replay=3.6),
            cell("git edit and test", frozen_s=9, recovery_s=9, replay=3.4),
        ]
    )
    kept = {claim["claim"]: claim["kept"] for claim in found}
    assert kept["idle shell: frozen"] is True and kept["idle shell: kill → first exec"] is False
    assert kept["process with 100 MB: frozen"] is None, "it was not measured"
    assert kept["idle shell: fork of 8"] is True
    assert round(FORK_S, 3) == 0.32
    assert kept["idle shell: faster than new_container_replay"] is True
    assert kept["git edit and test: faster than new_container_replay"] is False
    assert kept["git edit and test: faster than podman"] is None
    assert len(found) == 2 * len(LIMITS) + 1 + 2 * len(RATIOS)


def test_quartiles():
    assert series([3.0])["quartiles_s"] == [3.0, 3.0]
    found = series([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (found["median_s"], found["quartiles_s"]) == (3.0, [2.0, 4.0])


def test_the_limits_speak_of_workloads_that_there_are():
    every = {work.name: work for work in _env_workloads.workloads(False)}
    assert every.keys() | _env_workloads.skipped(False).keys() >= LIMITS.keys()
    assert len(every) + len(_env_workloads.skipped(False)) == 6
    assert {work.name for work in _env_workloads.workloads(True)} | _env_workloads.skipped(True).keys() == {
        *every,
        *_env_workloads.skipped(False),
    }
    for work in every.values():
        assert work.turn(3)[0].files_only and "step 3" in work.turn(3)[1].command


def test_the_wheel_is_one():
    with zipfile.ZipFile(io.BytesIO(_env_workloads._wheel())) as wheel:
        assert wheel.testzip() is None
        names = wheel.namelist()
        assert sum(name.startswith("demo/m") for name in names) == _env_workloads.MODULES
        record = wheel.read("demo-1.dist-info/RECORD").decode().splitlines()
        assert {line.split(",")[0] for line in record} == set(names)
        for name in names:
            if name.endswith(".py"):
                compile(wheel.read(name), name, "exec")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_figure_shows_every_sample(tmp_path):
    cells = [
        cell("idle shell", frozen_s=0.02, recovery_s=0.03, replay=5),
        cell("HTTP server", frozen_s=1, recovery_s=1, replay=2),
    ]
    files = plot({"cells": cells, "machine": {"cpus": 2, "machine": "x", "kernel": "6"}}, tmp_path)
    assert [file.name for file in files] == ["bench-env.svg", "bench-env.png", "bench-env.csv"]
    assert all(file.stat().st_size for file in files)
    with open(files[2]) as table:
        rows = list(csv.DictReader(table))
    assert len(rows) == 8
    assert {row["series"] for row in rows} == {"belayer", "new_container_replay"}
