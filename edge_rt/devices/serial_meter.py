"""USB and serial power meters: a thread of the meter's own listens to the port, whoever wants reads the last value.

    serial:/dev/ttyUSB0:lines         home-made boards that print a line a sample (serial_lines.py)
    serial:/dev/ttyUSB0:lines@9600    the same at 9600 baud
    serial:/dev/ttyACM0:tc66          RDTech TC66 and TC66C (tc66.py)
    serial:/dev/ttyACM0:ppk2@5.1      Nordic PPK2 as ampere meter in a supply of 5.1 V (ppk2.py)

A meter that is unplugged, silent or says what cannot be is unknown for a reason, and is looked for again with back-off.
pyserial is imported when a meter is opened: `pip install 'edge_rt[power]'`.
"""

from __future__ import annotations

import importlib.util
import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from edge_rt.devices.base import Reading, known, unknown
from edge_rt.devices.energy import GAP_PERIODS
from edge_rt.devices.meters import Boundary, Quality, Sample

KINDS: Final = ("lines", "tc66", "ppk2")

_SPEC: Final = re.compile(r"serial:(?P<port>/[^\0:]{1,200}):(?P<kind>[a-z0-9]+)(@(?P<option>[0-9.]{1,10}))?")
_BACK_OFF_S: Final = (0.5, 30.0)
_READ_S: Final = 0.2  # how long a read waits, and so how soon close is heard
_MIN_SILENT_S: Final = 1.0  # a slow start is no silence


class MeterProtocolError(Exception):
    """What comes over the port is not what this kind of meter says. Never leaves this module's thread."""


class Port(Protocol):
    """A serial port with a read timeout; serial.Serial is one. Errors are OSError, which SerialException is."""

    def read(self, size: int = 1) -> bytes: ...

    def write(self, data: bytes) -> int | None: ...

    def close(self) -> None: ...


class Dialogue(Protocol):
    """How one kind of meter is talked with. One object for each time that the port is opened.

    interval_s  between two samples
    quality     measured, or derived where voltage is only supposed
    """

    interval_s: float
    quality: Quality

    def begin(self, port: Port) -> None:
        """Make it send. Raises MeterProtocolError and OSError, as listen does."""
        ...

    def listen(self, port: Port) -> tuple[float, ...]:
        """Wait for as long as the port's read does; give the watts that came in the meantime, () for none."""
        ...


@dataclass(frozen=True, slots=True)
class Spec:
    """A meter as the configuration names it; option is the kind's own, "" for none."""

    port: str
    kind: str
    option: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.port}"


def parse_spec(text: str) -> Spec:
    """Read serial:PORT:KIND[@OPTION]. Raises ValueError saying what is wrong."""
    found = _SPEC.fullmatch(text)
    if found is None:
        raise ValueError(f"must be serial:/dev/PORT:KIND, KIND one of {', '.join(KINDS)}")
    spec = Spec(found["port"], found["kind"], found["option"] or "")
    _dialogue(spec)
    return spec


def open_serial(text: str) -> SerialMeter:
    """Make the meter that a specification names and begin to listen.

    Whether it is there shows in its readings. Raises ValueError for a bad specification, and ImportError naming the
    extra where a library is missing.
    """
    spec = parse_spec(text)
    needed = ("serial", "cryptography") if spec.kind == "tc66" else ("serial",)
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise ImportError(f"{spec.kind} needs {' and '.join(missing)}: pip install 'edge_rt[power]'")
    baud = int(spec.option) if spec.kind == "lines" and spec.option else 115200

    def open_port() -> Port:
        import serial

        port: Port = serial.Serial(spec.port, baud, timeout=_READ_S, write_timeout=1.0, exclusive=True)
        return port

    return SerialMeter(str(spec), open_port, lambda: _dialogue(spec))


