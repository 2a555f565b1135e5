"""A short fault campaign on a real engine: the machinery of `belayer bench faults --engine`, from start to end."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the vLLM backend"),
]

SEED = 765  # begins with these four
KINDS = {"update.after_commit.owner", "shadow.sigkill", "worker.sigkill+promoted.sigkill", "worker.sigkill"}
FAULTS = len(KINDS)


@pytest.mark.timeout(600)  # about 25 s on a quiet machine
def test_a_short_campaign_finds_nothing_wrong_and_can_go_on(tmp_path: Path) -> None:
    from benchmarks import faults
    from benchmarks._fault_campaign import Campaign
    from benchmarks._fault_report import result_of

    plan = faults.workload()
    engines, skipped = faults.engines_to_strike(plan, FAULTS, quick=True)
    assert skipped == [] and [kind.until for kind in engines] == [FAULTS]

    def campaign() -> Campaign:
        return Campaign(
            engines,
            plan.model,
            seed=SEED,
            deadline=float("inf"),
            say=print,
            state=tmp_path / "state.json",
            logs=tmp_path / "logs",
        )

    subject = campaign()
    subject.carry_out(resume=False, stopped=lambda: None)
    result: dict[str, Any] = result_of(subject.saved)
    assert result["ok"], result["wrong"]
    assert result["injected"] == FAULTS
    assert {cell["workload"] for cell in result["cells"]} == KINDS
    assert all(cell["subject"]["median_s"] > 0 for cell in result["cells"])
    assert result["requests"] > 20 and result["tokens"] > 400

    again = campaign()
    again.carry_out(resume=True, stopped=lambda: None)  # nothing is left to do
    assert again.done == FAULTS and again.saved.records == subject.saved.records
