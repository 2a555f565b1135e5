"""What a checkpoint must capture, as a table of small resources, and the engine that tries them on any runtime.

Each resource is set up inside a real sandbox; then checkpoint, damage, kill, restore, compare; the same once more from
what came back; and once more in a fork. The engine knows nothing of Belayer's sandboxes: a runtime is what offers the
few calls of `protocol.Runtime`.
"""

from .engine import STAGES, Verdict, arrange, run_group
from .protocol import Box, Refused, Runtime
from .table import LEVELS, names

__all__ = ["LEVELS", "STAGES", "Box", "Refused", "Runtime", "Verdict", "arrange", "names", "run_group"]
