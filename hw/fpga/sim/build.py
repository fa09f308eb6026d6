"""Compile the engine's RTL with Verilator into a library, once per configuration, outside the tree."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_RTL = _HERE.parent / "rtl"


@dataclass(frozen=True, slots=True)
class Config:
    """What an engine is built as. beat_bits is a port's width, k_max the longest row, in weights.

    n_lut_products of a beat's products per pair of vectors are made without the board's multipliers; those are wide
    where they take 27 by 18 bits.
    """

    name: str
    beat_bits: int
    n_ports: int
    n_vectors: int
    addr_bits: int
    k_max: int = 8192
    n_lut_products: int = 0
    has_wide_multipliers: bool = False

    @property
    def parameters(self) -> Mapping[str, int]:
        """The parameters of e4_engine, but for BUILD."""
        return {
            "ADDR": self.addr_bits,
            "BEAT": self.beat_bits,
            "PORTS": self.n_ports,
            "N_VEC": self.n_vectors,
            "X_DEPTH": self.k_max * 4 // self.beat_bits,
            "LUT_PRODUCTS": self.n_lut_products,
            "WIDE": int(self.has_wide_multipliers),
        }


# 64 and 128 weights a cycle; the last of each pair has as many ports as its board's DDR memory can feed.
CONFIGS = {
    config.name: config
    for config in (
        Config("z2-gemv", 64, 4, 1, 32),
        Config("z2-gemm", 64, 2, 8, 32, n_lut_products=1),
        Config("kv260-gemv", 128, 4, 1, 40, has_wide_multipliers=True),
        Config("kv260-gemm", 128, 4, 8, 40, has_wide_multipliers=True),
    )
}


class SimulatorBuildError(RuntimeError):
    """The RTL could not be compiled; the text is the tool's."""


def source_hash(rewritten: Mapping[Path, str] | None = None) -> str:
    """Hash what the hardware is made of: the first 8 hex digits are the engine's BUILD register.

    rewritten has the texts of files that are about to be written.
    """
    texts = {path: path.read_bytes() for pattern in ("*.sv", "*.svh") for path in _RTL.glob(pattern)}
    texts |= {path: text.encode() for path, text in (rewritten or {}).items()}
    digest = hashlib.sha256()
    for path in sorted(texts):
        digest.update(path.name.encode() + b"\0" + texts[path])
    return digest.hexdigest()


def find(config: Config) -> Path | None:
    """Give the configuration's library, None if it is still to be compiled. Raises SimulatorBuildError if it cannot."""
    library = _library(config)
    if library.exists():
        return library
    _verilator()
    return None


def build(config: Config) -> Path:
    """Give the path of the configuration's library, compiling it if no one has yet."""
    if (found := find(config)) is not None:
        return found
    library = _library(config)
    library.parent.mkdir(parents=True, exist_ok=True)
    with (library.parent / f"{config.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=library.parent) as work:
                _compile(_verilator(), config, Path(work), library)
    return library


def _library(config: Config) -> Path:
    return kept(config, (_HERE / "engine_sim.cpp").read_text(), ".so")


def kept(config: Config, made_by: str, suffix: str) -> Path:
    """Say where what a tool makes of a configuration is kept, by what it is made of; the file may not be there yet."""
    digest = hashlib.sha256((source_hash() + made_by + repr(config)).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "edge_rt" / "rtl"
    return cache / f"{config.name}-{digest.hexdigest()[:16]}{suffix}"


def _verilator() -> str:
    if (found := shutil.which("verilator")) is None:
        raise SimulatorBuildError("verilator is not installed: apt-get install verilator")
    return found


def _compile(verilator: str, config: Config, work: Path, library: Path) -> None:
    parameters = {**config.parameters, "BUILD": f"32'h{source_hash()[:8]}"}
    defines = f"-DE4_BEAT={config.beat_bits} -DE4_PORTS={config.n_ports} -DE4_ADDR={config.addr_bits}"
    command = [
        verilator, "--cc", "--exe", "--build", "-j", "2", "-O3", "-Wno-fatal", "-Wno-lint", "--x-assign", "fast",
        "--top-module", "e4_engine", f"-I{_RTL}", "--Mdir", str(work / "obj"),
        "-CFLAGS", f"-std=c++17 -O2 -fPIC {defines}", "-LDFLAGS", "-shared",
        *(f"-G{name}={value}" for name, value in parameters.items()),
        *map(str, sorted(_RTL.glob("*.sv"))), str(_HERE / "engine_sim.cpp"), "-o", str(work / "engine.so"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SimulatorBuildError(f"{config.name}: {(done.stderr or done.stdout)[-2000:]}")
    (work / "engine.so").replace(library)
