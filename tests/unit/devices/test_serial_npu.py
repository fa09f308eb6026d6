"""The serial NPU's host side against the real firmware, built for this machine, over a line with a fake clock."""

from __future__ import annotations

import os
import random
import tty
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_rt.backends.npu import serial_format, serial_golden
from edge_rt.devices.serial_npu import SerialNpu, SerialWire
from edge_rt.devices.serial_npu_frames import CONTROL, Control, FrameReader, pack_control
from edge_rt.devices.serial_npu_link import Link
from edge_rt.devices.serial_npu_messages import (
    CANCELLED,
    HELLO,
    MessageReader,
    SerialNpuError,
    SerialNpuRefusalError,
    pack_message,
    printable,
    read_facts,
)
from tests.lossy_line import Line, Noise
from tests.npu.serial_firmware import FirmwareDevice, FirmwareLink
from tests.npu.serial_models import random_inputs, random_model
from tests.npu.serial_strategies import NOISES
from tests.npu.serial_wire import FakeWire

ONE_PER_CENT = Noise(corrupt=0.005, drop=0.005)


def connect(device: object | None = None, noise: Noise | None = None, **options: float) -> tuple[SerialNpu, FakeWire]:
    wire = FakeWire(device or FirmwareDevice(), noise, **options)  # type: ignore[arg-type]
    npu = SerialNpu(wire, clock=wire.clock)
    npu.open(30)
    return npu, wire


def check_model(npu: SerialNpu, rng: np.random.Generator, n_layers: int) -> None:
    """Let a random model run on the device, and hold every bit of its outputs to numpy's."""
    data = serial_format.pack(random_model(rng, n_layers))
    model = serial_format.unpack(data)
    inputs = random_inputs(rng, model)
    expected = serial_golden.run(model, inputs)
    npu.load(data, 600)
    outputs, times = npu.run([values.tobytes() for values in inputs], [values.size for values in expected], 600)
    for layer, want, got in zip(model.outputs, expected, outputs, strict=True):
        assert got == want.tobytes(), next(step for step in model.layers if step.output == layer)
    assert times.upload_s > 0


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 2**32),
    NOISES,
    st.integers(0, 6_000),
    st.integers(0, 6_000),
)
def test_the_firmwares_link_decides_as_python_does(seed: int, noise: Noise, n_to_device: int, n_to_host: int) -> None:
    """Two devices hear the same bytes at the same times, one in C: they answer the same, byte for byte."""
    rng = random.Random(seed)
    twins = (Link(is_device=True), FirmwareLink())

    class Both:
        room = property(lambda _: twins[0].room)

        def receive(self, data: bytes, now_us: int) -> bytes:
            heard = [twin.receive(data, now_us) for twin in twins]
            assert heard[0] == heard[1]
            return heard[0]

        def transmit(self, now_us: int, max_bytes: int) -> bytes:
            said = [twin.transmit(now_us, max_bytes) for twin in twins]
            assert said[0] == said[1]
            return said[0]

        def wake_at_us(self) -> int | None:
            wake = [twin.wake_at_us() for twin in twins]
            assert wake[0] == wake[1]
            return wake[0]

    host = Link()
    line = Line(host, Both(), noise=noise, seed=seed, latency_us=rng.choice([100, 3_000, 20_000]))
    for _ in range(2):  # the second session forgets the first
        host.open(rng.randrange(1, 2**32), line.now_us)
        assert line.run(lambda: host.state == "open", 120)
        for got in line.got:
            got.clear()
        to_device, to_host = rng.randbytes(n_to_device), rng.randbytes(n_to_host)
        left = [to_device, to_host]

        def is_done(left: list[bytes] = left) -> bool:
            room = host.room
            host.send(left[0][:room])
            left[0] = left[0][room:]
            room = twins[0].room
            for twin in twins:
                assert twin.room == room
                twin.send(left[1][:room])
            left[1] = left[1][room:]
            return [len(got) for got in line.got] == [n_to_host, n_to_device]

        assert line.run(is_done, 600)
        assert line.got == (to_host, to_device)
    assert twins[0].n_sessions == twins[1].n_sessions == 2


