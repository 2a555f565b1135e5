"""Weights epochs: where each tensor lies, what identifies the content, how the next epoch is written."""
