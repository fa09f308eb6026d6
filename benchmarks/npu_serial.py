"""The serial NPU's line: what its frames cost, and what is left where one byte in a hundred is gone.

    python benchmarks/npu_serial.py [--quick] [--check] [--json FILE]

EMULATED: the device is its firmware in C, built for this machine, behind a pseudo terminal whose other end hands bytes
over at the pace of 230,400 baud each way and garbles or drops some (half of them each). The host's side is the
product's, by pyserial. Messages of 1 kB go to the device (a model's chunks), and to the device and back (echoes). The
UART of QEMU is not measured: its time is no device's. Every answer is compared. Then random layers run in QEMU, where
it is installed, and every bit is compared with numpy's.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import select
import sys
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import harness
import numpy as np

from edge_rt.backends.npu import serial_format, serial_golden
from edge_rt.devices.serial_npu import SerialNpu, SerialWire
from edge_rt.devices.serial_npu_messages import SerialNpuRefusalError
from tests.lossy_line import Noise
from tests.npu.serial_firmware import FirmwareDevice, emulated, library, missing_tools
from tests.npu.serial_models import random_inputs, random_model

BAUD = 230_400
PAYLOAD = 1024
ONE_PER_CENT = Noise(corrupt=0.005, drop=0.005)
PATIENCE_S = 600.0
CATCH_UP_S = 0.25  # a line goes on while the process that stands for it does not run; an idle one is seen to be idle


def board(terminal: int, noise: Noise, seed: int) -> None:
    """Be the line and the device behind it, until the process is ended."""
    device, rng, bytes_hz = FirmwareDevice(), random.Random(seed), BAUD / 10
    os.set_blocking(terminal, False)
    to_host = bytearray()
    read_s = wrote_s = time.monotonic()
    while True:
        select.select([terminal], [], [], 0.001)
        now_s = time.monotonic()
        now_us = int(now_s * 1e6)
        read_s = max(read_s, now_s - CATCH_UP_S)
        data = b""
        if (room := int((now_s - read_s) * bytes_hz)) > 0:
            try:
                data = os.read(terminal, room)
            except (BlockingIOError, OSError):
                time.sleep(0.0005)
            read_s = read_s + len(data) / bytes_hz if data else now_s
        device.receive(noise.spoil(data, rng), now_us)
        wrote_s = max(wrote_s, now_s - CATCH_UP_S)
        if (room := int((now_s - wrote_s) * bytes_hz)) > 0:
            if len(to_host) < room and (sent := device.transmit(now_us, room - len(to_host))):
                to_host += noise.spoil(sent, rng)
            n = min(room, len(to_host))
            if n:
                try:
                    n = os.write(terminal, bytes(to_host[:n]))
                except BlockingIOError:
                    n = 0
                del to_host[:n]
            wrote_s = wrote_s + n / bytes_hz if n else now_s


@contextmanager
def connected(noise: Noise, seed: int) -> Iterator[SerialNpu]:
    terminal, port = os.openpty()
    tty.setraw(port)
    child = multiprocessing.get_context("fork").Process(target=board, args=(terminal, noise, seed), daemon=True)
    child.start()
    npu = SerialNpu(SerialWire(os.ttyname(port), BAUD, is_paced=True), max_chunk=PAYLOAD)
    try:
        npu.open(30)
        yield npu
    finally:
        child.kill()
        child.join()
        npu.close()
        os.close(terminal)
        os.close(port)


def upload(npu: SerialNpu, data: bytes) -> None:
    """Send a model's chunks; what arrives is hashed, and then refused, because it is none."""
    try:
        npu.load(data, PATIENCE_S)
    except SerialNpuRefusalError as exc:
        if "no model file" not in exc.reason:
            raise
        return
    raise RuntimeError("random bytes were taken for a model")


def echo(npu: SerialNpu, data: bytes) -> None:
    parts = [data[start : start + PAYLOAD] for start in range(0, len(data), PAYLOAD)]
    if npu.echo_all(parts, PATIENCE_S) != parts:
        raise RuntimeError("an echo came back changed")


class Measured:
    """One direction of use: rates by noise, and what the clean line carried beside the payloads."""

    def __init__(self, name: str, n_bytes: int) -> None:
        self.name, self._n_bytes = name, n_bytes
        self.overheads: list[float] = []
        self._seed = 0

    def rate(self, noise: Noise) -> float:
        """Give the payload's bytes a second, each way."""
        self._seed += 1
        data = random.Random(self._seed).randbytes(self._n_bytes)
        with connected(noise, self._seed) as npu:
            before = npu.counts.sent_bytes + npu.counts.received_bytes
            began_s = time.monotonic()
            (upload if self.name == "to the device" else echo)(npu, data)
            took_s = time.monotonic() - began_s
            carried = npu.counts.sent_bytes + npu.counts.received_bytes - before
        payload = len(data) * (1 if self.name == "to the device" else 2)
        if noise == Noise():
            self.overheads.append(100 * (carried / payload - 1))
        return len(data) / took_s


def equal_layers(board: str, n_wanted: int) -> tuple[int, int]:
    """Run random layers in QEMU; give how many ran, and how many differed."""
    rng = np.random.default_rng(547)
    n_done = n_wrong = 0
    with emulated(board) as (port, _):
        npu = SerialNpu(SerialWire(port, 921_600))
        npu.open(PATIENCE_S)
        while n_done < n_wanted:
            data = serial_format.pack(random_model(rng, 10))
            model = serial_format.unpack(data)
            inputs = random_inputs(rng, model)
            expected = serial_golden.run(model, inputs)
            npu.load(data, PATIENCE_S)
            got, _ = npu.run([values.tobytes() for values in inputs], [values.size for values in expected], PATIENCE_S)
            n_done += len(expected)
            n_wrong += sum(want.tobytes() != values for want, values in zip(expected, got, strict=True))
        npu.close()
    return n_done, n_wrong


def main() -> None:
    arguments = harness.parse(__doc__)
    library()  # built before processes part
    n_bytes = 64 * PAYLOAD if arguments.quick else 256 * PAYLOAD
    claims, figures = [], []
    for name in ("to the device", "echoed"):
        measured = Measured(name, n_bytes)
        pair = harness.paired(
            "1 % gone",
            lambda measured=measured: measured.rate(ONE_PER_CENT),
            "clean",
            lambda measured=measured: measured.rate(Noise()),
            n_pairs=arguments.pairs(3, quick=1),
            n_warmup=0,
        )
        claims.append(harness.Claim(name=f"EMULATED: 1 kB messages {name}, bytes/s", pair=pair, at_least=0.6))
        figures.append(
            harness.Figure(
                name=f"EMULATED: beside the payload, {name}, both ways",
                unit="%",
                samples=tuple(measured.overheads),
                at_most=3.0,
            )
        )
    counts: dict[str, tuple[int, int]] = {}
    if missing := missing_tools():
        print(f"no layers in QEMU: {missing}", file=sys.stderr)
    else:
        for name in ("an547", "an500"):
            counts[name] = equal_layers(name, 50 if arguments.quick else 1000)
            print(f"EMULATED {name}: {counts[name][0]} random layers, {counts[name][1]} differ from numpy")
            figures.append(
                harness.Figure(
                    name=f"EMULATED: {name}, layers that differ",
                    unit=f"of {counts[name][0]}",
                    samples=(float(counts[name][1]),),
                    at_most=0.0,
                )
            )
    harness.finish(arguments, claims, extra={"layers": counts}, figures=figures)


if __name__ == "__main__":
    main()