def test_says_what_it_can() -> None:
    npu, _ = connect(FirmwareDevice(is_emulated=False))
    assert (npu.facts.weight_bits, npu.facts.kernels, npu.facts.is_emulated) == ((4, 8), "plain", False)
    assert connect()[0].facts.is_emulated


@pytest.mark.parametrize("seed", range(20))
def test_layers_are_those_of_numpy_in_every_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    npu, _ = connect(bytes_hz=1e7)
    for _ in range(5):
        check_model(npu, rng, 10)


@pytest.mark.parametrize("seed", range(3))
def test_results_are_right_over_a_line_that_loses_one_byte_in_a_hundred(seed: int) -> None:
    npu, _ = connect(noise=ONE_PER_CENT, seed=seed)
    for _ in range(3):
        check_model(npu, np.random.default_rng(seed), 6)


def test_a_model_that_is_there_is_not_sent_again() -> None:
    npu, wire = connect()
    data = serial_format.pack(random_model(np.random.default_rng(1), 10))
    sent = []
    for _ in range(2):
        before = wire.to_device.n_bytes
        npu.load(data, 10)
        sent.append(wire.to_device.n_bytes - before)
    assert sent[0] > len(data)
    assert sent[1] < 300


class Runs:
    """A random model, with an input and what numpy gives for it."""

    def __init__(self, seed: int, n_layers: int = 3) -> None:
        rng = np.random.default_rng(seed)
        self.data = serial_format.pack(random_model(rng, n_layers))
        model = serial_format.unpack(self.data)
        inputs = random_inputs(rng, model)
        expected = serial_golden.run(model, inputs)
        self.arguments = ([values.tobytes() for values in inputs], [values.size for values in expected], 20.0)
        self.expected = [values.tobytes() for values in expected]


def test_a_device_that_starts_anew_gets_its_model_again() -> None:
    npu, wire = connect()
    runs = Runs(2)
    npu.load(runs.data, 10)
    wire.device = FirmwareDevice()
    assert npu.run(*runs.arguments)[0] == runs.expected


