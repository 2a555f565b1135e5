"""Checkpoints: what binds one to a journal position, and when to take one."""

from belayer.checkpoint.policy import Decision, Policy, Situation, make_policy

__all__ = ["Decision", "Policy", "Situation", "make_policy"]
