"""What powerd sets: upper clocks, energy preferences, the chip's own power limit. Never lower limits, never governors.

An upper limit works with every driver and leaves the kernel's governor alive below it; should powerd die, the machine
is slow at worst. A value never goes beyond the user's own, which is what was there before powerd's first write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from edge_rt.power.faults import Fault, fault
from edge_rt.power.knob import Knob
from edge_rt.power.snapshot import Files, Restored, Snapshot, Value, is_held_down, put_back, take
from edge_rt.power.state import Decision, Domain

_CPUFREQ: Final = "sys/devices/system/cpu/cpufreq"
_DEVFREQ: Final = "sys/class/devfreq"
_POWERCAP: Final = "sys/class/powercap"
_UW: Final = 1e6  # the kernel's microwatts in a watt
_CHOICES: Final = "energy_performance_available_preferences"
_MIN_LIMIT_W: Final = 2.0  # a chip below crawls, and what would raise its limit again crawls with it
# From fast to thrifty; "default" is the firmware's own choice, and no order is known of others.
_PREFERENCES: Final = ("performance", "balance_performance", "balance_power", "power")
# What is preferred while a decision has this reason; anything else leaves the user's own.
_THRIFTY: Final = {"idle": "power", "decode": "balance_power", "cap": "balance_power", "heat": "balance_power"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What one look or decision came to.

    contested     files that another program has taken
    foreign       path and value of what another program has written since the last look
    is_postponed  nothing was written: the kernel holds clocks down, so that the user's own limits cannot be read
    """

    n_writes: int = 0
    contested: tuple[str, ...] = ()
    foreign: tuple[tuple[str, str], ...] = ()
    faults: tuple[Fault, ...] = ()
    is_postponed: bool = False


_NOTHING: Final = Applied()


class Clock:
    """The upper clock of one domain, in Hz outside and in the kernel's unit inside.

    own_hz  the user's own upper limit, None before it was read
    """

    def __init__(self, files: Files, domain: Domain) -> None:
        is_cpu = domain.kind == "cpu"
        folder = f"{_CPUFREQ if is_cpu else _DEVFREQ}/{domain.name}"
        self.domain = domain
        self.knob = Knob(files, f"{folder}/{'scaling_max_freq' if is_cpu else 'max_freq'}")
        self.kept = (self.knob.path, f"{folder}/{'scaling_min_freq' if is_cpu else 'min_freq'}")
        self._hz = 1000.0 if is_cpu else 1.0  # of the kernel's unit
        # What within gave last, and for what.
        self._left: tuple[Value | None, Value | None, str | None, Domain, Domain] | None = None

    def max_hz(self) -> float | None:
        text = self.knob.in_force
        return int(text) * self._hz if text is not None and text.isdecimal() else None

    def within(self, values: Mapping[str, Value]) -> Domain:
        """Give the domain with the points that the user's own limits leave; the nearest one where they leave none."""
        high, low = values.get(self.kept[0]), values.get(self.kept[1])
        now = self.knob.in_force if high is None else None  # nothing is written yet: what is in force is the user's
        if (last := self._left) is not None and last[:3] == (high, low, now) and last[3] is self.domain:
            return last[4]
        highest = self.max_hz() if high is None else self._own_hz(high)
        lowest = self._own_hz(low)
        points = self.domain.points_hz
        left = tuple(p for p in points if (highest is None or p <= highest) and (lowest is None or p >= lowest))
        if not left:
            middle = highest if highest is not None else points[-1]
            left = (min(points, key=lambda point: abs(point - middle)),)
        found = replace(self.domain, points_hz=left)
        self._left = high, low, now, self.domain, found
        return found

    def text(self, hz: float, values: Mapping[str, Value]) -> str:
        """Give what to write for a clock: the user's own limit for the highest point that it leaves, or above.

        And never less than the user's lower limit, which the kernel would lower too.
        """
        own, points = values.get(self.knob.path), self.within(values).points_hz
        if own is not None and own.text.isdecimal() and hz >= points[-1]:
            return own.text
        return str(round(max(hz, points[0]) / self._hz))

    def _own_hz(self, value: Value | None) -> float | None:
        return int(value.text) * self._hz if value is not None and value.text.isdecimal() else None


