"""Faults on purpose: what is injected, when, and by what hand."""

from belayer.faults.injector import FaultInjector
from belayer.faults.schedule import Fault, plan

__all__ = ["Fault", "FaultInjector", "plan"]
