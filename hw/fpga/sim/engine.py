"""The compiled RTL on its modelled memory, for Python. Everything here is simulated."""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


class Setting(enum.IntEnum):
    """What the modelled memory can be told; engine_sim.cpp says what each is."""

    LATENCY_CYCLES = 0
    MILLI_BYTES_PER_CYCLE = 1
    FIXED_ARBITER = 2
    STALL_PERMILLE = 3
    SEED = 4
    READ_ERROR_FROM = 5
    READ_ERROR_TO = 6
    WRITE_ERROR_FROM = 7
    WRITE_ERROR_TO = 8
    SILENT_AFTER_BEATS = 9
    FLIP_BEAT = 10


class BusError(OSError):
    """The engine answered a register's access with SLVERR."""


@dataclass(slots=True)
class RtlEngine:
    """One engine and its memory; memory is UINT8, its first byte has the address base."""

    memory: NDArray[np.uint8]
    base: int
    _library: ctypes.CDLL
    _handle: int

    @classmethod
    def open(cls, library: Path, memory_bytes: int, base: int = 0x1000_0000) -> RtlEngine:
        loaded = ctypes.CDLL(str(library))
        loaded.e4_new.restype = ctypes.c_void_p
        loaded.e4_new.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)
        loaded.e4_free.argtypes = (ctypes.c_void_p,)
        loaded.e4_set.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
        loaded.e4_write.argtypes = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32)
        loaded.e4_read.argtypes = (ctypes.c_void_p, ctypes.c_uint32, ctypes.POINTER(ctypes.c_uint32))
        loaded.e4_step.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
        loaded.e4_run.restype = ctypes.c_uint64
        loaded.e4_run.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
        memory = np.zeros(memory_bytes, np.uint8)
        return cls(memory, base, loaded, loaded.e4_new(memory.ctypes.data, base, memory_bytes))

    def close(self) -> None:
        if self._handle:
            self._library.e4_free(self._handle)
            self._handle = 0

    def restart(self) -> None:
        """Begin with a new engine and all settings as at first; what memory holds stays."""
        self.close()
        self._handle = self._library.e4_new(self.memory.ctypes.data, self.base, self.memory.nbytes)

    def set(self, setting: Setting, value: int) -> None:
        self._library.e4_set(self._handle, setting, value)

    def write(self, offset: int, value: int) -> None:
        if self._library.e4_write(self._handle, offset, value & 0xFFFFFFFF):
            raise BusError(f"SLVERR writing register 0x{offset:02X}")

    def read(self, offset: int) -> int:
        value = ctypes.c_uint32()
        if self._library.e4_read(self._handle, offset, ctypes.byref(value)):
            raise BusError(f"SLVERR reading register 0x{offset:02X}")
        return value.value

    def read64(self, offset: int) -> int:
        return self.read(offset) | self.read(offset + 4) << 32

    def run(self, max_cycles: int) -> int:
        """Run until the engine raises its interrupt, at most max_cycles; gives the cycles it took."""
        return int(self._library.e4_run(self._handle, max_cycles))

    def step(self, n_cycles: int) -> None:
        """Run for n_cycles, interrupt or not."""
        self._library.e4_step(self._handle, n_cycles)
