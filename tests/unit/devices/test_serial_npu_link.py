"""The serial NPU's link over a line that garbles, drops, doubles and inserts bytes, with a clock of its own."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_rt.devices.serial_npu_frames import (
    MAX_PAYLOAD,
    NO_SESSION,
    SHORT_OVERHEAD,
    STALE_US,
    Ack,
    Control,
    Data,
    Frame,
    FrameReader,
    allowed,
    pack_ack,
    pack_control,
    pack_data,
    wire_bytes,
)
from edge_rt.devices.serial_npu_link import WINDOW, Link
from edge_rt.devices.serial_npu_quality import _RATES, _SEGMENTS, MAX_SEGMENT, MIN_SEGMENT, LineQuality
from tests.lossy_line import Line, Noise
from tests.npu.serial_strategies import NOISES

ONE_PER_CENT = Noise(corrupt=0.005, drop=0.005)


def line(**options: object) -> tuple[Line, Link, Link]:
    host, device = Link(), Link(is_device=True)
    connected = Line(host, device, **options)  # type: ignore[arg-type]
    host.open(0x1234_5678, connected.now_us)
    assert connected.run(lambda: host.state == "open", 60), host.problem
    return connected, host, device


def exchange(connected: Line, to_device: bytes, to_host: bytes, seconds: float = 600) -> float:
    """Send both ways at the same time; give the seconds of the line's clock that it took."""
    left = [to_device, to_host]
    before = [len(got) for got in connected.got]
    began_us = connected.now_us
    host, device = connected.ends
    assert isinstance(host, Link)
    assert isinstance(device, Link)

    def is_done() -> bool:
        for me, end in enumerate((host, device)):
            room = end.room
            end.send(left[me][:room])
            left[me] = left[me][room:]
        n_got = [len(got) - n for got, n in zip(connected.got, before, strict=True)]
        return host.state != "open" or n_got == [len(to_host), len(to_device)]

    assert connected.run(is_done, seconds), (host.state, host.problem)
    assert bytes(connected.got[1][before[1] :]) == to_device
    assert bytes(connected.got[0][before[0] :]) == to_host
    return (connected.now_us - began_us) / 1e6


