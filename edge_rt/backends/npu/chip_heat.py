"""How hot a chip is, by the kernel; for drivers, under whatever Python a host process has."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Sequence  # noqa: UP035 - Python 3.8 knows no others at run time

_MAX_BYTES = 64  # of a zone's name or reading
_MILLIDEGREES = re.compile(r"-?[0-9]{1,6}\Z")


def hottest_c(root: Path, parts: Sequence[str]) -> float | None:
    """Give the highest temperature of the zones whose names hold one of parts, None where no zone tells one."""
    found = []
    for zone in (root / "sys/class/thermal").glob("thermal_zone*"):
        with contextlib.suppress(OSError):
            name, reading = (_read(zone / file) for file in ("type", "temp"))
            if any(part in name.lower() for part in parts) and _MILLIDEGREES.match(reading):
                found.append(int(reading) / 1000)
    return max(found, default=None)


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_MAX_BYTES).decode("utf-8", "replace").strip()
