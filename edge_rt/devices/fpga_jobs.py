"""What the INT4 engine is told and what it tells, as values: descriptors of jobs and the parts of STATUS."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_rt.devices import fpga_regs as regs


@dataclass(frozen=True, slots=True)
class Job:
    """One matrix times up to eight vectors, by address; what a descriptor says."""

    weights: int
    activations: int
    results: int
    n_blocks: int
    n_groups: int
    n_vectors: int
    group_log2: int
    block_log2: int
    asymmetric: bool
    tag: int = 0
    irq: bool = False

    def descriptor(self) -> NDArray[np.uint8]:
        """Give the 64 bytes."""
        words = [0] * (regs.DESCRIPTOR_BYTES // 4)
        values = {
            "MAGIC": regs.DESCRIPTOR_MAGIC,
            "IRQ": int(self.irq),
            "ASYMMETRIC": int(self.asymmetric),
            "GROUP_LOG2": self.group_log2,
            "BLOCK_LOG2": self.block_log2,
            "VECTORS": self.n_vectors,
            "N_GROUPS": self.n_groups,
            "N_BLOCKS": self.n_blocks,
            "TAG": self.tag,
        }
        for name, address in (("W", self.weights), ("X", self.activations), ("Y", self.results)):
            values[f"{name}_LO"], values[f"{name}_HI"] = address & 0xFFFFFFFF, address >> 32
        for name, value in values.items():
            word, low, mask = regs.DESCRIPTOR_FIELDS[name]
            if not 0 <= value <= mask:
                raise ValueError(f"{name} is {value}; a descriptor holds 0 to {mask}")
            words[word] |= value << low
        return np.array(words, "<u4").view(np.uint8)

    @classmethod
    def of(cls, data: NDArray[np.uint8]) -> Job | None:
        """Read 64 bytes back; None if they are no descriptor."""
        words = data.view("<u4")
        found = {name: int(words[word]) >> low & mask for name, (word, low, mask) in regs.DESCRIPTOR_FIELDS.items()}
        if found["MAGIC"] != regs.DESCRIPTOR_MAGIC:
            return None
        weights, activations, results = (found[f"{name}_LO"] | found[f"{name}_HI"] << 32 for name in "WXY")
        return cls(
            weights,
            activations,
            results,
            n_blocks=found["N_BLOCKS"],
            n_groups=found["N_GROUPS"],
            n_vectors=found["VECTORS"],
            group_log2=found["GROUP_LOG2"],
            block_log2=found["BLOCK_LOG2"],
            asymmetric=bool(found["ASYMMETRIC"]),
            tag=found["TAG"],
            irq=bool(found["IRQ"]),
        )


@dataclass(frozen=True, slots=True)
class Status:
    """What STATUS says, in parts."""

    busy: bool
    draining: bool
    aborted: bool
    read_error: bool
    write_error: bool
    timed_out: bool
    bad_config: bool
    port: int
    cause: int

    @classmethod
    def of(cls, value: int) -> Status:
        def field(name: tuple[int, int]) -> int:
            return value >> name[0] & name[1]

        return cls(
            busy=bool(field(regs.STATUS_BUSY)),
            draining=bool(field(regs.STATUS_DRAINING)),
            aborted=bool(field(regs.STATUS_ABORTED)),
            read_error=bool(field(regs.STATUS_ERR_READ)),
            write_error=bool(field(regs.STATUS_ERR_WRITE)),
            timed_out=bool(field(regs.STATUS_ERR_TIMEOUT)),
            bad_config=bool(field(regs.STATUS_ERR_CONFIG)),
            port=field(regs.STATUS_ERR_PORT),
            cause=field(regs.STATUS_ERR_CAUSE),
        )
