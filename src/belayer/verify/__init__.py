"""Checks a run from its journal alone, by other code than the code that recovered it."""

from belayer.verify.checker import Finding, Verdict, verify_records, verify_run
from belayer.verify.reexecution import Reexecution, reexecute

__all__ = ["Finding", "Reexecution", "Verdict", "reexecute", "verify_records", "verify_run"]
