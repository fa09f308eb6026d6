"""Power as hwmon's chips measure it: shunt monitors on the board (INA219, INA226, INA3221 …) and ACPI's power meter.

Chips are known by their name, because hwmonN is numbered anew at each boot. A channel is one supply that a chip sees;
what it is of, the whole board or a part, only the board's own table says (board_table.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from edge_rt.devices.base import Reading, known, unknown
from edge_rt.devices.meters import Boundary, Counter, Quality, Sample, watts
from edge_rt.devices.sysfs import SysfsRoot

_PLACE = "sys/class/hwmon"

# Chips whose voltage and current of one number are of one supply, so that their product is its power. Elsewhere in1
# and curr1 may have nothing to do with each other.
_INA2XX = frozenset({"ina219", "ina220", "ina226", "ina228", "ina230", "ina231", "ina237", "ina238", "ina260"})
_PAIRED = _INA2XX | {"ina3221"}
_INA3221_CHANNELS = (1, 2, 3)  # 4 to 7 are shunt voltages and sums

_ACPI_METER = "power_meter"

# power_supply registers its batteries and ports here too.
_SUPPLIES = frozenset(
    {"Battery", "Mains", "UPS", "USB", "USB_DCP", "USB_CDP", "USB_ACA", "USB_C", "USB_PD", "Wireless"}
)

# A shunt outside of this is a mistake: 0.1 mΩ carries kiloamperes, and 1 Ω stops any board.
_MIN_SHUNT_OHM, _MAX_SHUNT_OHM = 1e-4, 1.0
_DEFAULT_SHUNT_OHM = 0.01  # of the drivers, where nobody told them the board's
_SHUNT_TOLERANCE = 0.1

_MAX_V, _MAX_A = 100.0, 1000.0
_INTERVAL_S = 0.1
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 1e-3, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """One supply that a chip measures. Paths are without a leading slash and "" where there is no such file.

    device      the chip's own name on its bus, "1-0040" for I2C
    number      the driver's, from 1
    label       the rail's name by the device tree; "" where it has none
    power       power in units of power_unit_w; `average` tells that it is a mean over interval_s
    energy      a counter in µJ
    voltage, current   in mV and mA, where their product is the supply's power
    shunt       the file with the shunt's resistance, as the driver believes it to be
    interval_s  how often there is a new value
    problem     why its numbers cannot be trusted; ""
    note        what one should know of it; ""
    """

    chip: str
    device: str
    number: int
    label: str = ""
    power: str = ""
    power_unit_w: float = 1e-6
    average: bool = False
    energy: str = ""
    voltage: str = ""
    current: str = ""
    shunt: str = ""
    interval_s: float = _INTERVAL_S
    problem: str = ""
    note: str = ""

    @property
    def name(self) -> str:
        if self.label:
            return f"{self.chip} {self.label}"
        return " ".join(filter(None, (self.chip, self.device, f"channel {self.number}")))

    def checked(self, root: SysfsRoot, shunt_ohm: float | None) -> Channel:
        """Give the channel with its shunt compared to the board's, None where no table knows that."""
        problem, note = shunt_faults(root.scaled(self.shunt, 1e-6), shunt_ohm) if self.shunt else ("", "")
        return replace(self, problem=problem, note=note)


class ChannelMeter:
    """Reads one channel."""

    quality: Quality = "measured"

    def __init__(self, root: SysfsRoot, channel: Channel, boundary: Boundary = "rail", name: str = "") -> None:
        self._root = root
        self._channel = channel
        self._counter = Counter(None)
        self.name = name or channel.name
        self.boundary: Boundary = boundary
        self.interval_s = channel.interval_s
        self.note = channel.note

    def read(self, now_s: float) -> Reading[Sample]:
        channel = self._channel
        if channel.problem:
            return unknown(f"/{channel.current or channel.power or channel.energy}", channel.problem)
        if channel.energy:
            return self._read_energy(now_s)
        power = self._power()
        if power.value is None:
            return unknown(power.source, power.reason)
        if self.boundary != "rail" and power.value == 0:
            return unknown(power.source, f"tells 0 W for a {self.boundary} that runs")
        age_s = channel.interval_s / 2 if channel.average else 0.0
        return known(Sample(power_w=power.value, age_s=age_s), power.source)

    def close(self) -> None: ...

    def _power(self) -> Reading[float]:
        channel = self._channel
        if channel.power:
            power = self._root.scaled(channel.power, channel.power_unit_w)
            return power if power.value is None else watts(power.value, power.source)
        volts = self._root.scaled(channel.voltage, 1e-3)
        if volts.value is None:
            return volts
        amperes = self._root.scaled(channel.current, 1e-3)
        if amperes.value is None:
            return amperes
        if not 0 < volts.value <= _MAX_V:
            return unknown(volts.source, f"tells {volts.value:g} V: the rail is off, or the chip is not connected")
        if abs(amperes.value) > _MAX_A:
            return unknown(amperes.source, f"tells {amperes.value:g} A, which cannot be")
        return watts(volts.value * amperes.value, amperes.source)

    def _read_energy(self, now_s: float) -> Reading[Sample]:
        energy = self._root.scaled(self._channel.energy, 1e-6)
        if energy.value is None:
            return unknown(energy.source, energy.reason)
        if energy.value < 0:
            return unknown(energy.source, f"tells {energy.value:g} J, which cannot be")
        if problem := self._counter.update(energy.value, now_s):
            return unknown(energy.source, problem)
        age_s = max(0.0, now_s - self._counter.changed_s)
        return known(Sample(energy_j=self._counter.total_j, age_s=age_s), energy.source)


