"""The worker benchmark's data is complete, and its picture shows every sample."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the benchmarks make models with torch"),
]


def test_the_cells_of_the_claims_are_measured():
    from benchmarks.worker import workloads

    plan = workloads()
    figures = {(c.model, c.requests, c.prefix, c.adopt) for c in plan.cells if c.claims}
    assert {("tiny", 4, 88, False), ("mid", 1, 80, False), ("mid", 4, 272, False), ("mid", 4, 272, True)} <= figures
    assert {cell.model for cell in plan.cells} <= plan.models.keys()
    assert {cell.sampling for cell in plan.cells} == {"greedy", "sampled", "mixed"}
    assert min(c.requests for c in plan.cells) == 1 and max(c.requests for c in plan.cells) == 16
    for cell in plan.cells:
        model = plan.models[cell.model]
        assert cell.prefix + model.max_tokens <= model.max_model_len
        assert 0 < cell.cold <= cell.rounds or cell.cold == 0
    assert 5.5e6 < plan.models["tiny"].parameters < 6.5e6
    assert 3.5e8 < plan.models["mid"].parameters < 4.5e8


def test_a_claim_is_kept_missed_or_undecided():
    import msgspec
    from benchmarks._worker_cell import _claims, _Samples
    from benchmarks.worker import workloads

    samples = _Samples()
    samples.subject, samples.phases, samples.armed = [0.1, 0.2, 0.3], [{"detect_s": 0.001}], [2.0]
    samples.ratios["cold_start"] = [50.0]
    cell = msgspec.structs.replace(
        workloads().cells[0],
        claims={"cold_start": 42, "image_standby": 20, "detect_s": 0.005, "next_shadow_armed_s": 1, "floor": 1.15},
    )
    found = _claims(cell, samples, floor=0.14)
    assert [claim["kept"] for claim in found] == [True, None, True, False, True]
    assert abs(found[4]["value"] - 0.2 / 0.2) < 1e-9
    with pytest.raises(ValueError, match="no claim"):
        _claims(msgspec.structs.replace(cell, claims={"speed": 1}), samples, floor=0.1)


def test_parameters_are_those_of_the_weights():
    import msgspec
    from benchmarks._models import weights
    from benchmarks.worker import workloads

    small = msgspec.structs.replace(workloads().models["tiny"], layers=2, vocabulary=64, hidden=32)
    assert sum(tensor.numel() for _name, tensor in weights(small)) == small.parameters


def _cell(model: str, requests: int, prefix: int, adopt: bool, seconds: float) -> dict:
    return {
        "model": model,
        "requests": requests,
        "prefix_tokens": prefix,
        "adopt": adopt,
        "subject": {"samples_s": [seconds, seconds * 1.1]},
        "prefill_floor": {"samples_s": [seconds / 2]},
        "baselines": {"cold_start": {"samples_s": [9.0]}, "image_standby": {"skipped": "not here"}},
    }


def test_the_picture_and_its_source_data(tmp_path: Path):
    pytest.importorskip("matplotlib")
    from benchmarks._worker_plot import QUESTION, plot

    cells = [
        _cell("tiny", 4, 88, False, 0.05),
        _cell("tiny", 1, 2048, False, 0.2),
        _cell("mid", 4, 272, False, 0.9),
        _cell("mid", 4, 272, True, 0.2),
        {"workload": "of another kind", "checks": {}},
    ]
    machine = {"cpus": 2, "machine": "x86_64", "kernel": "6"}
    svg, png, table = plot({"cells": cells, "machine": machine, "versions": {"vllm": "0.32"}}, tmp_path / "build")
    assert png.stat().st_size > 10_000 and svg.read_text().startswith("<?xml")
    with open(table) as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 4 + 3  # an adopting cell has no floor of its own
    assert {row["series"] for row in rows if row["total_tokens"] == "1088"} == {
        "recovery, shadow",
        "recovery, shadow, sealed blocks adopted",
        "prefill floor",
        "cold start",
    }
    assert QUESTION.endswith("?")
