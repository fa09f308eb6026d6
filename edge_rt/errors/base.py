"""What all errors share, and settings that are wrong."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar


@dataclass(eq=False)
class EdgeRtError(Exception):
    """Root of the tree; never raised itself."""

    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def to_wire(self) -> tuple[str, dict[str, Any]]:
        return self.code, asdict(self)


@dataclass(eq=False)
class ConfigError(EdgeRtError):
    """A setting is unknown, malformed or out of range; origin names the file, variable or flag."""

    code = "config_error"
    key: str
    problem: str
    origin: str

    def __str__(self) -> str:
        return f"{self.key}: {self.problem} (from {self.origin})"