def channels(root: SysfsRoot) -> tuple[Channel, ...]:
    """List the supplies that are measured; switched-off and unconnected ones and batteries' second entries are not."""
    found: list[Channel] = []
    for path in root.paths(f"{_PLACE}/hwmon*"):
        if root.text(f"{path}/device/type").value in _SUPPLIES:
            continue
        chip = root.name(f"{path}/name").value
        if chip is None:
            found += _acpi_meter(root, path)
        elif chip == _ACPI_METER:
            found += _acpi_meter(root, path, named=True)
        else:
            found += _channels(root, path, chip)
    return tuple(found)


def shunt_faults(told: Reading[float], wanted_ohm: float | None) -> tuple[str, str]:
    """Compare the shunt a driver reckons with to the board's: (why its watts are wrong or "", a remark or "")."""
    if told.value is None:
        return "", ""
    if not _MIN_SHUNT_OHM <= told.value <= _MAX_SHUNT_OHM:
        return f"the driver reckons with a shunt of {told.value * 1e3:g} mΩ, which cannot be", ""
    if wanted_ohm is None:
        if abs(told.value - _DEFAULT_SHUNT_OHM) < 1e-9:
            return (
                "",
                "the driver reckons with its default shunt of 10 mΩ; if the board's is another, the watts are wrong",
            )
        return "", ""
    if abs(told.value - wanted_ohm) > _SHUNT_TOLERANCE * wanted_ohm:
        factor = told.value / wanted_ohm
        return (
            f"the driver reckons with a shunt of {told.value * 1e3:g} mΩ and the board has {wanted_ohm * 1e3:g} mΩ: "
            f"the true watts are {factor:.2g} times what it tells. Set shunt-resistor in the device tree"
        ), ""
    return "", ""


def _channels(root: SysfsRoot, path: str, chip: str) -> list[Channel]:
    device = root.link_name(f"{path}/device")
    interval_s = _interval(root, f"{path}/update_interval")
    numbers: dict[int, dict[str, str]] = {}

    def collect(kind: str, pattern: str, fits: Callable[[int], bool] = lambda _: True) -> None:
        for file in root.paths(f"{path}/{pattern}"):
            digits = "".join(c for c in file.rpartition("/")[2].partition("_")[0] if c.isdecimal())
            if digits and len(digits) <= 3 and fits(int(digits)):
                numbers.setdefault(int(digits), {}).setdefault(kind, file)

    collect("power", "power[0-9]*_input")
    collect("average", "power[0-9]*_average")
    collect("energy", "energy[0-9]*_input")
    if chip in _PAIRED:
        wanted = _INA3221_CHANNELS if chip == "ina3221" else (1,)
        collect("voltage", "in[0-9]*_input", lambda n: n in wanted)
        collect("current", "curr[0-9]*_input", lambda n: n in wanted)
    found = []
    for number, files in sorted(numbers.items()):
        power = files.get("power") or files.get("average", "")
        product = {k: files[k] for k in ("voltage", "current")} if {"voltage", "current"} <= files.keys() else {}
        label = _label(root, path, number)
        if not (power or files.get("energy") or product) or label.upper() == "NC" or _is_off(root, path, number):
            continue
        shunts = (f"{path}/shunt{number}_resistor", f"{path}/shunt_resistor")
        channel = Channel(
            chip=chip,
            device=device,
            number=number,
            label=label,
            power=power,
            average=power.endswith("_average"),
            energy="" if power or product else files.get("energy", ""),
            voltage="" if power else product.get("voltage", ""),
            current="" if power else product.get("current", ""),
            shunt=next((s for s in shunts if root.exists(s)), ""),
            interval_s=_interval(root, f"{path}/power{number}_average_interval", interval_s),
        )
        found.append(channel.checked(root, None))
    return found


def _acpi_meter(root: SysfsRoot, path: str, *, named: bool = False) -> list[Channel]:
    """Find ACPI's power meter, whose files lie below device/ and which has no name beside them on most kernels."""
    places = [place for place in (f"{path}/device", path) if root.exists(f"{place}/power1_average")]
    if not places or not (named or root.name(f"{path}/device/name").value in (None, _ACPI_METER)):
        return []
    place = places[0]
    measured = " ".join(p.rpartition("/")[2] for p in root.paths(f"{place}/measures/*"))
    return [
        Channel(
            chip=_ACPI_METER,
            device=root.link_name(f"{path}/device"),
            number=1,
            power=f"{place}/power1_average",
            average=True,
            interval_s=_interval(root, f"{place}/power1_average_interval", 1.0),
            note=f"measures {measured[:80]}" if measured.isprintable() and measured else "",
        )
    ]


def _label(root: SysfsRoot, path: str, number: int) -> str:
    for kind in ("power", "in", "curr", "energy"):
        if (label := root.name(f"{path}/{kind}{number}_label").value) is not None:
            return label
    return ""


def _is_off(root: SysfsRoot, path: str, number: int) -> bool:
    return root.integer(f"{path}/in{number}_enable").value == 0


def _interval(root: SysfsRoot, path: str, default_s: float = _INTERVAL_S) -> float:
    told = root.scaled(path, 1e-3).value
    return told if told is not None and _MIN_INTERVAL_S <= told <= _MAX_INTERVAL_S else default_s
