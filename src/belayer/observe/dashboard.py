"""The Grafana dashboard that is shipped: `belayer metrics dashboard` prints it, Grafana imports it."""

from __future__ import annotations

from importlib.resources import files


def dashboard_json() -> str:
    """The dashboard's JSON, for Grafana 10 or newer; it asks for its Prometheus data source and instance itself."""
    return files("belayer.observe").joinpath("grafana.json").read_text(encoding="utf-8")