@pytest.mark.parametrize(("is_spoilt", "is_sent"), [(False, False), (True, True)])
def test_a_model_that_has_outlived_a_reset_is_not_sent_again(is_spoilt: bool, is_sent: bool) -> None:
    npu, wire = connect()
    runs = Runs(2, n_layers=10)
    npu.load(runs.data, 10)
    wire.device.reset(spoil_at=len(runs.data) // 2 if is_spoilt else -1)  # type: ignore[attr-defined]
    npu.open(30)
    before = wire.to_device.n_bytes
    npu.load(runs.data, 10)
    sent = wire.to_device.n_bytes - before
    assert sent > len(runs.data) if is_sent else sent < 300
    assert npu.run(*runs.arguments)[0] == runs.expected


def big_model() -> bytes:
    """A model of which an upload takes seconds."""
    data = serial_format.pack(random_model(np.random.default_rng(11), 16, max_channels=149))
    assert len(data) > 25_000
    return data


@pytest.mark.parametrize("is_reset", [False, True])
def test_an_upload_that_breaks_off_goes_on_where_the_device_has_the_rest(is_reset: bool) -> None:
    """The line falls silent in mid upload; the board has kept what came, or has begun anew."""
    npu, wire = connect(bytes_hz=10_000.0)
    data = big_model()
    wire.later(2.0, lambda: setattr(wire.to_device, "noise", Noise(drop=1.0)))
    with pytest.raises(SerialNpuError):
        npu.load(data, 4.0)
    wire.to_device.noise = Noise()
    if is_reset:
        wire.device.reset()  # type: ignore[attr-defined]
    before = wire.to_device.n_bytes
    npu.load(data, 60)
    sent = wire.to_device.n_bytes - before
    assert sent > len(data) if is_reset else sent < len(data) - 10_000


def test_what_a_broken_off_upload_has_left_is_sent_anew_where_it_is_not_sound() -> None:
    npu, wire = connect(bytes_hz=10_000.0)
    data = big_model()
    wire.later(2.0, lambda: setattr(wire.to_device, "noise", Noise(drop=1.0)))
    with pytest.raises(SerialNpuError):
        npu.load(data, 4.0)
    wire.to_device.noise = Noise()
    wire.device.spoil(100)  # type: ignore[attr-defined]
    before = wire.to_device.n_bytes
    npu.load(data, 60)
    assert wire.to_device.n_bytes - before > 1.4 * len(data)


def test_a_board_that_resets_in_mid_upload_gets_the_model_in_the_same_load() -> None:
    npu, wire = connect(bytes_hz=10_000.0)
    data = big_model()
    for after_s in (1.0, 3.0):
        wire.later(after_s, wire.device.reset)  # type: ignore[attr-defined]
        npu.load(data, 60)
        wire.device.reset(spoil_at=0)  # type: ignore[attr-defined]
        npu.open(30)


MISHAPS = st.sampled_from(["reset", "reset and spoilt", "silence", "noise", "chatter", "deaf"])


@settings(deadline=None, max_examples=5)
@given(st.lists(st.tuples(st.floats(0.01, 3.0), MISHAPS), max_size=8), st.integers(0, 5))
def test_whatever_befalls_a_board_answers_are_right_or_none(mishaps: list[tuple[float, str]], seed: int) -> None:
    """Resets, silence, noise and strangers' bytes in mid upload and mid run; when they are over all is well again."""
    npu, wire = connect(FirmwareDevice(run_us=200_000), bytes_hz=30_000.0)
    models = [Runs(seed, n_layers=8), Runs(seed + 1)]

    def calm() -> None:
        wire.to_host.noise = wire.to_device.noise = Noise()

    def befall(mishap: str) -> None:
        if mishap.startswith("reset"):
            wire.device.reset(spoil_at=40 if "spoilt" in mishap else -1)  # type: ignore[attr-defined]
        elif mishap == "silence":
            wire.to_host.noise = Noise(drop=1.0)
        elif mishap == "deaf":
            wire.to_device.noise = Noise(drop=1.0)
        elif mishap == "noise":
            wire.to_host.noise = wire.to_device.noise = Noise(corrupt=0.03, drop=0.03, double=0.01)
        else:
            wire.to_host.put(random.Random(seed).randbytes(500), wire.now_us)
        wire.later(1.5, calm)

    for after_s, mishap in mishaps:
        wire.later(after_s, lambda mishap=mishap: befall(mishap))
    for runs in models * 3:
        began_s = wire.clock()
        try:
            npu.load(runs.data, 8)
            outputs, _ = npu.run(*runs.arguments[:2], 8)
            assert outputs == runs.expected
        except SerialNpuError:
            assert wire.clock() - began_s < 17
    wire.now_us += 10_000_000
    wire.read(0)
    calm()
    npu.load(models[0].data, 30)
    assert npu.run(*models[0].arguments)[0] == models[0].expected


def test_a_device_that_falls_silent_in_a_run_is_given_up_in_seconds() -> None:
    npu, wire = connect(FirmwareDevice(run_us=20_000_000))
    runs = Runs(2)
    npu.load(runs.data, 60)
    for wire_down in (wire.to_device, wire.to_host):
        wire.later(3.0, lambda wire_down=wire_down: setattr(wire_down, "noise", Noise(drop=1.0)))
    began_s = wire.clock()
    with pytest.raises(SerialNpuError, match="no device answers"):  # it was opened again, and said nothing
        npu.run(*runs.arguments[:2], 900.0)
    assert 3 < wire.clock() - began_s < 3 + 8


def test_a_device_that_computes_for_long_is_not_given_up() -> None:
    npu, wire = connect(FirmwareDevice(run_us=20_000_000))
    runs = Runs(2)
    npu.load(runs.data, 600)
    began_s = wire.clock()
    assert npu.run(*runs.arguments[:2], 900.0)[0] == runs.expected
    assert wire.clock() - began_s >= 20


def test_a_port_that_is_gone_is_told_at_once_and_closes() -> None:
    npu, wire = connect()
    wire.is_gone = True
    with pytest.raises(SerialNpuError, match="the port is gone"):
        npu.run([b"x"], [1], 10)
    npu.close()
    assert wire.is_closed


def test_silence_ends_at_the_deadline() -> None:
    npu, wire = connect()
    wire.to_device.noise = Noise(drop=1.0)
    began_s = wire.clock()
    with pytest.raises(SerialNpuError):
        npu.echo(b"hello", 2.0)
    assert wire.clock() - began_s < 2.2


@pytest.mark.parametrize("cancelled_after_s", [0.05, 0.3])
def test_a_run_is_cancelled_and_the_next_one_is_right(cancelled_after_s: float) -> None:
    npu, wire = connect(FirmwareDevice(run_us=500_000))
    rng = np.random.default_rng(4)
    data = serial_format.pack(random_model(rng, 4))
    npu.load(data, 10)
    model = serial_format.unpack(data)
    inputs = random_inputs(rng, model)
    expected = serial_golden.run(model, inputs)
    arguments = ([values.tobytes() for values in inputs], [values.size for values in expected], 10.0)
    wire.later(cancelled_after_s, npu.cancel)
    with pytest.raises(SerialNpuRefusalError) as told:
        npu.run(*arguments)
    assert told.value.status == CANCELLED
    outputs, _ = npu.run(*arguments)
    assert outputs == [values.tobytes() for values in expected]


def edited(edit: Callable[[bytearray], object]) -> bytes:
    data = bytearray(serial_format.pack(random_model(np.random.default_rng(7), 3)))
    edit(data)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GGUF" + bytes(60), "no model file"),
        (edited(lambda data: data.__setitem__(4, 2)), "another version"),
        (edited(lambda data: data.extend(bytes(16))), "not as long as it says"),
        (edited(lambda data: data.__setitem__(slice(12, 16), b"\xff\xff\xff\x7f")), "more memory than there is"),
        (edited(lambda data: data.__setitem__(slice(32, 34), b"\0\0")), "a tensor's shape"),
        (edited(lambda data: data.__setitem__(slice(40, 44), b"\0\0\xff\0")), "lies outside the memory"),
    ],
)
def test_a_model_that_is_none_is_refused_with_the_reason(data: bytes, reason: str) -> None:
    npu, _ = connect()
    with pytest.raises(SerialNpuRefusalError, match=reason):
        npu.load(data, 10)
    check_model(npu, np.random.default_rng(8), 2)


