"""What is said when a trainer or harness is not installed."""

from __future__ import annotations


def missing(package: str, extra: str, error: ImportError) -> ImportError:
    """The error to raise from `error`: `package` cannot be imported, and which extra of Belayer brings it."""
    return ImportError(
        f"this adapter needs {package}, which cannot be imported here ({error})\n"
        f"  next: pip install 'belayer[{extra}]'",
        name=error.name,
    )
