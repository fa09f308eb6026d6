"""edge_rt's version. The package's metadata has it from here: to read it there takes three dozen modules."""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"
