"""Recovery of environments: restore, replay, compare, truncate."""

from belayer.recovery.environment import EnvironmentKeeper
from belayer.recovery.states import EnvironmentState, RestartFunction

__all__ = ["EnvironmentKeeper", "EnvironmentState", "RestartFunction"]
