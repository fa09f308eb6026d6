"""A client's recording: a WAV file's samples, mixed down to one channel and brought to the rate that a model takes.

The standard library's wave reads neither floats nor, before Python 3.12, the extensible header that recorders write for
24 bits, hence the chunks are read here.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from edge_rt.errors import InvalidRequestError

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_GUID_TAIL = bytes.fromhex("000000001000800000aa00389b71")  # of all formats that have a plain number too
_RATES_HZ = (1000, 384_000)
_MAX_CHANNELS = 64
_UNKNOWN_BYTES = 0x7FFF0000  # what is written into a pipe begins before its size is known: ffmpeg, sox, arecord
_N_ZEROS = 24  # of the resampling filter on each side; the transition band is some 8 % of the rate
_BETA = 9.0  # Kaiser window: what is stopped is 90 dB down
_PASS = 0.94  # of the lower Nyquist frequency
_MAX_PHASES = 512  # for each of which a filter is made
_MAX_BLOCK = 2**20  # samples under the filter at a time


@dataclass(frozen=True, slots=True)
class _Header:
    kind: int
    n_channels: int
    rate_hz: int
    bits: int
    start: int
    size_bytes: int

    @property
    def frame_bytes(self) -> int:
        return self.n_channels * self.bits // 8

    @property
    def n_frames(self) -> int:
        return self.size_bytes // self.frame_bytes


def decode_wav(data: bytes, *, rate_hz: int, max_audio_s: float, param: str = "data") -> NDArray[np.float32]:
    """Give a WAV file's samples as [n], -1..1, at rate_hz.

    PCM of 8, 16, 24 and 32 bits and floats of 32 and 64 bits are read; channels are averaged. Raises
    InvalidRequestError naming param, before samples are decoded where the header says enough.
    """
    header = _read_header(data, param)
    duration_s = header.n_frames / header.rate_hz
    if duration_s > max_audio_s:
        problem = f"is {duration_s:.1f} s long, the limit is {max_audio_s:g} s (limits.max_audio_s)"
        raise InvalidRequestError(param=param, problem=problem)
    if header.start + header.size_bytes > len(data):
        have_bytes = len(data) - header.start
        raise _bad(param, f"is cut: its header tells of {header.size_bytes} bytes of sound, it holds {have_bytes}")
    if not header.n_frames:
        raise _bad(param, "holds no sound")
    samples = _samples(memoryview(data)[header.start :], header)
    if not np.isfinite(samples).all():
        raise _bad(param, "holds samples that are no numbers")
    return resample(samples, header.rate_hz, rate_hz)


def _bad(param: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(param=param, problem=problem)


def _read_header(data: bytes, param: str) -> _Header:
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise _bad(param, "is not a WAV file; ffmpeg -i IN -ac 1 -ar 16000 OUT.wav makes one of most recordings")
    at, form = 12, b""
    while at + 8 <= len(data):
        name, size_bytes = struct.unpack_from("<4sI", data, at)
        at += 8
        if name == b"fmt ":
            form = data[at : at + size_bytes]
        elif name == b"data":
            if not form:
                raise _bad(param, "is broken: its sound comes before its format")
            if size_bytes >= _UNKNOWN_BYTES:
                size_bytes = min(size_bytes, len(data) - at)
            return _checked(form, at, size_bytes, param)
        at += size_bytes + size_bytes % 2
    raise _bad(param, "is cut: it ends before its sound begins")


def _checked(form: bytes, start: int, size_bytes: int, param: str) -> _Header:
    if len(form) < 16:
        raise _bad(param, "is broken: its format chunk is too short")
    kind, n_channels, rate_hz, _, block_bytes, bits = struct.unpack_from("<HHIIHH", form)
    if kind == _EXTENSIBLE and len(form) >= 40 and form[26:40] == _GUID_TAIL:
        kind = struct.unpack_from("<H", form, 24)[0]
    if (kind, bits) not in {(_PCM, 8), (_PCM, 16), (_PCM, 24), (_PCM, 32), (_FLOAT, 32), (_FLOAT, 64)}:
        problem = f"has format {kind:#x} with {bits} bits; PCM of 8, 16, 24 or 32 bits and floats are read"
        raise _bad(param, problem)
    if not 1 <= n_channels <= _MAX_CHANNELS:
        raise _bad(param, f"has {n_channels} channels, the limit is {_MAX_CHANNELS}")
    if not _RATES_HZ[0] <= rate_hz <= _RATES_HZ[1]:
        raise _bad(param, f"has {rate_hz} samples a second; {_RATES_HZ[0]} to {_RATES_HZ[1]} are read")
    header = _Header(kind, n_channels, rate_hz, bits, start, size_bytes)
    if block_bytes != header.frame_bytes:
        raise _bad(param, f"is broken: {n_channels} channels of {bits} bits do not take {block_bytes} bytes")
    return header


def _samples(raw: memoryview, header: _Header) -> NDArray[np.float32]:
    """Give the mean of the channels, -1..1."""
    n_values, n_channels = header.n_frames * header.n_channels, header.n_channels
    raw = raw[: n_values * header.bits // 8]
    values: NDArray[np.float32]
    if header.kind == _FLOAT:
        values = np.frombuffer(raw, f"<f{header.bits // 8}").astype(np.float32)
    elif header.bits == 8:  # the only one without a sign
        values = (np.frombuffer(raw, np.uint8).astype(np.float32) - np.float32(128)) / np.float32(128)
    elif header.bits == 24:
        wide = np.zeros((n_values, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(raw, np.uint8).reshape(n_values, 3)
        values = wide.view("<i4").ravel().astype(np.float32) / np.float32(2**31)
    else:
        values = np.frombuffer(raw, f"<i{header.bits // 8}").astype(np.float32) / np.float32(2 ** (header.bits - 1))
    mixed: NDArray[np.float32] = values.reshape(-1, n_channels).mean(axis=1) if n_channels > 1 else values
    return mixed


def resample(samples: NDArray[np.float32], from_hz: int, to_hz: int) -> NDArray[np.float32]:
    """Change the rate of [n] samples by band-limited interpolation; the answer has ceil(n × to / from)."""
    if from_hz == to_hz:
        return samples
    common = math.gcd(from_hz, to_hz)
    up, down = to_hz // common, from_hz // common
    n_out = -(-len(samples) * up // down)
    cutoff = _PASS * min(1.0, up / down)  # of the input's Nyquist frequency
    half = math.ceil(_N_ZEROS / cutoff)
    padded = np.pad(samples, (half, half + down + 1))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    all_taps = _Taps(half, cutoff, up)
    result = np.empty(n_out, np.float32)
    for phase in range(min(up, n_out)):  # outputs whose distance to the sample before them is the same
        start, rest = divmod(phase * down, up)
        taps = all_taps[rest]
        here = result[phase::up]
        rows = windows[start::down][: len(here)]
        n_rows = max(1, _MAX_BLOCK // len(taps))  # matmul copies such rows
        for first in range(0, len(here), n_rows):
            here[first : first + n_rows] = rows[first : first + n_rows] @ taps
    return result


class _Taps:
    """The filters of up phases. Of more than _MAX_PHASES each lies between two of so many: odd rates have thousands."""

    def __init__(self, half: int, cutoff: float, up: int) -> None:
        self._half, self._cutoff, self._up = half, cutoff, up
        self._table: NDArray[np.float32] | None = None
        if up > _MAX_PHASES:
            self._table = np.stack([_taps(half, phase / _MAX_PHASES, cutoff) for phase in range(_MAX_PHASES + 1)])

    def __getitem__(self, rest: int) -> NDArray[np.float32]:
        """Give the filter for an output that lies rest / up samples behind one."""
        if self._table is None:
            return _taps(self._half, rest / self._up, self._cutoff)
        at, part = divmod(rest * _MAX_PHASES, self._up)
        between: NDArray[np.float32] = self._table[at] + np.float32(part / self._up) * self._steps[at]
        return between

    @cached_property
    def _steps(self) -> NDArray[np.float32]:
        assert self._table is not None
        return np.diff(self._table, axis=0)


def _taps(half: int, shift: float, cutoff: float) -> NDArray[np.float32]:
    """Give the filter for an output that lies shift samples behind one; a constant stays what it is."""
    grid, values = _filter()
    taps = np.interp(np.abs(np.arange(-half, half + 1) - shift) * cutoff, grid, values)
    summed: NDArray[np.float32] = (taps / taps.sum()).astype(np.float32)
    return summed


@cache
def _filter() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Give one side of the filter over the distance in zeros of its sine, fine enough to interpolate in it."""
    grid = np.linspace(0, _N_ZEROS, _N_ZEROS * 1024 + 1)
    values = np.sinc(grid) * np.i0(_BETA * np.sqrt(1 - (grid / _N_ZEROS) ** 2))
    values[-1] = 0.0  # and all beyond it
    return grid, values
