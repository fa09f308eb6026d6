"""Compile an int8 TensorFlow Lite file for Arm's Ethos-U by Vela, and read which operators it places where.

Nothing runs: what Vela tells of cycles and time is its estimate for a modelled system, and named so. Needs the extra
`npu-vela`.
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from edge_rt.convert.tflite_file import FileOperator, read_operators
from edge_rt.errors import BackendLoadError, BackendUnavailableError, ModelFormatError
from edge_rt.regular import open_regular

EVIDENCE: Final = "compiled only"
ACCELERATORS: Final = (
    *(f"ethos-u55-{macs}" for macs in (32, 64, 128, 256)),
    *(f"ethos-u65-{macs}" for macs in (256, 512)),
    *(f"ethos-u85-{macs}" for macs in (128, 256, 512, 1024, 2048)),
)

_NPU_OPERATOR: Final = "ethos-u"
_TIME_LIMIT_S: Final = 900.0
_MAX_FILE_BYTES: Final = 2**28
_MAX_LOG_BYTES: Final = 2**20
_MAX_CELL: Final = 2**40
_PLACED: Final = re.compile(
    r"operator: (?P<kind>\w{1,64}), ofm: '(?P<output>[^'\n]{1,512})'\nReason: (?P<reason>[^\n]{1,400})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuOperator:
    """An operator that stays with the microcontroller, and why."""

    kind: str
    output: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VelaReport:
    """What Vela says of a model; all but the placement is estimated, for system and memory mode.

    n_operators    of the file that was given; n_npu of them are in the command streams of the NPU
    cpu            the others
    file           what was compiled, for TensorFlow Lite for microcontrollers with the Ethos-U driver
    evidence       nothing has run
    """

    accelerator: str
    compiler: str
    system: str
    memory_mode: str
    n_operators: int
    n_npu: int
    cpu: tuple[CpuOperator, ...]
    clock_hz: float
    n_cycles: int
    inference_s: float
    n_macs: int
    sram_bytes: int
    flash_bytes: int
    dram_bytes: int
    file: Path
    evidence: str = EVIDENCE


def compiler_version() -> str:
    """Tell Vela's version, without running it. Raises BackendUnavailableError where it is not installed."""
    try:
        return version("ethos-u-vela")
    except PackageNotFoundError:
        raise BackendUnavailableError(
            backend="vela", reason="ethos-u-vela is not installed", extra="npu-vela"
        ) from None


def compile_for_ethos(src: Path, dst: Path, accelerator: str, *, time_limit_s: float = _TIME_LIMIT_S) -> VelaReport:
    """Compile src, an int8 TensorFlow Lite file, into dst, in a process of its own.

    Raises ModelFormatError for a file that is none, BackendLoadError where Vela fails or takes too long, and
    BackendUnavailableError without it.
    """
    installed = compiler_version()
    given = _operators(src)
    with tempfile.TemporaryDirectory(prefix="edge_rt-vela-", dir=dst.parent) as folder:
        log = _run(src, Path(folder), accelerator, time_limit_s)
        made = _only(folder, "*_vela.tflite", src.name)
        summary = _summary(_only(folder, "*_summary_*.csv", src.name), src.name)
        left = [each for each in _operators(made) if each.kind != _NPU_OPERATOR]
        made.replace(dst)
    cpu = tuple(_cpu_operators(left, log))
    return VelaReport(
        accelerator=accelerator,
        compiler=f"vela {installed}",
        system=summary["system_config"],
        memory_mode=summary["memory_mode"],
        n_operators=len(given),
        n_npu=len(given) - len(cpu),
        cpu=cpu,
        clock_hz=_number(summary, "core_clock"),
        n_cycles=int(_number(summary, "cycles_total")),
        inference_s=_number(summary, "inference_time"),
        n_macs=int(_number(summary, "nn_macs")),
        sram_bytes=_kibibytes(summary, "sram_memory_used"),
        flash_bytes=_kibibytes(summary, "off_chip_flash_memory_used")
        + _kibibytes(summary, "on_chip_flash_memory_used"),
        dram_bytes=_kibibytes(summary, "dram_memory_used"),
        file=dst,
    )


def _run(src: Path, folder: Path, accelerator: str, time_limit_s: float) -> str:
    if accelerator not in ACCELERATORS:
        raise BackendLoadError(
            model=src.name, reason=f"no accelerator {accelerator}; there are {', '.join(ACCELERATORS)}"
        )
    if find_spec("ethosu") is None:
        raise BackendUnavailableError(backend="vela", reason="ethos-u-vela cannot be imported", extra="npu-vela")
    command = [sys.executable, "-P", "-m", "ethosu.vela", str(src.resolve()), "--accelerator-config", accelerator]
    command += ["--output-dir", str(folder), "--show-cpu-operations"]
    log = folder / "log"
    with log.open("wb") as stream:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                timeout=time_limit_s,
                check=False,
                cwd=folder,
            )
        except subprocess.TimeoutExpired:
            raise BackendLoadError(
                model=src.name, reason=f"Vela has not finished for {accelerator} within {time_limit_s:g} s"
            ) from None
    with log.open("rb") as stream:
        text = stream.read(_MAX_LOG_BYTES).decode(errors="replace")
    if done.returncode:
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "it said nothing")
        raise BackendLoadError(model=src.name, reason=f"Vela ended with {done.returncode}: {last[:300]}")
    return text


def _operators(path: Path) -> tuple[FileOperator, ...]:
    try:
        with open_regular(path) as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise ValueError(f"has more than {_MAX_FILE_BYTES} bytes")
        return read_operators(data)
    except (OSError, ValueError) as exc:
        raise ModelFormatError(path=path.name, field="file", problem=str(exc)) from exc


def _only(folder: str, pattern: str, model: str) -> Path:
    found = list(Path(folder).glob(pattern))
    if len(found) != 1:
        raise BackendLoadError(model=model, reason=f"Vela wrote {len(found)} files {pattern}, not one")
    return found[0]


def _summary(path: Path, model: str) -> Mapping[str, str]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if len(rows) != 1 or None in rows[0].values():
        raise BackendLoadError(model=model, reason=f"Vela's summary has {len(rows)} rows, not one")
    return rows[0]


def _number(summary: Mapping[str, str], name: str) -> float:
    try:
        value = float(summary[name])
    except (KeyError, ValueError):
        raise BackendLoadError(
            model=summary.get("network", ""), reason=f"Vela's summary has no number {name}"
        ) from None
    if not 0 <= value < _MAX_CELL:
        raise BackendLoadError(model=summary.get("network", ""), reason=f"Vela's summary says {name} = {value}")
    return value


def _kibibytes(summary: Mapping[str, str], name: str) -> int:
    return round(_number(summary, name) * 1024)


def _cpu_operators(left: list[FileOperator], log: str) -> list[CpuOperator]:
    reasons = {found["output"]: found["reason"] for found in _PLACED.finditer(log)}
    told = "Vela says nothing of it"
    return [CpuOperator(kind=each.kind, output=each.output, reason=reasons.get(each.output, told)) for each in left]
