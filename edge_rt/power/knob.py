"""One writable kernel file: written seldom, read back always, left alone where it cannot be had.

A write that has no error may still have been clamped, and another program, the kernel's thermal framework or a new
driver may change the value later. What is in force is what the file says, and nothing else.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Final, Literal

from edge_rt.power.faults import Fault, fault
from edge_rt.power.snapshot import Files

# same: as we left it, or nearer to what we asked for. lower: the kernel holds it down. foreign: another wrote it.
Seen = Literal["same", "lower", "foreign", "fault"]

_WRITES_HZ: Final = 10.0  # of one file in the long run …
_BURST: Final = 4.0  # … and at once: up for a request, down after it
_FIRST_PAUSE_S: Final = 0.1  # after a fault, doubled by each further one …
_LAST_PAUSE_S: Final = 10.0  # … up to this
_CONFLICT_S: Final = 60.0
_MAX_CONFLICTS: Final = 3  # foreign values within _CONFLICT_S: whoever writes them means it


class Knob:
    """A file's state. Belongs to one thread.

    in_force     what the file said last; None: unknown
    fault        why it cannot be read or written now; None: it can
    n_writes     since the start
    n_clamped    of them that were not in force when the file was looked at next
    """

    __slots__ = (
        "_answer",
        "_conflicts_s",
        "_due_s",
        "_filled_s",
        "_is_judged",
        "_n_faults",
        "_sent",
        "_tokens",
        "fault",
        "files",
        "in_force",
        "n_clamped",
        "n_writes",
        "path",
    )

    def __init__(self, files: Files, path: str) -> None:
        self.files, self.path = files, path
        self.in_force: str | None = None
        self.fault: Fault | None = None
        self.n_writes = self.n_clamped = 0
        self._sent: str | None = None  # what we wrote last …
        self._answer: str | None = None  # … and what it read back as, or later, nearer to it
        self._is_judged = True  # that value
        self._n_faults = 0  # one after the other
        self._due_s = -math.inf  # not touched before
        self._tokens, self._filled_s = _BURST, -math.inf
        self._conflicts_s: deque[float] = deque(maxlen=_MAX_CONFLICTS)

    def is_contested(self, now_s: float) -> bool:
        """Tell whether another program has written there too often to be chance."""
        if not self._conflicts_s:
            return False
        recent = [at_s for at_s in self._conflicts_s if now_s - at_s <= _CONFLICT_S]
        return len(recent) >= _MAX_CONFLICTS

    def look(self, now_s: float, is_held_down: Callable[[], bool]) -> Seen:
        """Read the file and judge who has set it. is_held_down is asked only when that matters."""
        if now_s < self._due_s and self.in_force is None:
            return "fault"
        try:
            found = self.files.watch(self.path)
        except OSError as exc:
            self._failed(exc, "read", now_s)
            return "fault"
        if found == self.in_force and self._is_judged and (self._answer is None or found == self._answer):
            return "same"  # as nearly always
        if self.in_force is None and self.fault is not None and self.fault.doing != "write":
            self.fault, self._n_faults = None, 0
        self.in_force = found
        if not self._is_judged:
            # Not when it was written: cpufreq brings a value into force a moment after it took it.
            self._is_judged = True
            self.n_clamped += self._sent is not None and found != self._sent
        if self._answer is None or found == self._answer:
            return "same"
        if found == self._sent:
            # cpufreq takes a limit and brings it into force a moment later: what was read back was still the old one.
            self._answer = found
            return "same"
        if _between(self._answer, found, self._sent):
            self._answer = found  # what held it down is letting go
            return "same"
        if _is_less(found, self._answer) and is_held_down():
            return "lower"
        self._conflicts_s.append(now_s)
        self._sent = self._answer = None
        return "foreign"

    @property
    def is_plain(self) -> bool:
        """Tell whether nothing is wrong with it, and nobody else has written there lately."""
        return self.fault is None and not self._conflicts_s

    def is_settled(self, text: str) -> bool:
        """Tell whether there is nothing to do for a value, now and until the file says something else."""
        return self.in_force is not None and text in (self.in_force, self._sent)

    def wants(self, text: str, now_s: float) -> bool:
        """Tell whether set would write: the value is another one, and it is time."""
        if self.in_force is None or now_s < self._due_s or text == self.in_force:
            return False
        if text == self._sent:
            return False  # the driver clamped it, or the kernel holds it lower: once more would change nothing
        self._fill(now_s)
        return self._tokens >= 1.0

    def set(self, text: str, now_s: float) -> bool:
        """Write a value if need be, and read it back; False for a fault, which is kept."""
        if not self.wants(text, now_s):
            if text == self.in_force and self.fault is not None and self.fault.kind != "denied":
                self.fault, self._n_faults = None, 0
            return True
        self._tokens -= 1.0
        self.n_writes += 1
        try:
            self.files.write(self.path, text)
        except OSError as exc:
            self._failed(exc, "write", now_s)
            return False
        self._sent = text
        try:
            self.in_force = self._answer = self.files.read(self.path)
        except OSError as exc:
            self._failed(exc, "read back", now_s)
            return False
        self._is_judged = False
        self.fault, self._n_faults = None, 0
        return True

    def forget_answer(self) -> None:
        """Take what the file says next for granted: it was put back, or another device may be there."""
        self._sent = self._answer = None
        self._conflicts_s.clear()

    def _failed(self, exc: OSError, doing: str, now_s: float) -> None:
        found = fault(exc, self.path, doing)
        if doing != "write":
            # Whatever is there afterwards may be another device, or the same one with the kernel's defaults.
            self.in_force = self._sent = self._answer = None
        self._n_faults += 1
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** (self._n_faults - 1), _LAST_PAUSE_S)
        if found.kind == "denied" and doing == "write":
            pause_s = math.inf
        elif found.kind == "refused":
            pause_s = _LAST_PAUSE_S
        self.fault, self._due_s = found, now_s + pause_s

    def _fill(self, now_s: float) -> None:
        passed_s = now_s - self._filled_s
        self._tokens = min(_BURST, self._tokens + passed_s * _WRITES_HZ) if math.isfinite(passed_s) else _BURST
        self._filled_s = now_s


def _between(low: str, found: str, high: str | None) -> bool:
    """Say whether found lies above low and not above high."""
    return high is not None and _is_less(low, found) and (found == high or _is_less(found, high))


def _is_less(a: str, b: str) -> bool:
    return a.isdecimal() and b.isdecimal() and int(a) < int(b)
