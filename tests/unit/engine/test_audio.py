from __future__ import annotations

import struct
import wave
from io import BytesIO

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt.engine.audio import decode_wav, resample
from edge_rt.errors import InvalidRequestError

RATE_HZ = 16_000


def wav(frames: bytes, *, rate_hz: int = RATE_HZ, n_channels: int = 1, n_bytes: int = 2) -> bytes:
    """Write a file with the standard library."""
    file = BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(n_channels)
        out.setsampwidth(n_bytes)
        out.setframerate(rate_hz)
        out.writeframes(frames)
    return file.getvalue()


def riff(form: bytes, sound: bytes, *, size_bytes: int | None = None) -> bytes:
    """Write a file by hand."""
    size_bytes = len(sound) if size_bytes is None else size_bytes
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"LIST\3\0\0\0abc\0"
    return b"RIFF\0\0\0\0" + body + b"data" + struct.pack("<I", size_bytes) + sound


def form(kind: int = 1, n_channels: int = 1, rate_hz: int = RATE_HZ, bits: int = 16, block: int | None = None) -> bytes:
    block = n_channels * bits // 8 if block is None else block
    return struct.pack("<HHIIHH", kind, n_channels, rate_hz, rate_hz * block & 0xFFFFFFFF, block, bits)


def decoded(data: bytes, max_audio_s: float = 60.0) -> NDArray[np.float32]:
    return decode_wav(data, rate_hz=RATE_HZ, max_audio_s=max_audio_s)


def tone(hz: float, rate_hz: int, seconds: float = 1.0) -> NDArray[np.float32]:
    return np.sin(2 * np.pi * hz * np.arange(round(rate_hz * seconds)) / rate_hz).astype(np.float32)


@pytest.mark.parametrize(
    ("n_bytes", "frames"),
    [
        (1, bytes([128, 192, 0, 255])),
        (2, struct.pack("<4h", 0, 16384, -32768, 32512)),
        (3, b"".join((v & 0xFFFFFF).to_bytes(3, "little") for v in (0, 2**22, -(2**23), 127 * 2**16))),
        (4, struct.pack("<4i", 0, 2**30, -(2**31), 127 * 2**24)),
    ],
)
def test_all_widths_of_pcm_mean_the_same(n_bytes: int, frames: bytes) -> None:
    assert decoded(wav(frames, n_bytes=n_bytes)).tolist() == [0, 0.5, -1, 127 / 128]


def test_floats_are_read() -> None:
    values = np.array([0.25, -0.5], "<f4")
    assert decoded(riff(form(kind=3, bits=32), values.tobytes())).tolist() == [0.25, -0.5]


def test_extensible_header_is_read() -> None:
    guid = struct.pack("<H", 1) + bytes.fromhex("000000001000800000aa00389b71")
    header = form(kind=0xFFFE, bits=24) + struct.pack("<HHI", 22, 24, 4) + guid
    assert decoded(riff(header, (2**22).to_bytes(3, "little"))).tolist() == [0.5]


@pytest.mark.parametrize("size_bytes", [0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0x7FFFF024])
def test_sound_written_into_a_pipe_goes_to_the_end(size_bytes: int) -> None:
    sound = np.arange(100, dtype="<i2").tobytes()
    assert np.array_equal(decoded(riff(form(), sound, size_bytes=size_bytes)), decoded(riff(form(), sound)))


def test_channels_are_averaged() -> None:
    frames = struct.pack("<4h", 16384, 0, -16384, 16384)
    assert decoded(wav(frames, n_channels=2)).tolist() == [0.25, 0]


@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 22_050, 44_100, 44_101, 47_999, 48_000, 96_000, 383_999])
def test_tone_is_the_same_at_another_rate(rate_hz: int) -> None:
    resampled = resample(tone(1000, rate_hz), rate_hz, RATE_HZ)
    assert len(resampled) == RATE_HZ
    middle = slice(1000, -1000)
    assert np.abs(resampled - tone(1000, RATE_HZ))[middle].max() < 1e-4


def test_what_the_new_rate_cannot_hold_is_gone() -> None:
    assert np.abs(resample(tone(9_500, 48_000), 48_000, RATE_HZ))[1000:-1000].max() < 1e-4


def test_constant_stays_what_it_is() -> None:
    assert np.abs(resample(np.full(4000, 0.5, np.float32), 44_100, RATE_HZ)[500:-500] - 0.5).max() < 1e-5


def test_too_long_is_refused_by_the_header_alone() -> None:
    with pytest.raises(InvalidRequestError, match=r"is 67106.8 s long, the limit is 60 s"):
        decoded(riff(form(), b"\0\0", size_bytes=0x7FFEFFFF))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is not a WAV file"),
        (b"ID3\4 an mp3", "is not a WAV file"),
        (b"RIFF\0\0\0\0WAVE", "ends before its sound begins"),
        (riff(form(), b"\0" * 10, size_bytes=100), "is cut: its header tells of 100 bytes of sound, it holds 10"),
        (riff(form(), b""), "holds no sound"),
        (riff(form(kind=85), b"\0\0"), "format 0x55 with 16 bits"),
        (riff(form(bits=12), b"\0\0"), "with 12 bits"),
        (riff(form(n_channels=0, block=2), b"\0\0"), "has 0 channels"),
        (riff(form(n_channels=65), b"\0" * 130), "has 65 channels"),
        (riff(form(rate_hz=0), b"\0\0"), "has 0 samples a second"),
        (riff(form(rate_hz=2**31), b"\0\0"), "has 2147483648 samples a second"),
        (riff(form(block=7), b"\0\0"), "do not take 7 bytes"),
        (riff(b"\1\0", b"\0\0"), "format chunk is too short"),
        (b"RIFF\0\0\0\0WAVEdata\2\0\0\0\0\0", "sound comes before its format"),
        (riff(form(kind=3, bits=32), np.array([np.nan], "<f4").tobytes()), "no numbers"),
    ],
)
def test_bad_file_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        decoded(data)


def test_cut_and_broken_files_never_end_otherwise() -> None:
    good = bytearray(riff(form(), tone(100, RATE_HZ, 0.01).astype("<i2").tobytes()))
    random = np.random.default_rng(0)
    for _ in range(500):
        data = bytearray(good)
        for at in random.integers(0, 60, 3):
            data[at] = random.integers(256)
        try:
            decoded(bytes(data[: random.integers(len(data) + 1)]))
        except InvalidRequestError:
            continue