def ranges_of(steps: list[int]) -> tuple[tuple[int, int], ...]:
    """Give ranges from their gaps and lengths."""
    edges = list(itertools.accumulate(steps[: len(steps) // 2 * 2]))
    return tuple(zip(edges[::2], edges[1::2], strict=True))


frames = st.one_of(
    st.builds(
        lambda offset, size, fill: Data(offset, random.Random(fill).randbytes(allowed(size))),
        st.integers(0, 0xFFFF),
        st.integers(1, MAX_PAYLOAD),
        st.integers(0, 9),
    ),
    st.builds(
        Ack,
        st.integers(0, 0xFFFF),
        st.lists(st.integers(1, 32_000), max_size=32).map(ranges_of),
        st.booleans(),
    ),
    st.builds(Control, st.integers(0, 255), st.integers(1, 2**32 - 1)),
)


def packed(frame: Frame, epoch: int) -> bytes:
    if isinstance(frame, Data):
        return pack_data(frame.offset, frame.payload, epoch)
    return pack_ack(frame, epoch) if isinstance(frame, Ack) else pack_control(frame)


@given(st.lists(st.tuples(st.binary(max_size=40), frames), max_size=8), st.integers(1, 60))
def test_frames_are_found_among_other_bytes(parts: list[tuple[bytes, Frame]], piece: int) -> None:
    reader = FrameReader()
    reader.epoch = 99
    stream = b"".join(noise + packed(frame, 99) for noise, frame in parts)
    found: list[Frame] = []
    for start in range(0, len(stream), piece):
        found += reader.feed(stream[start : start + piece], 0)
    for later_us in range(1, 3 + len(stream)):  # what looked like the beginning of one is given up in the end
        found += reader.feed(b"", later_us * STALE_US)
    assert found == [frame for _, frame in parts]
    assert reader.n_bad_bytes == sum(len(noise) for noise, _ in parts)


def test_frames_of_another_session_are_none() -> None:
    reader = FrameReader()
    reader.epoch = 7
    assert reader.feed(pack_data(0, b"old", 6) + pack_data(0, b"new", 7), 0) == [Data(0, b"new")]


def test_sizes_that_a_frame_can_have() -> None:
    assert [allowed(size) for size in (1, 192, 193, 255, 256, 1024, 1100, 9999)] == [
        1, 192, 192, 192, 256, 1024, 1088, MAX_PAYLOAD,
    ]  # fmt: skip
    assert len(pack_data(0, bytes(1024), 1)) == wire_bytes(1024) == 1033


def test_segments_follow_the_line() -> None:
    quality = LineQuality(MAX_SEGMENT)
    assert quality.segment == 192  # before anything is known
    for _ in range(100):
        quality.arrived(wire_bytes(quality.segment))
    assert quality.segment == MAX_SEGMENT
    rng = random.Random(1)
    for _ in range(400):
        size = wire_bytes(quality.cut(WINDOW))
        n_errors = sum(rng.random() < 0.01 for _ in range(size))
        quality.mended(n_errors == 1)
        (quality.lost if n_errors > 1 else quality.arrived)(size)
    assert 36 <= quality.segment <= 64
    assert (quality.cut(quality.segment * 3 // 2), quality.cut(500)) == (quality.segment * 3 // 2, quality.segment)
    for _ in range(4000):
        quality.arrived(wire_bytes(quality.segment))
    assert quality.segment == MAX_SEGMENT
    quality.mended(10**9)  # a hostile other end's count
    assert quality.segment == MIN_SEGMENT


def test_the_table_of_segments_is_the_best_of_what_it_was_computed_from() -> None:
    def carried(n: int, rate: float) -> float:
        size = n + SHORT_OVERHEAD
        return n / size * math.exp(-rate * size) * (1 + rate * (size - 2))

    for rate, longer, shorter in zip(_RATES[1:], _SEGMENTS[1:-1], _SEGMENTS[2:], strict=True):
        assert carried(longer, rate / 2**20) == pytest.approx(carried(shorter, rate / 2**20), rel=1e-4)
        assert carried(longer, 0.8 * rate / 2**20) > carried(shorter, 0.8 * rate / 2**20)


@given(st.binary(min_size=1, max_size=192), st.integers(1, 2**32 - 1), st.data())
def test_a_frame_with_one_byte_garbled_or_lost_is_mended(payload: bytes, epoch: int, data: st.DataObject) -> None:
    frame, following = pack_data(7, payload, epoch), pack_data(7 + len(payload), b"next", epoch)
    at = data.draw(st.integers(2, len(frame) - 1))
    garbled = bytes([frame[at] ^ data.draw(st.integers(1, 255))]) if data.draw(st.booleans()) else b""
    reader = FrameReader()
    reader.epoch = epoch
    found = reader.feed(frame[:at] + garbled + frame[at + 1 :] + following, 0)
    assert found == [Data(7, payload), Data(7 + len(payload), b"next")]
    assert reader.n_mended == 1


def test_a_last_frame_that_has_lost_a_byte_is_mended_when_nothing_comes_behind_it() -> None:
    reader = FrameReader()
    reader.epoch = 7
    frame = pack_data(0, b"the last", 7)
    assert reader.feed(frame[:6] + frame[7:], 0) == []
    assert reader.feed(b"", STALE_US) == [Data(0, b"the last")]
    assert (reader.n_bad_bytes, reader.stale_at_us) == (0, None)


def test_what_is_garbled_worse_is_not_taken_for_a_frame() -> None:
    rng, reader = random.Random(5), FrameReader()
    reader.epoch = 7
    for _ in range(2000):
        frame = bytearray(pack_data(0, rng.randbytes(48), 7))
        for at in rng.sample(range(4, len(frame)), 2):
            frame[at] ^= rng.randrange(1, 256)
        assert reader.feed(bytes(frame) + bytes(200), 0) == []


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 2**32),
    NOISES,
    st.integers(0, 20_000),
    st.integers(0, 20_000),
    st.sampled_from([(960.0, 100), (11_520.0, 16_000), (92_160.0, 500), (300_000.0, 50_000)]),
)
def test_what_is_sent_arrives_whatever_the_line_does(
    seed: int, noise: Noise, n_to_device: int, n_to_host: int, speed: tuple[float, int]
) -> None:
    rng = random.Random(seed)
    connected, _, _ = line(noise=noise, seed=seed, bytes_hz=speed[0], latency_us=speed[1])
    exchange(connected, rng.randbytes(n_to_device), rng.randbytes(n_to_host), 3600)


def test_a_clean_line_carries_kilobytes_at_three_per_cent_at_most() -> None:
    connected, _, _ = line()
    data = random.Random(2).randbytes(300_000)
    exchange(connected, data, b"")
    both_ways = sum(wire.n_bytes for wire in connected.wires)
    assert both_ways <= 1.03 * len(data)


@pytest.mark.parametrize("is_both_ways", [False, True])
def test_one_byte_in_a_hundred_gone_leaves_seven_tenths_of_the_throughput(is_both_ways: bool) -> None:
    """The line's clock is a fake one: this is the protocol's arithmetic and not a speed."""
    data = random.Random(3).randbytes(500_000)
    took_s = []
    for noise in (Noise(), ONE_PER_CENT):
        connected, _, _ = line(noise=noise, latency_us=1_000)
        took_s.append(exchange(connected, data, data if is_both_ways else b""))
    assert took_s[0] / took_s[1] >= 0.7


def test_a_device_that_starts_anew_is_noticed_and_opened_again() -> None:
    connected, host, _ = line()
    exchange(connected, b"before", b"and back")
    connected.ends = (host, Link(is_device=True))  # its memory is empty
    host.send(b"lost")
    assert connected.run(lambda: host.state == "lost", 10)
    assert "started anew" in host.problem
    host.open(0x9ABC_DEF0, connected.now_us)
    assert connected.run(lambda: host.state == "open", 10)
    exchange(connected, b"again", b"yes")


def test_a_device_that_falls_silent_is_given_up() -> None:
    connected, host, _ = line()
    connected.wires[0].noise = Noise(drop=1.0)
    host.send(bytes(100))
    assert connected.run(lambda: host.state == "lost", 60)
    assert "silent for" in host.problem


def test_another_version_is_refused() -> None:
    host = Link()
    host.open(5, 0)
    host.receive(pack_control(Control(2, 5, version=9)), 1000)
    assert (host.state, "version 9 of the protocol, not 2: put this" in host.problem) == ("lost", True)


def test_a_new_session_forgets_what_was_under_way() -> None:
    connected, host, device = line(latency_us=20_000)
    host.send(bytes(5000))
    for _ in range(5):
        connected.step(connected.now_us + 1000)
    host.open(0x55, connected.now_us)
    assert connected.run(lambda: host.state == "open", 10)
    connected.got[1].clear()
    exchange(connected, b"only this", b"")
    assert device.n_sessions == 2


@settings(deadline=None)
@given(st.binary(max_size=600), st.booleans(), st.integers(0, 4))
def test_hostile_frames_do_no_harm(data: bytes, is_device: bool, n_sent: int) -> None:
    """Sound frames with any content, which a broken or hostile other end may send."""
    link = Link(is_device=is_device)
    if is_device:
        link.receive(pack_control(Control(1, 3)), 0)
    else:
        link.open(3, 0)
        link.receive(pack_control(Control(2, 3)), 0)
    link.send(bytes(100 * n_sent))
    link.transmit(1000, 10_000)
    rng = random.Random(data)
    for start in range(0, len(data), 20):
        piece = data[start : start + 20]
        pairs = ranges_of([rng.randrange(1, 2 ** rng.randrange(1, 16)) for _ in range(rng.randrange(33))])
        for frame in (
            pack_ack(Ack(rng.randrange(65536), pairs, bool(rng.randrange(2))), 3),
            pack_data(rng.randrange(65536), piece, 3),
            pack_control(Control(rng.choice([0, 1, 2, 4, 255]), rng.randrange(2**32), rng.randrange(256), 0, 0)),
        ):
            link.receive(frame, 1000 * start)
            assert len(link.transmit(1000 * start, 2000)) <= 2000 + MAX_PAYLOAD + 8
        assert len(link._early) <= WINDOW
    assert not link._kept or len(link._kept) <= WINDOW


def test_a_device_without_a_session_says_so_but_not_always() -> None:
    device = Link(is_device=True)
    said = 0
    for now_us in range(0, 1_000_000, 1000):
        device.receive(b"AT+ID?\r", now_us)
        said += len(FrameReader().feed(device.transmit(now_us, 100), now_us))
    assert said == 10
    assert FrameReader().feed(pack_control(Control(NO_SESSION, 0)), 0)
