"""The `belayer` command."""

from belayer.cli.app import main

__all__ = ["main"]
