"""A wire between SerialNpu and an end of the link, on the fake line's clock: waiting moves the clock."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.lossy_line import End, Noise, Wire


class FakeWire:
    """The host's side of a line with a device behind it."""

    def __init__(self, device: End, noise: Noise | None = None, *, seed: int = 0, bytes_hz: float = 92_160) -> None:
        rng = random.Random(seed)
        self.device = device
        self.now_us = 1_000_000
        self.to_device, self.to_host = (
            Wire(noise or Noise(), rng, bytes_hz=bytes_hz, latency_us=500) for _ in range(2)
        )
        self._later: list[tuple[int, Callable[[], None]]] = []
        self.is_gone = False
        self.is_closed = False

    def clock(self) -> float:
        return self.now_us / 1e6

    def later(self, after_s: float, call: Callable[[], None]) -> None:
        """Let something happen when so much time has passed."""
        self._later.append((self.now_us + int(after_s * 1e6), call))

    def room(self) -> int:
        return self.to_device.room(self.now_us)

    def write(self, data: bytes) -> None:
        if self.is_gone:
            raise OSError(5, "Input/output error")
        self.to_device.put(data, self.now_us)

    def read(self, timeout_s: float) -> bytes:
        if self.is_gone:
            raise OSError(5, "Input/output error")
        last_us = self.now_us + int(timeout_s * 1e6)
        while True:
            while self._later and self._later[0][0] <= self.now_us:
                self._later.pop(0)[1]()
            self.device.receive(self.to_device.take(self.now_us), self.now_us)
            while (room := self.to_host.room(self.now_us)) > 0 and (sent := self.device.transmit(self.now_us, room)):
                self.to_host.put(sent, self.now_us)
            if (data := self.to_host.take(self.now_us)) or self.now_us >= last_us:
                self.now_us += 10  # reading takes time too
                return data
            self.now_us = min(self.now_us + 200, last_us)

    def close(self) -> None:
        self.is_closed = True


class Bench:
    """A port that a board is plugged into, or not, with one clock through all that is opened there."""

    def __init__(self, device: End, *, bytes_hz: float = 1e7) -> None:
        self.device, self.bytes_hz = device, bytes_hz
        self.problem: OSError | None = None
        self.n_opened = 0
        self.wire = FakeWire(device, bytes_hz=bytes_hz)

    def open(self, _spec: object) -> FakeWire:
        if self.problem is not None:
            raise self.problem
        now_us, self.n_opened = self.wire.now_us, self.n_opened + 1
        self.wire = FakeWire(self.device, bytes_hz=self.bytes_hz)
        self.wire.now_us = now_us
        return self.wire

    def exists(self, _port: str) -> bool:
        return self.problem is None

    def clock(self) -> float:
        return self.wire.clock()

    def pause(self, seconds: float) -> None:
        self.wire.now_us += int(seconds * 1e6)

    def unplug(self) -> None:
        self.wire.is_gone = True
        self.problem = FileNotFoundError(2, "No such file or directory")

    def plug_in(self, device: End) -> None:
        self.device, self.problem = device, None
