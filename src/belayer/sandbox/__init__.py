"""Environments: containers with a persistent session, full checkpoint and full restore."""

from belayer.checkpoint.manifest import Manifest
from belayer.sandbox._data import RunPlaces
from belayer.sandbox._levels import Restored
from belayer.sandbox._session import ExecResult
from belayer.sandbox._verdict import Capability, best_level
from belayer.sandbox.capabilities import probe
from belayer.sandbox.cleanup import reap
from belayer.sandbox.container import Sandbox
from belayer.sandbox.manager import Sandboxes
from belayer.sandbox.transfer import export_checkpoint, import_checkpoint

__all__ = [
    "Capability",
    "ExecResult",
    "Manifest",
    "Restored",
    "RunPlaces",
    "Sandbox",
    "Sandboxes",
    "best_level",
    "export_checkpoint",
    "import_checkpoint",
    "probe",
    "reap",
]
