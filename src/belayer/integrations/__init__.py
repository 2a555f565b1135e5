"""Adapters for trainers and harnesses. Each module needs the framework whose name it bears."""
