"""Recovery of environments: restore, replay, compare, truncate."""

from belayer.recovery.environment import EnvironmentKeeper, EnvironmentState, RestartFunction

__all__ = ["EnvironmentKeeper", "EnvironmentState", "RestartFunction"]
