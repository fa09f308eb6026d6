"""A tree of kernel files that fails as the kernel does: an errno at read, or other bytes than the file has."""

from __future__ import annotations

import os
from pathlib import Path

from edge_rt.devices.sysfs import SysfsRoot


class FaultyRoot(SysfsRoot):
    """faults: path → the errno that reading it ends with, or the bytes it gives. Paths are without a leading slash."""

    __slots__ = ("faults",)

    def __init__(self, root: Path, faults: dict[str, int | bytes] | None = None) -> None:
        super().__init__(root)
        self.faults = faults if faults is not None else {}

    def read_bytes(self, path: str) -> bytes:
        fault = self.faults.get(path)
        if isinstance(fault, int):
            raise OSError(fault, os.strerror(fault), path)
        return super().read_bytes(path) if fault is None else fault
