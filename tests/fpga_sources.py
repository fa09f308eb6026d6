"""Where tests take an INT4 engine from: its golden model, which is simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from edge_rt.backends.fpga import Source
from edge_rt.devices.fpga import Seen
from edge_rt.devices.fpga_ring import Caps, EnginePort, identify
from hw.fpga.sim.build import CONFIGS, Config
from hw.fpga.sim.port import GoldenPort


@dataclass
class GoldenBoard:
    """A board whose engine is the golden model, or what port makes of it; n_closed counts."""

    config: Config
    port: Callable[[Config, np.ndarray], EnginePort] = GoldenPort
    n_closed: int = 0
    ports: list[EnginePort] = field(default_factory=list)

    @property
    def caps(self) -> Caps:
        return identify(GoldenPort(self.config, np.zeros(0, np.uint8)), "golden")

    def allocate(self, n_bytes: int) -> EnginePort:
        self.ports.append(self.port(self.config, np.zeros(n_bytes, np.uint8)))
        return self.ports[-1]

    def close(self) -> None:
        self.n_closed += 1


def golden_source(board: GoldenBoard | None = None) -> Source:
    board = board or GoldenBoard(CONFIGS["kv260-gemm"])
    return Source("fpga-golden", "simulator", lambda: Seen(detail="the golden model: simulated"), lambda: board)
