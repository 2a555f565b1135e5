"""Runs the parts of gpu_check.sh one after the other, each within its time, and writes one JSON file."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 520.0
SKIPPED = 77
NEEDED = {
    "torch": "torch",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "numpy": "numpy",
    "msgspec": "msgspec",
    "pydantic": "pydantic",
    "google_crc32c": "google-crc32c",
    "pytest": "pytest",
}
NEEDED_ON_CUDA = {"cuda.bindings": "cuda-bindings", "pynvml": "nvidia-ml-py"}


def missing(device: str) -> list[str]:
    """What this machine lacks, one line each."""
    lines = []
    for module, package in (NEEDED | (NEEDED_ON_CUDA if device == "cuda" else {})).items():
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            lines.append(f"the package {package} is not installed")
    if lines or device == "cpu":
        return lines
    import torch

    if torch.version.cuda is None:
        return ["this torch is built without CUDA"]
    if not torch.cuda.is_available():
        return ["torch sees no CUDA device"]
    from belayer.engine import memory

    reason = memory.unavailable("cuda")
    return [reason] if reason else []


def machine(device: str) -> dict[str, Any]:
    from belayer.versions import versions

    facts: dict[str, Any] = {"system": platform.platform(), "python": platform.python_version(), "cpus": os.cpu_count()}
    facts["versions"] = versions()
    if device == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(0)
        facts |= {"gpu": properties.name, "gpu_bytes": properties.total_memory, "cuda": torch.version.cuda}
        try:
            import pynvml

            pynvml.nvmlInit()
            facts["driver"] = pynvml.nvmlSystemGetDriverVersion()
        except Exception as error:  # a fact that is nice to have
            facts["driver"] = f"unknown: {error}"
    return facts


def run(command: list[str], limit_s: float) -> dict[str, Any]:
    """Run `command` for at most `limit_s`; its exit status, time and the end of its output."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | str = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = f"stopped after {limit_s:.0f} s"
            os.killpg(process.pid, signal.SIGTERM)  # it closes what it started
            try:
                process.wait(8)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    return {"status": status, "seconds": round(time.monotonic() - began, 1), "output": text[-12_000:]}


def run_tests(arguments: list[str], limit_s: float) -> dict[str, Any]:
    """Run pytest; what `run` says, and every test's outcome."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "--noconftest", "-o", "addopts=", "-p", "no:cacheprovider"]
        command += ["--import-mode=importlib", "-q", "-rA", "--tb=short", f"--junitxml={report}", *arguments]
        result = run(command, limit_s)
        result["tests"] = _outcomes(report)
    counts: dict[str, int] = {}
    for test in result["tests"]:
        counts[test["outcome"]] = counts.get(test["outcome"], 0) + 1
    result["counts"] = counts
    result["ok"] = result["status"] == 0 and counts.get("passed", 0) > 0
    return result


def _outcomes(report: Path) -> list[dict[str, Any]]:
    try:
        cases = ElementTree.parse(report).getroot().iter("testcase")
    except (OSError, ElementTree.ParseError):
        return []  # stopped before it was written; the output is all there is
    tests = []
    for case in cases:
        outcome, text = "passed", ""
        for kind in ("failure", "error", "skipped"):
            found = case.find(kind)
            if found is not None:
                outcome = {"failure": "failed", "error": "failed"}.get(kind, kind)
                text = (found.get("message") or "")[:600]
        test = {"name": case.get("name"), "outcome": outcome, "seconds": float(case.get("time") or 0)}
        properties = {p.get("name"): p.get("value") for p in case.iter("property")}
        tests.append(test | ({"message": text} if text else {}) | ({"properties": properties} if properties else {}))
    return tests


def run_recovery(size: str, device: str, limit_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recovery.json"
        command = [sys.executable, str(ROOT / "benchmarks" / "_gpu_recovery.py"), "--size", size, "--device", device]
        result = run([*command, "--json", str(file), "--seconds", f"{limit_s - 25:.0f}"], limit_s)
        try:
            result["result"] = json.loads(file.read_text())
        except (OSError, ValueError):
            result["result"] = None
    result["ok"] = result["status"] == 0 and bool(result["result"] and result["result"]["ok"])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_check.sh")
    parser.add_argument("--size", choices=("tiny", "1b", "3b", "8b"), default=None)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="memory,recovery,backends,gpu")
    parser.add_argument("--json", type=Path, default=Path(os.environ.get("OUT", ROOT / "build")) / "gpu-check.json")
    options = parser.parse_args()
    device = options.device
    size = options.size or ("1b" if device == "cuda" else "tiny")
    if lacking := missing(device):
        for line in lacking:
            print(f"gpu_check: skipped: {line}")
        return SKIPPED

    began = time.monotonic()
    result: dict[str, Any] = {
        "bench": "gpu_check",
        "machine": machine(device),
        "device": device,
        "parts": {},
        "ok": False,
    }
    print(json.dumps(result["machine"]), flush=True)
    kind = "cuda" if device == "cuda" else "cpu"
    backend = "transformers-cuda" if device == "cuda" else "transformers and not cuda"
    # the order is that of what one would most like to know, should the time run out
    parts: dict[str, tuple[float, Any]] = {
        "memory": (90.0, lambda s: run_tests(["tests/contract/test_memory.py", "-k", kind], s)),
        "recovery": (190.0, lambda s: run_recovery(size, device, s)),
        "backends": (120.0, lambda s: run_tests(["tests/contract/test_backends.py", "-k", backend], s)),
        "gpu": (
            150.0,
            lambda s: run_tests(["tests/gpu" if device == "cuda" else "tests/contract/test_engine_backend.py"], s),
        ),
    }
    for name in options.only.split(","):
        limit, part = parts[name]
        left = BUDGET_S - (time.monotonic() - began)
        if left < 30:
            result["parts"][name] = {"ok": False, "status": "no time was left"}
            continue
        print(f"== {name}", flush=True)
        try:
            outcome = part(min(limit, left))
        except Exception as error:  # the other parts are still worth running
            outcome = {"ok": False, "status": f"{type(error).__name__}: {error}"}
        result["parts"][name] = outcome
        result["ok"] = all(done["ok"] for done in result["parts"].values())
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")  # after each part: the next one may take us along
        print(
            f"   {'passed' if outcome['ok'] else 'FAILED'} in {outcome.get('seconds', 0)} s {outcome.get('counts', '')}"
        )
        for test in outcome.get("tests", []):
            if test["outcome"] == "failed":
                print(f"   {test['name']}: {test.get('message', '')[:300]}")
        if not outcome["ok"]:
            print(outcome.get("output", "")[-3_000:], flush=True)
        elif name == "recovery":
            for cell in outcome["result"]["cells"]:
                print(f"   {cell['workload']}: {cell['subject']} {cell['ratios']}", flush=True)
    print(f"written to {options.json}")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
