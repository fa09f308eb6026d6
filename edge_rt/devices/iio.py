"""Power rails as NVIDIA's older kernels (JetPack 4) show them: an INA3221 as an IIO device, in mW."""

from __future__ import annotations

from edge_rt.devices.hwmon import Channel
from edge_rt.devices.sysfs import SysfsRoot

_PLACES = ("sys/bus/i2c/drivers/ina3221x/*/iio:device*", "sys/bus/i2c/drivers/ina3221x/*/iio_device")
_CHANNELS = (0, 1, 2)


def channels(root: SysfsRoot) -> tuple[Channel, ...]:
    """List the rails that have a name and a power."""
    found: list[Channel] = []
    for pattern in _PLACES:
        for path in root.paths(pattern):
            device = path.rsplit("/", 2)[-2]
            if any(channel.device == device for channel in found):  # both names may stand for one device
                continue
            found += _rails(root, path, device)
    return tuple(found)


def _rails(root: SysfsRoot, path: str, device: str) -> list[Channel]:
    rails = []
    for number in _CHANNELS:
        label = root.name(f"{path}/rail_name_{number}").value
        power = f"{path}/in_power{number}_input"
        if label and label.upper() != "NC" and root.exists(power):
            rails.append(
                Channel(chip="ina3221", device=device, number=number + 1, label=label, power=power, power_unit_w=1e-3)
            )
    return rails
