"""The board's driver over a script and a folder in the place of the board's files; FAKE_RKNN names both."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE / "fake_rknnlite"), str(_HERE.parents[1] / "edge_rt" / "backends")]

from npu import rknnlite_driver  # type: ignore[import-not-found] # noqa: E402 - found in the folder just named


class Driver(rknnlite_driver.Driver):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(os.environ["FAKE_RKNN"], "stub")
