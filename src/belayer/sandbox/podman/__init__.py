"""Podman as a second runtime, for hosts where containers must be podman's. Slower; everything else is the same."""

from belayer.sandbox.podman._program import Podman, missing, require
from belayer.sandbox.podman.runtime import PodmanRuntime

__all__ = ["Podman", "PodmanRuntime", "missing", "require"]
