"""The file of the default model, for benchmarks that load it by themselves."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from edge_rt import config
from edge_rt.catalog.manifest import Manifest
from edge_rt.catalog.store import Store, pick_variant
from edge_rt.devices import cpu


def manifest() -> Manifest:
    """Give what the catalog says of it."""
    settings = config.load().config.catalog
    return Store.open(settings, os.environ).get(settings.default_model)


def path_of(form: str = "", *, backend: str = "auto") -> Path:
    """Give the default model's file in a form, by default the one that runs here; ends the benchmark without it."""
    model = manifest()
    variant = pick_variant(model, cpu.features(), form, backend=backend)
    path = Store.open(config.load().config.catalog, os.environ).path(model, variant)
    if path is None:
        name = f"{model.id}:{variant.id}"
        sys.exit(f"{name} is not in the store: run `edge_rt models pull {name}` first")
    return path
