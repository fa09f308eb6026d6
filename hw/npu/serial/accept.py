"""Accept a board with the serial NPU's firmware: python hw/npu/serial/accept.py PORT[@BAUD] [LAYERS]; prints a report.

Untested on hardware: it has talked to QEMU only. Run it from a checkout, with edge_rt's extra npu-serial.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from edge_rt.backends.npu import serial_format, serial_golden
from edge_rt.backends.npu.serial_model import compile_model
from edge_rt.backends.npu.serial_ports import parse_port
from edge_rt.devices.serial_npu import SerialNpu, SerialWire, is_pseudo_terminal
from tests.npu.serial_models import random_inputs, random_model
from tests.npu.serial_onnx import MODELS

PATIENCE_S = 120.0
N_ECHOES = 200


def main(arguments: list[str]) -> int:
    """Run the whole acceptance; 1 where anything differs."""
    spec = parse_port(arguments[0])
    npu = SerialNpu(SerialWire(spec.port, spec.baud))
    facts = npu.open(PATIENCE_S)
    is_emulated = facts.is_emulated or is_pseudo_terminal(spec.port)
    print(f"{'EMULATED, times are no device' + chr(39) + 's' if is_emulated else 'device'}: {facts}")
    n_wrong = layers(npu, int(arguments[1]) if len(arguments) > 1 else 1000)
    echo(npu, spec.baud)
    n_wrong += crop(npu)
    counts = npu.counts
    print(f"line: {counts.n_sent} segments, {counts.n_sent_again} sent again, {counts.n_timeouts} timeouts")
    print("ACCEPTED" if n_wrong == 0 else f"REFUSED: {n_wrong} results differ")
    npu.close()
    return int(n_wrong > 0)


def layers(npu: SerialNpu, n_wanted: int) -> int:
    rng = np.random.default_rng(1)
    n_done = n_wrong = 0
    while n_done < n_wanted:
        data = serial_format.pack(random_model(rng, 10))
        model = serial_format.unpack(data)
        inputs = random_inputs(rng, model)
        expected = serial_golden.run(model, inputs)
        npu.load(data, PATIENCE_S)
        outputs, _ = npu.run([values.tobytes() for values in inputs], [values.size for values in expected], PATIENCE_S)
        for want, got in zip(expected, outputs, strict=True):
            n_done += 1
            n_wrong += want.tobytes() != got
    print(f"layers: {n_done} run, {n_wrong} differ from numpy")
    return n_wrong


def echo(npu: SerialNpu, baud: int) -> None:
    data = np.random.default_rng(2).bytes(1024)
    began_s = time.monotonic()
    for _ in range(N_ECHOES):
        assert npu.echo(data, PATIENCE_S) == data, "a message came back changed"
    took_s = time.monotonic() - began_s
    print(f"echo: {N_ECHOES} × 1 kB at {N_ECHOES * 1024 / took_s:.0f} bytes a second each way, {baud} baud")


def crop(npu: SerialNpu) -> int:
    shapes = dict.fromkeys(("image", "golden"), (1, 1, 160, 160))
    program = compile_model(onnx.load(MODELS / "pcb-defect.int4.onnx"), shapes)
    rng = np.random.default_rng(3)
    inputs = [rng.integers(-128, 128, (port.h, port.w, port.c)).astype(np.int8) for port in program.inputs]
    expected = serial_golden.run(serial_format.unpack(program.file), inputs)
    npu.load(program.file, PATIENCE_S)
    outputs, times = npu.run([values.tobytes() for values in inputs], [values.size for values in expected], PATIENCE_S)
    print(f"pcb-defect, 160 × 160: {times}")
    return sum(want.tobytes() != got for want, got in zip(expected, outputs, strict=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
