"""One INT4 engine for one model: every product is right, from the engine or, where that fails, from the CPU.

A fault resets the engine, writes the matrix again and tries once more. A matrix with a second fault is computed on the
CPU for an hour, from the same numbers: particles flip bits, and what runs for years sees two of anything. An engine
that does not reset, because memory still owes it something, is left alone for a while; meanwhile everything is computed
on the CPU.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends import fpga_cpu
from edge_rt.backends.base import DeviceCounts
from edge_rt.backends.fpga_layout import Layout
from edge_rt.backends.fpga_numbers import Activations
from edge_rt.backends.fpga_pack import Matrix
from edge_rt.backends.fpga_products import FpgaProducts, Placement, place
from edge_rt.devices.fpga_ring import EnginePort, identify
from edge_rt.errors import BackendStepError, DeviceFaultError, DeviceMemoryError, DeviceTimeoutError

_log = logging.getLogger(__name__)

DEVICE = "the FPGA's engine"
MAX_STRIKES = 2
FORGIVE_S = 3600.0  # after the last fault of a matrix none of them counts any more
_RETRY_S = 30.0
_MAX_RETRY_S = 600.0

Fault = DeviceFaultError | DeviceTimeoutError | OSError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What an engine has done since it was loaded.

    n_products     computed on the engine
    n_on_cpu       computed on the CPU instead
    n_faults       how often the engine failed, retries included
    n_retried      products that the engine computed after a fault
    on_cpu         matrices that the CPU computes after two faults
    is_lost        the engine does not reset; it is tried again later
    last_fault     in words; "" if there was none
    memory_bytes   of the memory that the engine sees
    """

    n_products: int
    n_on_cpu: int
    n_faults: int
    n_retried: int
    on_cpu: tuple[str, ...]
    is_lost: bool
    last_fault: str
    memory_bytes: int

    def counts(self) -> DeviceCounts:
        return DeviceCounts(
            n_products=self.n_products, n_faults=self.n_faults, n_fallbacks=self.n_on_cpu, last_fault=self.last_fault
        )


class MatrixEngine(Protocol):
    """What multiplies a model's matrices."""

    def multiply(self, name: str, x: NDArray[np.float32] | Activations) -> NDArray[np.float32]: ...
    def report(self) -> EngineReport: ...
    def close(self) -> None: ...


# Loads matrices into an engine: what a model is given to open its device with.
EngineOpener = Callable[[Mapping[str, Matrix]], MatrixEngine]


@dataclass(slots=True)
class Guard:
    """Which matrices the engine may be asked for. Pure: every method takes the time."""

    _strikes: dict[str, tuple[int, float]] = field(default_factory=dict)  # how many, and when the last one was
    _retry_at_s: float | None = None
    _pause_s: float = _RETRY_S

    def allows(self, name: str, now_s: float) -> bool:
        """Say whether the engine may be asked; once it was lost, only from the end of its pause on."""
        if self._n_strikes(name, now_s) >= MAX_STRIKES:
            return False
        return self._retry_at_s is None or now_s >= self._retry_at_s

    def strike(self, name: str, now_s: float) -> int:
        """Count a fault of this matrix, and say how many it has had that still count."""
        n_strikes = self._n_strikes(name, now_s) + 1
        self._strikes[name] = n_strikes, now_s
        return n_strikes

    def lose(self, now_s: float) -> float:
        """Note that the engine does not reset, and give the pause until it may be tried again."""
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _MAX_RETRY_S)
        self._retry_at_s = now_s + pause_s
        return pause_s

    def find(self) -> None:
        """Note that the engine has been reset."""
        self._retry_at_s, self._pause_s = None, _RETRY_S

    @property
    def is_lost(self) -> bool:
        return self._retry_at_s is not None

    def struck_out(self, now_s: float) -> tuple[str, ...]:
        """Name the matrices that the engine is not asked for."""
        return tuple(name for name in self._strikes if self._n_strikes(name, now_s) >= MAX_STRIKES)

    def _n_strikes(self, name: str, now_s: float) -> int:
        n_strikes, last_s = self._strikes.get(name, (0, now_s))
        return 0 if now_s - last_s >= FORGIVE_S else n_strikes


