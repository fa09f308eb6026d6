"""What the Raspberry Pi's firmware tells through its program vcgencmd: throttling, and on the Pi 5 its power rails.

A call takes some ms and starts a process, so nothing here belongs on an event loop.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from pathlib import Path

from edge_rt.devices.base import Reading, known, unknown
from edge_rt.devices.meters import Boundary, Quality, Sample, watts
from edge_rt.devices.thermal import Throttle, pi_throttle

VCGENCMD = ("vcgencmd", "/usr/bin/vcgencmd", "/opt/vc/bin/vcgencmd")
_TIMEOUT_S = 1.0
_MAX_BYTES = 2**16

# "VDD_CORE_A current(7)=1.53816600A", "VDD_CORE_V volt(15)=0.84104930V"; older firmware has "VDD_CORE_A=1.538A".
_LINE = re.compile(
    r"([A-Z0-9_]{1,32})_([AV])(?: +(?:current|volt|voltage)\(\d{1,3}\))? *= *(\d{1,6}(?:\.\d{1,12})?)[AV]"
)
_MAX_RAIL_A, _MAX_RAIL_V = 20.0, 6.0
# Fewer rails than half of the Pi 5's twelve would be a sum of something else.
_MIN_RAILS = 6
_STALE_INTERVALS = 3

# (arguments) → what the program printed. Raises OSError and subprocess.SubprocessError.
Run = Callable[[tuple[str, ...]], str]


def run(arguments: tuple[str, ...]) -> str:
    """Run vcgencmd from where Raspberry Pi OS keeps it. Raises OSError and subprocess.SubprocessError."""
    import subprocess  # half a megabyte, which powerd on other boards does without

    program = next((p for p in VCGENCMD[1:] if Path(p).exists()), VCGENCMD[0])
    done = subprocess.run(
        (program, *arguments), capture_output=True, timeout=_TIMEOUT_S, check=True, stdin=subprocess.DEVNULL
    )
    return done.stdout[:_MAX_BYTES].decode("utf-8", "replace")


def throttle(call: Run = run) -> Reading[Throttle]:
    """Ask for what slows the chip down now; the file of the same name in sysfs was seen to stand still at 0."""
    source = "vcgencmd get_throttled"
    text = _ask(call, "get_throttled")
    if text.value is None:
        return unknown(source, text.reason)
    match = re.fullmatch(r"throttled=(0x[0-9a-fA-F]{1,8})", text.value.strip())
    if match is None:
        return unknown(source, f"answered {text.value.strip()[:60]!r}")
    return known(pi_throttle(int(match[1], 16)), source)


def rails_w(text: str) -> dict[str, float]:
    """Give each rail's watts from what pmic_read_adc printed, in either format; rails without both values are left out.

    The supply (EXT5V) and the clock's battery have a voltage and no current.
    """
    volts: dict[str, float] = {}
    amperes: dict[str, float] = {}
    for line in text.splitlines()[:200]:
        if match := _LINE.fullmatch(line.strip()):
            (amperes if match[2] == "A" else volts)[match[1]] = float(match[3])
    return {
        rail: volts[rail] * amperes[rail]
        for rail in volts.keys() & amperes.keys()
        if amperes[rail] <= _MAX_RAIL_A and volts[rail] <= _MAX_RAIL_V
    }


class PmicMeter:
    """The Pi 5's board, derived: the power chip's rails added up, and a straight line from that to the plug.

    The rails miss what hangs on 5 V: USB devices, HATs, an SSD. slope and offset_w are those of the board's file, which
    names who measured them.

    The first reading waits for the program. Later ones start it on a thread of its own and give the answer before, with
    its age, because whoever reads may have a loop to keep.
    """

    name = "pmic"
    boundary: Boundary = "board"
    quality: Quality = "derived"
    interval_s = 1.0  # a process each time

    def __init__(
        self,
        slope: float,
        offset_w: float,
        call: Run = run,
        start: Callable[[Callable[[], None]], None] = lambda work: threading.Thread(target=work, daemon=True).start(),
    ) -> None:
        self._slope = slope
        self._offset_w = offset_w
        self._call = call
        self._start = start
        self._answer: tuple[float, Reading[float]] | None = None  # as of when it was asked for
        self._asked_s = -math.inf
        self._is_asking = False

    def read(self, now_s: float) -> Reading[Sample]:
        if self._answer is None:
            self._asked_s = now_s
            self._answer = (now_s, self._power())
        elif now_s - self._asked_s >= self.interval_s and not self._is_asking:
            self._asked_s, self._is_asking = now_s, True
            self._start(self._ask_again)
        at_s, power = self._answer
        age_s = max(0.0, now_s - at_s)
        if power.value is None:
            return unknown(power.source, power.reason)
        if age_s > _STALE_INTERVALS * self.interval_s:
            return unknown(power.source, f"no answer for {age_s:.0f} s")
        return known(Sample(power_w=power.value, age_s=age_s), power.source)

    def close(self) -> None: ...

    def _ask_again(self) -> None:
        try:
            self._answer = (self._asked_s, self._power())
        finally:
            self._is_asking = False

    def _power(self) -> Reading[float]:
        text = _ask(self._call, "pmic_read_adc")
        if text.value is None:
            return unknown(text.source, text.reason)
        rails = rails_w(text.value)
        if len(rails) < _MIN_RAILS:
            return unknown(text.source, f"told of {len(rails)} rails, {_MIN_RAILS} at least are wanted")
        return watts(self._slope * sum(rails.values()) + self._offset_w, text.source)


def _ask(call: Run, *arguments: str) -> Reading[str]:
    import subprocess

    source = " ".join(("vcgencmd", *arguments))
    try:
        text = call(arguments)
    except FileNotFoundError:
        return unknown(source, "the program vcgencmd is not installed")
    except PermissionError:
        return unknown(source, "vcgencmd may not be run")
    except subprocess.TimeoutExpired:
        return unknown(source, f"no answer in {_TIMEOUT_S:g} s")
    except subprocess.CalledProcessError as exc:
        # Most often /dev/vcio, which belongs to the group video.
        return unknown(source, f"failed with exit code {exc.returncode}; is this user in the group video?")
    except (OSError, subprocess.SubprocessError) as exc:
        return unknown(source, str(exc))
    # Errors come with exit code 0: error=1 error_msg="Command not registered"
    if text.lstrip().startswith("error="):
        return unknown(source, f"answered {text.strip()[:60]!r}")
    return known(text, source)
