"""The configuration: tables.py says what can be set, loading.py where it comes from."""

from __future__ import annotations

from edge_rt.config.loading import SYSTEM_FILE, Key, Loaded, Setting, dotted, load, parse_key
from edge_rt.config.tables import (
    Actuator,
    Backend,
    Cache,
    Catalog,
    CloudEndpoint,
    Config,
    Engine,
    Fpga,
    Limits,
    Log,
    ModelSettings,
    Placement,
    Power,
    Router,
    Scheduler,
    Server,
    Tensor,
    Worker,
)

__all__ = [
    "SYSTEM_FILE",
    "Actuator",
    "Backend",
    "Cache",
    "Catalog",
    "CloudEndpoint",
    "Config",
    "Engine",
    "Fpga",
    "Key",
    "Limits",
    "Loaded",
    "Log",
    "ModelSettings",
    "Placement",
    "Power",
    "Router",
    "Scheduler",
    "Server",
    "Setting",
    "Tensor",
    "Worker",
    "dotted",
    "load",
    "parse_key",
]
