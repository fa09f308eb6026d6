"""Accept a board with the serial NPU's firmware, and write a report to send back.

    python hw/npu/serial/accept.py PORT[@BAUD] [--layers 1000] [--json report.json]

Every bit of random layers and of a crop of pcb-defect is compared with numpy's. Untested on hardware: it has talked to
QEMU only. Run it from a checkout, with edge_rt's extra npu-serial.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from edge_rt.backends.npu import serial_format, serial_golden
from edge_rt.backends.npu.serial_model import compile_model
from edge_rt.backends.npu.serial_ports import parse_port
from edge_rt.devices.serial_npu import SerialNpu, SerialWire, is_pseudo_terminal
from edge_rt.devices.serial_npu_messages import SerialNpuError, SerialNpuRefusalError
from hw.npu.acceptance import about, give, json_option
from tests.npu.serial_models import random_inputs, random_model
from tests.npu.serial_onnx import MODELS

_PATIENCE_S = 120.0
_N_ECHOES = 200


def examine(npu: SerialNpu, n_layers: int, *, is_emulated: bool) -> dict[str, Any]:
    """Compare and measure; what fails is told in the report, with all that was found before."""
    report = about()
    try:
        facts = npu.open(_PATIENCE_S)
        report["device"] = msgspec.to_builtins(asdict(facts))
        report["times"] = "of an emulation: no device's" if is_emulated or facts.is_emulated else "of a device"
        report["layers"] = layers(npu, n_layers)
        report["echo_bytes_hz"] = echo(npu)
        report["pcb-defect, 160 × 160"] = crop(npu)
        report["line"] = asdict(npu.counts)
        n_wrong = report["layers"]["n_different"] + report["pcb-defect, 160 × 160"]["n_different"]
        if n_wrong:
            report["failed"] = f"{n_wrong} results differ from numpy's"
    except (SerialNpuError, SerialNpuRefusalError) as exc:
        report["failed"] = exc.reason
    return report


def layers(npu: SerialNpu, n_wanted: int) -> dict[str, int]:
    """Run random layers; give how many ran, and of how many a bit differed."""
    rng = np.random.default_rng(1)
    n_run = n_different = 0
    while n_run < n_wanted:
        data = serial_format.pack(random_model(rng, 10))
        model = serial_format.unpack(data)
        inputs = random_inputs(rng, model)
        expected = serial_golden.run(model, inputs)
        npu.load(data, _PATIENCE_S)
        outputs, _ = npu.run([values.tobytes() for values in inputs], [values.size for values in expected], _PATIENCE_S)
        n_run += len(expected)
        n_different += sum(want.tobytes() != got for want, got in zip(expected, outputs, strict=True))
    return {"n_run": n_run, "n_different": n_different}


def echo(npu: SerialNpu) -> float:
    """Give the bytes a second, each way, of messages of 1 kB that come back."""
    data = np.random.default_rng(2).bytes(1024)
    began_s = time.monotonic()
    for _ in range(_N_ECHOES):
        if npu.echo(data, _PATIENCE_S) != data:
            raise SerialNpuError("a message came back changed")
    return _N_ECHOES * 1024 / (time.monotonic() - began_s)


def crop(npu: SerialNpu) -> dict[str, Any]:
    """Run the device's part of pcb-defect; give its times, and how many outputs differed."""
    shapes = dict.fromkeys(("image", "golden"), (1, 1, 160, 160))
    program = compile_model(onnx.load(MODELS / "pcb-defect.int4.onnx"), shapes)
    rng = np.random.default_rng(3)
    inputs = [rng.integers(-128, 128, (port.h, port.w, port.c)).astype(np.int8) for port in program.inputs]
    expected = serial_golden.run(serial_format.unpack(program.file), inputs)
    npu.load(program.file, _PATIENCE_S)
    outputs, times = npu.run([values.tobytes() for values in inputs], [values.size for values in expected], _PATIENCE_S)
    n_different = sum(want.tobytes() != got for want, got in zip(expected, outputs, strict=True))
    return asdict(times) | {"n_different": n_different}


@click.command()
@click.argument("port")
@click.option("--layers", "n_layers", default=1000, show_default=True, type=click.IntRange(1, 100_000))
@json_option
def main(port: str, n_layers: int, file: Path | None) -> None:
    """Examine the board at PORT; ends with 1 where something failed."""
    spec = parse_port(port)
    npu = SerialNpu(SerialWire(spec.port, spec.baud))
    try:
        report = examine(npu, n_layers, is_emulated=is_pseudo_terminal(spec.port))
    finally:
        npu.close()
    give({"port": port} | report, file)


if __name__ == "__main__":
    main()
