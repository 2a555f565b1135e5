"""Every resource comes back as it was: after a kill, after the second in a row, and in a fork.

The resources are in benchmarks/conformance; CONFORMANCE_BIG_MB=1024 makes the big process 1 GB.
"""

from __future__ import annotations

import os

import pytest
from benchmarks.conformance import STAGES, names
from tests.conftest import needs_sandboxes
from tests.integration.sandbox_conformance.conftest import RUNTIMES

pytestmark = [pytest.mark.integration, needs_sandboxes]
CASES = [(runtime, name) for runtime, (level, _) in RUNTIMES.items() for name in names(level)]
# what docs/sandbox.md lists as not kept, and why
NOT_KEPT = {"peer of a unix socket": "a restored connection has no name, and SO_PEERCRED shows another pid"}
SYS_RESOURCE = 24


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("runtime", "name"), CASES, ids=[f"{runtime}-{name}" for runtime, name in CASES])
def test_resource(verdicts, runtime, name, stage):
    verdict = verdicts(runtime).of(name, stage)
    if verdict and verdict.startswith("skipped: "):
        pytest.skip(verdict.removeprefix("skipped: "))
    if verdict and name == "setuid process" and not has_capability(SYS_RESOURCE):
        assert verdict.startswith("refused: ") and "rlimit" in verdict, verdict
        pytest.skip("this host's root has no CAP_SYS_RESOURCE: refused, as docs/sandbox.md says")
    if verdict and name in NOT_KEPT:
        pytest.xfail(NOT_KEPT[name])
    assert verdict is None, f"{name}, {stage}: {verdict}"


def has_capability(number: int) -> bool:
    with open(f"/proc/{os.getpid()}/status") as file:
        effective = next(line.split()[1] for line in file if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> number & 1)
