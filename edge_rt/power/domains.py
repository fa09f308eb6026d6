"""The clocks of this machine as the governor knows them."""

from __future__ import annotations

from edge_rt.devices import cpufreq, devfreq
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.power.state import Domain


def domains(root: SysfsRoot | None = None) -> tuple[Domain, ...]:
    """List what can be given an upper clock: cpufreq's policies, then NPUs, GPUs and memory.

    What lists no clocks, or only one, cannot be governed and is left out.
    """
    root = root or SysfsRoot()
    cpus = tuple(
        Domain(
            name=policy.name,
            kind="cpu",
            points_hz=policy.points_hz,
            n_cpus=len(policy.online_cpus) or len(policy.cpus),
            capacity=policy.capacity if policy.capacity is not None else 1.0,
        )
        for policy in cpufreq.policies(root)
        if len(policy.points_hz) > 1
    )
    return cpus + tuple(
        Domain(name=device.name, kind=device.kind, points_hz=device.points_hz)
        for device in devfreq.devices(root)
        if device.kind != "other" and len(device.points_hz) > 1
    )