class Actuators:
    """All that is written, behind one snapshot. Belongs to one thread.

    knobs     every file that is set
    snapshot  None: the files are dry and nothing has to be put back
    also      "epp", "rapl": what is set besides clocks
    own       the user's own limits as far as they are known already; None: those of the snapshot
    """

    def __init__(
        self,
        files: Files,
        domains: Sequence[Domain],
        snapshot: Snapshot | None,
        *,
        also: Sequence[str] = (),
        own: Mapping[str, Value] | None = None,
    ) -> None:
        self._files, self._snapshot, self._also = files, snapshot, also
        # The user's own. What an earlier process left and could not put back is older than anything read now.
        self._values: dict[str, Value] = dict(own if own is not None else snapshot.values if snapshot else {})
        self._clocks = {domain.name: Clock(files, domain) for domain in domains if domain.points_hz}
        self._choices: dict[str, list[str]] = {}  # of preferences, by domain
        self._preferences = self._probe_preferences() if "epp" in also else {}
        self._limits = self._probe_limits() if "rapl" in also else ()
        self.knobs = self._all_knobs()
        self._held_s: tuple[float, bool] = (-1.0, False)
        self._is_postponed = False
        # All of this is nearly always as it was at the last look, of 20 a second.
        self._looked = _NOTHING  # what the last look came to, but for foreign values
        self._domains: tuple[Domain, ...] | None = None
        self._max_hz: dict[str, float] | None = None
        self._settled: tuple[Mapping[str, float], str, float] | None = None  # a decision that is in force

    @property
    def domains(self) -> tuple[Domain, ...]:
        """What can be set now: domains that answer, with the points that the user's own limits leave.

        The same object as before where nothing has changed.
        """
        if self._domains is None:
            answering = [clock for clock in self._clocks.values() if clock.knob.in_force is not None]
            self._domains = tuple(clock.within(self._values) for clock in answering)
        return self._domains

    def _all_knobs(self) -> tuple[Knob, ...]:
        return (*(clock.knob for clock in self._clocks.values()), *self._preferences.values(), *self._limits)

    def max_hz(self) -> Mapping[str, float]:
        """Give the upper clock in force by domain, as last read; domains that do not answer are left out."""
        if self._max_hz is None:
            found = {name: clock.max_hz() for name, clock in self._clocks.items()}
            self._max_hz = {name: hz for name, hz in found.items() if hz is not None}
        return self._max_hz

    def look(self, now_s: float) -> Applied:
        """Read every file: who holds it, and what fails."""
        held = self._held_down(now_s)
        foreign = []
        is_same = is_plain = True
        for knob in self.knobs:
            before = knob.in_force
            if knob.look(now_s, held) == "foreign":
                foreign.append((knob.path, knob.in_force or ""))
            if knob.in_force is not before:  # what has not changed is the same object
                is_same = False
                if before is None and knob.path in self._values:
                    self._check_witness(knob.path)
            if not knob.is_plain:
                is_plain = False
        if not is_same or foreign:
            self._changed()
        self._looked = _NOTHING if is_plain and not self._is_postponed else self._applied(now_s, 0)
        return replace(self._looked, foreign=tuple(foreign)) if foreign else self._looked

    def update(self, domains: Sequence[Domain]) -> None:
        """Take up domains that have appeared or changed; those that are gone stay as long as they have values kept."""
        for domain in domains:
            if not domain.points_hz:
                continue
            if (clock := self._clocks.get(domain.name)) is not None:
                clock.domain = domain
            else:
                self._clocks[domain.name] = Clock(self._files, domain)
                if "epp" in self._also:
                    self._preferences |= self._probe_preferences()
        known = {domain.name for domain in domains}
        for name, clock in list(self._clocks.items()):
            if name not in known and clock.knob.in_force is None and clock.knob.path not in self._values:
                del self._clocks[name]
                self._preferences.pop(name, None)
        self.knobs = self._all_knobs()
        self._changed()

    def apply(self, decision: Decision, now_s: float, *, max_w: float = 0.0) -> Applied:
        """Bring a decision into force, as far as it goes; look comes first. A fault stays with its file.

        max_w  the cap in force, for the chip's own limit; 0: none
        """
        if self._snapshot is not None:
            try:
                self._snapshot.write_again()  # `restore` by hand removes it, and a kill would leave our limits then
            except OSError as exc:
                return replace(self._applied(now_s, 0), faults=(fault(exc, self._snapshot.file.lstrip("/"), "write"),))
        asked = decision.max_hz, decision.reason, max_w
        if self._settled == asked:
            return self._looked
        wanted = self._wanted(decision, max_w)
        todo = [(knob, text) for knob, text in wanted if knob.wants(text, now_s)]
        if not todo:
            if all(knob.is_settled(text) for knob, text in wanted):
                self._settled = asked
            return self._applied(now_s, 0)
        if (problem := self._keep([knob for knob, _ in todo])) is not None:
            return replace(self._applied(now_s, 0), faults=(problem,))
        if self._is_postponed:
            return self._applied(now_s, 0)
        before = sum(knob.n_writes for knob in self.knobs)
        # The user's own limits are known only now: what would go beyond them is cut here.
        for knob, text in self._wanted(decision, max_w):
            knob.set(text, now_s)
        self._changed()
        return self._applied(now_s, sum(knob.n_writes for knob in self.knobs) - before)

    def restore(self, sleep: Callable[[float], None] | None = None) -> list[Restored]:
        """Put back the user's own limits, all that were kept. Raises OSError if the snapshot cannot be changed."""
        values = self._snapshot.values if self._snapshot is not None else self._values
        found = put_back(self._files, list(values.values()), sleep)
        for knob in self.knobs:
            knob.forget_answer()
        self._changed()
        if self._snapshot is not None:
            self._snapshot.drop([one.value.path for one in found if one.is_done])
            self._values = dict(self._snapshot.values)
        return found

    # What is wanted.

    def _wanted(self, decision: Decision, max_w: float) -> list[tuple[Knob, str]]:
        wanted = []
        for name, hz in decision.max_hz.items():
            if (clock := self._clocks.get(name)) is not None and hz > 0:
                wanted.append((clock.knob, clock.text(hz, self._values)))
        for name, knob in self._preferences.items():
            if (text := self._preference(name, knob, decision.reason)) is not None:
                wanted.append((knob, text))
        for knob in self._limits:
            own = self._values[knob.path].text if knob.path in self._values else knob.in_force
            if own is not None and own.isdecimal():
                limit_w = max(max_w / len(self._limits), _MIN_LIMIT_W) if max_w > 0 else int(own) / _UW
                wanted.append((knob, own if limit_w * _UW >= int(own) else str(round(limit_w * _UW))))
        return wanted

    def _preference(self, name: str, knob: Knob, reason: str) -> str | None:
        own = self._values[knob.path].text if knob.path in self._values else knob.in_force
        thrifty = _THRIFTY.get(reason)
        if own is None or thrifty is None or own not in _PREFERENCES:
            return own
        is_saving = _PREFERENCES.index(thrifty) > _PREFERENCES.index(own)
        return thrifty if is_saving and thrifty in self._choices.get(name, ()) else own

    # Keeping what was there.

    def _keep(self, knobs: Sequence[Knob]) -> Fault | None:
        """Have the values of all files on disk before the first write to any of them."""
        self._is_postponed = False
        paths = [path for path in self._kept_paths() if path not in self._values]
        if all(knob.path in self._values for knob in knobs):
            return None
        if is_held_down(self._files):
            # What the file says now is the kernel's limit, not the user's, and would be put back as the user's.
            self._is_postponed = True
            return None
        found = []
        for path in paths:
            try:
                found.append(take(self._files, path))
            except OSError as exc:
                if any(knob.path == path for knob in knobs):
                    return fault(exc, path, "read")
        if self._snapshot is not None:
            try:
                self._snapshot.add(found)
            except OSError as exc:
                return fault(exc, self._snapshot.file.lstrip("/"), "write")
            self._values = dict(self._snapshot.values)
        else:
            self._values.update({value.path: value for value in found})
        self._changed()
        return None

    def _check_witness(self, path: str) -> None:
        """Forget what was kept of a device whose place another one has taken: its limits are nobody's to put back."""
        try:
            is_same = take(self._files, path).witness == self._values[path].witness
        except OSError:
            return
        if not is_same:
            folder = path.rpartition("/")[0]
            gone = [kept for kept in self._values if kept.startswith(f"{folder}/")]
            if self._snapshot is not None:
                try:
                    self._snapshot.drop(gone)
                except OSError:
                    return
            for kept in gone:
                self._values.pop(kept, None)
            self._changed()

    def _kept_paths(self) -> list[str]:
        clocks = [path for clock in self._clocks.values() for path in clock.kept]
        return [*clocks, *(knob.path for knob in self._preferences.values()), *(knob.path for knob in self._limits)]

    def _changed(self) -> None:
        """Forget what was reckoned of values that are others now."""
        self._domains = self._max_hz = self._settled = None

    def _applied(self, now_s: float, n_writes: int) -> Applied:
        return Applied(
            n_writes=n_writes,
            contested=tuple(knob.path for knob in self.knobs if knob.is_contested(now_s)),
            faults=tuple(knob.fault for knob in self.knobs if knob.fault is not None),
            is_postponed=self._is_postponed,
        )

    # What is there.

    def _held_down(self, now_s: float) -> Callable[[], bool]:
        def held() -> bool:
            if self._held_s[0] != now_s:
                self._held_s = (now_s, is_held_down(self._files))
            return self._held_s[1]

        return held

    def _probe_preferences(self) -> dict[str, Knob]:
        found = {}
        for name, clock in self._clocks.items():
            path = f"{_CPUFREQ}/{name}/energy_performance_preference"
            if clock.domain.kind == "cpu" and name not in self._choices and self._read(path):
                found[name] = Knob(self._files, path)
                self._choices[name] = self._read(f"{_CPUFREQ}/{name}/{_CHOICES}").split()
        return found

    def _probe_limits(self) -> tuple[Knob, ...]:
        """Find each package's long-term limit; intel-rapl-mmio is the same one again."""
        try:
            zones = self._files.names(_POWERCAP)
        except OSError:
            return ()
        return tuple(
            Knob(self._files, f"{_POWERCAP}/{zone}/constraint_0_power_limit_uw")
            for zone in zones
            if zone.startswith("intel-rapl:")
            and self._read(f"{_POWERCAP}/{zone}/name").startswith("package")
            and self._read(f"{_POWERCAP}/{zone}/constraint_0_name") == "long_term"
        )

    def _read(self, path: str) -> str:
        try:
            return self._files.read(path)
        except OSError:
            return ""
