"""Who owns what on the host: the label that everything of a run carries, and the reaper that follows it."""

from belayer.ownership.labels import ENV_VAR, RunLabel, cache_choice, cache_dir, own_dir, store_dir

__all__ = ["ENV_VAR", "RunLabel", "cache_choice", "cache_dir", "own_dir", "store_dir"]
