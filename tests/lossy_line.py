"""A serial line between two ends of the NPU's link, with noise and a clock of its own: no waiting."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Chances a byte: to be garbled, lost, doubled, or to have a random one put before it."""

    corrupt: float = 0.0
    drop: float = 0.0
    double: float = 0.0
    insert: float = 0.0

    def spoil(self, data: bytes, rng: random.Random) -> bytes:
        out = bytearray()
        for byte in data:
            at = rng.random()
            if at < self.corrupt:
                out.append(byte ^ rng.randrange(1, 256))
            elif (at := at - self.corrupt) < self.drop:
                pass
            elif (at := at - self.drop) < self.double:
                out += bytes([byte, byte])
            elif at - self.double < self.insert:
                out += bytes([rng.randrange(256), byte])
            else:
                out.append(byte)
        return bytes(out)


class End(Protocol):
    """What the line needs of an end; edge_rt's Link is one, the firmware's another."""

    def receive(self, data: bytes, now_us: int) -> bytes: ...

    def transmit(self, now_us: int, max_bytes: int) -> bytes: ...

    def wake_at_us(self) -> int | None: ...


class Wire:
    """One direction. Bytes take their time one after the other, and arrive in order latency_us later."""

    def __init__(self, noise: Noise, rng: random.Random, *, bytes_hz: float, latency_us: int) -> None:
        self.noise, self._rng = noise, rng
        self._byte_us = 1e6 / bytes_hz
        self._latency_us = latency_us
        self._free_us = 0.0
        self._moving: list[tuple[int, bytes]] = []
        self.n_bytes = 0

    def room(self, now_us: int, ahead_us: int = 3_000) -> int:
        """How many bytes the driver takes without having more than ahead_us of them before it."""
        return max(0, int((now_us + ahead_us - self._free_us) / self._byte_us))

    def free_at_us(self, ahead_us: int = 3_000) -> int:
        """When there is room again."""
        return int(self._free_us + self._byte_us) - ahead_us + 1

    def put(self, data: bytes, now_us: int) -> None:
        self.n_bytes += len(data)
        self._free_us = max(self._free_us, now_us)
        for start in range(0, len(data), 64):
            piece = data[start : start + 64]
            self._free_us += len(piece) * self._byte_us
            self._moving.append((int(self._free_us) + self._latency_us, self.noise.spoil(piece, self._rng)))

    def take(self, now_us: int) -> bytes:
        out = bytearray()
        while self._moving and self._moving[0][0] <= now_us:
            out += self._moving.pop(0)[1]
        return bytes(out)

    def next_us(self) -> int | None:
        return self._moving[0][0] if self._moving else None


class Line:
    """Two ends and the wires between them."""

    def __init__(
        self,
        host: End,
        device: End,
        *,
        noise: Noise | None = None,
        seed: int = 0,
        bytes_hz: float = 92_160,
        latency_us: int = 500,
    ) -> None:
        rng = random.Random(seed)
        self.ends = (host, device)
        self.now_us = 1_000_000
        self.wires = tuple(
            Wire(noise or Noise(), rng, bytes_hz=bytes_hz, latency_us=latency_us) for _ in self.ends
        )  # what host and device send
        self.got = (bytearray(), bytearray())  # what host and device have of the other's stream

    def step(self, last_us: int) -> bool:
        """Move what can move now, then the clock to the next thing that can; False at last_us."""
        for me in (0, 1):
            data = self.wires[1 - me].take(self.now_us)
            self.got[me].extend(self.ends[me].receive(data, self.now_us))
        is_full = [False, False]
        for me in (0, 1):
            wire = self.wires[me]
            while (room := wire.room(self.now_us)) > 0:
                data = self.ends[me].transmit(self.now_us, room)
                if not data:
                    break
                wire.put(data, self.now_us)
            is_full[me] = room <= 0
        times = [wire.next_us() for wire in self.wires]
        for end, wire, full in zip(self.ends, self.wires, is_full, strict=True):
            at = end.wake_at_us()
            times.append(max(at, wire.free_at_us()) if full and at is not None else at)
            times.append(wire.free_at_us() if full else None)
        coming = [at for at in times if at is not None]
        if not coming or self.now_us >= last_us:
            return False
        self.now_us = min(max(min(coming), self.now_us + 10), last_us)
        return True

    def run(self, until: Callable[[], bool], seconds: float) -> bool:
        """Go on until it holds or so many seconds of the line's clock have passed; say whether it holds."""
        last_us = self.now_us + int(seconds * 1e6)
        while not until():
            if not self.step(last_us):
                return until()
        return True