def test_what_a_device_says_is_no_command_to_a_terminal() -> None:
    assert printable(b"M55 \x1b[2J\n\xff\0rest") == "M55 ?[2J?\N{REPLACEMENT CHARACTER}"


def test_an_input_that_is_too_long_is_refused() -> None:
    npu, _ = connect()
    rng = np.random.default_rng(9)
    data = serial_format.pack(random_model(rng, 1))
    npu.load(data, 10)
    with pytest.raises(SerialNpuRefusalError, match="beyond the input's end"):
        npu.run([bytes(100_000)], [1], 10)


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_messages_from_a_hostile_device_end_in_an_error_of_ours(stream: bytes) -> None:
    reader = MessageReader()
    for part in (stream, pack_message(HELLO, 1, stream)):
        try:
            for message in reader.feed(part):
                read_facts(message.body)
        except SerialNpuError:
            reader = MessageReader()


def test_another_program_on_the_port_is_no_device() -> None:
    class Chatter:
        def receive(self, data: bytes, now_us: int) -> bytes:
            return b""

        def transmit(self, now_us: int, max_bytes: int) -> bytes:
            return b"login: " if now_us % 100_000 < 300 and max_bytes > 10 else b""

        def wake_at_us(self) -> None:
            return None

    wire = FakeWire(Chatter())
    npu = SerialNpu(wire, clock=wire.clock)
    with pytest.raises(SerialNpuError, match="no device answers"):
        npu.open(2.0)


def test_the_firmware_says_no_session_to_strangers() -> None:
    device = FirmwareLink()
    assert device.receive(b"AT+ID?\r", 1_000_000) == b""
    (told,) = FrameReader().feed(device.transmit(1_000_000, 100), 0)
    assert isinstance(told, Control)
    assert told.what == 3
    assert pack_control(told)[0] == CONTROL


def test_a_port_that_takes_nothing_more_holds_nobody_up() -> None:
    """A real pseudo terminal whose other end reads nothing: writing must not wait for it."""
    other, port = os.openpty()
    tty.setraw(port)
    wire = SerialWire(os.ttyname(port), 921_600)
    try:
        for _ in range(64):
            wire.write(bytes(1024))
        assert wire.room() == 0
        received = bytearray()
        while len(received) < 64 * 1024:
            received += os.read(other, 65_536)
            wire.room()
        assert wire.room() > 0
    finally:
        wire.close()
        os.close(other)
        os.close(port)