def _dialogue(spec: Spec) -> Dialogue:
    if spec.kind == "lines":
        from edge_rt.devices.serial_lines import LineDialogue

        if spec.option and (not spec.option.isdecimal() or not 300 <= int(spec.option) <= 4_000_000):
            raise ValueError("lines@BAUD: the speed is a whole number from 300 to 4000000")
        return LineDialogue()
    if spec.kind == "tc66":
        from edge_rt.devices.tc66 import Tc66Dialogue

        if spec.option:
            raise ValueError("tc66 takes no option")
        return Tc66Dialogue()
    if spec.kind == "ppk2":
        from edge_rt.devices.ppk2 import Ppk2Dialogue

        try:
            return Ppk2Dialogue(float(spec.option))
        except ValueError:
            raise ValueError("ppk2@VOLTS: it measures current only; say at which voltage, from 0.8 to 5.5") from None
    raise ValueError(f"knows {', '.join(KINDS)}, not {spec.kind!r}")


class SerialMeter:
    """A Meter on a serial port. Its own thread listens; read takes what has come.

    boundary  a meter between plug and board sees the board
    """

    def __init__(
        self,
        name: str,
        open_port: Callable[[], Port],
        make_dialogue: Callable[[], Dialogue],
        *,
        boundary: Boundary = "board",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.boundary: Boundary = boundary
        dialogue = make_dialogue()
        self.interval_s, self.quality = dialogue.interval_s, dialogue.quality
        self._open_port, self._make_dialogue, self._clock = open_port, make_dialogue, clock
        self._lock = threading.Lock()
        self._sum_w, self._n_watts = 0.0, 0
        self._power_w: float | None = None
        self._arrived_s = -math.inf
        self._problem = "it has said nothing yet"
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"edge_rt-{name}", daemon=True)
        self._thread.start()

    def read(self, now_s: float) -> Reading[Sample]:
        """Give the mean of what has come since the last read; the last value again, and its age, where nothing has."""
        with self._lock:
            if self._n_watts:
                self._power_w = self._sum_w / self._n_watts
                self._sum_w, self._n_watts = 0.0, 0
            age_s = max(0.0, now_s - self._arrived_s)
            if self._power_w is None or self._problem:
                return unknown(self.name, self._problem)
            if age_s > GAP_PERIODS * self.interval_s:
                return unknown(self.name, f"silent for {age_s:.1f} s")
            if self._power_w == 0 and self.boundary != "rail":  # its output, or the wire to its input, is off
                return unknown(self.name, f"tells 0 W for a {self.boundary} that runs")
            return known(Sample(power_w=self._power_w, age_s=age_s), self.name)

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join()

    def _run(self) -> None:
        back_off_s = _BACK_OFF_S[0]
        while not self._is_closing.is_set():
            arrived_s = self._arrived_s
            try:
                self._listen()
                return
            except MeterProtocolError as exc:
                problem = str(exc)
            except (OSError, ValueError) as exc:  # pyserial's SerialException is an OSError
                problem = port_problem(exc)
            with self._lock:
                self._problem, self._power_w = problem, None
                self._sum_w, self._n_watts = 0.0, 0
            back_off_s = _BACK_OFF_S[0] if self._arrived_s > arrived_s else min(2 * back_off_s, _BACK_OFF_S[1])
            self._is_closing.wait(back_off_s)

    def _listen(self) -> None:
        """Open the port and take what comes, until close."""
        port = self._open_port()
        try:
            dialogue = self._make_dialogue()
            dialogue.begin(port)
            heard_s = self._clock()
            while not self._is_closing.is_set():
                watts = dialogue.listen(port)
                now_s = self._clock()
                if watts:
                    heard_s = now_s
                    with self._lock:
                        self._sum_w += sum(watts)
                        self._n_watts += len(watts)
                        self._arrived_s, self._problem = now_s, ""
                        self.interval_s = dialogue.interval_s
                elif now_s - heard_s > max(_MIN_SILENT_S, 10 * dialogue.interval_s):
                    raise MeterProtocolError(
                        "says nothing: another kind of meter, another speed, or it is switched off"
                    )
        finally:
            port.close()


def port_problem(exc: Exception) -> str:
    """Say why a port is not there; pyserial's own texts repeat themselves."""
    number = getattr(exc, "errno", None)
    text = {
        2: "is not plugged in",
        13: "may not be opened: add yourself to the group dialout (or uucp)",
        16: "is in use by another program",
    }.get(number if isinstance(number, int) else 0)
    return text or (str(exc)[:200] or type(exc).__name__)
