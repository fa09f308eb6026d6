"""Errors on their way between processes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from edge_rt.errors.backends import BackendStepError
from edge_rt.errors.base import EdgeRtError


def subclasses(root: type[EdgeRtError] = EdgeRtError) -> list[type[EdgeRtError]]:
    """List the tree below root, root first."""
    return [root, *(c for child in root.__subclasses__() for c in subclasses(child))]


def from_wire(code: str, values: dict[str, Any]) -> EdgeRtError:
    """Rebuild an error that to_wire took apart in another process.

    An unknown code or field set becomes BackendStepError, so that a worker of another version cannot hide a failure.
    """
    for cls in subclasses():
        if cls.code == code and {f.name for f in fields(cls)} == set(values):
            return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    return BackendStepError(reason=f"{code}: {values}")