class FpgaEngine:
    """The matrices of one model on one engine. Calls of several threads wait for each other."""

    def __init__(
        self,
        products: FpgaProducts,
        matrices: Mapping[str, Matrix],
        memory_bytes: int,
        close: Callable[[], None],
        now: Callable[[], float],
    ) -> None:
        self._products, self._matrices, self._memory_bytes = products, matrices, memory_bytes
        self._kept: dict[str, Matrix] = {}  # those that the CPU has computed: to read them may take long
        self._close, self._now = close, now
        self._guard, self._lock = Guard(), threading.Lock()
        self._n_products = self._n_on_cpu = self._n_faults = self._n_retried = 0
        self._last_fault = ""
        self._is_closed = False

    @classmethod
    def load(
        cls,
        port: EnginePort,
        matrices: Mapping[str, Matrix],
        placement: Placement | None = None,
        *,
        device: str = DEVICE,
        close: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> FpgaEngine:
        """Write matrices into an engine's memory. close is called once, when the engine is closed.

        matrices   are asked for again when a fault has come: a mapping that reads them then takes no memory
        placement  of the matrices, as place gives it for this engine; None makes it

        Raises DeviceMismatchError for another engine than this version's, DeviceMemoryError where the port's memory is
        too small, OSError where the engine cannot be reached.
        """
        caps = identify(port, device)
        placement = placement or place(matrices, Layout(caps.beat_bits), caps.n_vectors)
        if placement.memory_bytes > port.memory.nbytes:
            raise DeviceMemoryError(
                device=device,
                kind="its memory",
                need_bytes=placement.memory_bytes,
                free_bytes=port.memory.nbytes,
                remedy="take a smaller model",
            )
        products = FpgaProducts(port, placement, matrices, device)
        return cls(products, matrices, placement.memory_bytes, close, now)

    def multiply(self, name: str, x: NDArray[np.float32] | Activations) -> NDArray[np.float32]:
        """Multiply vectors [m, k], float32 or in the engine's numbers, with a matrix: float32 [m, n].

        A fault of the engine is no error of this call. Raises BackendStepError for vectors that are not finite, and
        after close.
        """
        with self._lock:
            if self._is_closed:
                raise BackendStepError(reason="the FPGA's engine is closed")
            try:
                return self._multiply(name, x)
            except ValueError as exc:
                raise BackendStepError(reason=f"{name}: {exc}") from exc

    def _multiply(self, name: str, x: NDArray[np.float32] | Activations) -> NDArray[np.float32]:
        has_failed = False
        while self._is_ready(name):
            try:
                out = self._products.multiply(name, x)
            except (DeviceFaultError, DeviceTimeoutError, OSError) as fault:
                has_failed = True
                self._recover(name, fault)
            else:
                self._n_products += 1
                self._n_retried += has_failed
                return out
        self._n_on_cpu += 1
        if name not in self._kept:
            self._kept[name] = self._matrices[name]
        return fpga_cpu.multiply(self._kept[name], self._products.rounded(name, x))

    def _is_ready(self, name: str) -> bool:
        if not self._guard.allows(name, self._now()):
            return False
        if self._guard.is_lost and self._reset(name):
            _log.warning("%s is back", DEVICE)
        return not self._guard.is_lost

    def _recover(self, name: str, fault: Fault) -> None:
        """Count a fault, and bring the engine and the matrix back to where they may be tried again."""
        self._n_faults += 1
        self._last_fault = str(fault)
        n_strikes = self._guard.strike(name, self._now())
        if not self._reset(name):
            return
        facts = {"matrix": name, "strikes": n_strikes, "fault": self._last_fault}
        if n_strikes >= MAX_STRIKES:
            _log.error("matrix %s is computed on the CPU for the next %g s", name, FORGIVE_S, extra=facts)
        else:
            _log.warning("the FPGA's engine is reset and tried again", extra=facts)

    def _reset(self, name: str) -> bool:
        try:
            is_reset = self._products.ring.reset()
            if is_reset:
                # What it read may have been changed in memory: it reads what is known to be right.
                self._products.write(name, self._matrices[name])
        except OSError as exc:
            is_reset, self._last_fault = False, f"it cannot be reached: {exc}"
        if is_reset:
            self._guard.find()
        else:
            pause_s = self._guard.lose(self._now())
            facts = {"fault": self._last_fault, "retry_s": pause_s}
            _log.error("%s does not reset; the CPU computes meanwhile", DEVICE, extra=facts)
        return is_reset

    def report(self) -> EngineReport:
        return EngineReport(
            n_products=self._n_products,
            n_on_cpu=self._n_on_cpu,
            n_faults=self._n_faults,
            n_retried=self._n_retried,
            on_cpu=self._guard.struck_out(self._now()),
            is_lost=self._guard.is_lost,
            last_fault=self._last_fault,
            memory_bytes=self._memory_bytes,
        )

    def close(self) -> None:
        """Give the engine back; idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._close()
