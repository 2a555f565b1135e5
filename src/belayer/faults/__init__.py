"""Faults on purpose: what is injected, when, and by what hand."""

# Owner and workers import `belayer.faults.failpoints` and must stay small: the injector, which pulls in the
# configuration, is only imported when somebody asks for it.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from belayer.faults.injector import FaultInjector
    from belayer.faults.schedule import Fault, plan

__all__ = ["Fault", "FaultInjector", "plan"]


def __getattr__(name: str) -> Any:
    if name == "FaultInjector":
        from belayer.faults.injector import FaultInjector

        return FaultInjector
    if name in ("Fault", "plan"):
        from belayer.faults import schedule

        return getattr(schedule, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
