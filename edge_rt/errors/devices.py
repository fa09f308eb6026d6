"""Devices other than the CPU, and what they do wrong."""

from __future__ import annotations

from dataclasses import dataclass

from edge_rt.errors.base import EdgeRtError


class DeviceError(EdgeRtError):
    """A device that computes for edge_rt is absent, is another one than expected, or failed; device is its name."""

    code = "device_error"


@dataclass(eq=False)
class DeviceLostError(DeviceError):
    """The port cannot be opened, or has gone."""

    code = "device_lost"
    retryable = True
    device: str
    reason: str

    def __str__(self) -> str:
        return f"{self.device} {self.reason}"


@dataclass(eq=False)
class DeviceSilentError(DeviceError):
    """Nothing that answers the request came in time; heard says what came instead."""

    code = "device_silent"
    retryable = True
    device: str
    request: str
    waited_s: float
    heard: str

    def __str__(self) -> str:
        return f"{self.device} has not answered {self.request} within {self.waited_s:g} s: {self.heard}"


@dataclass(eq=False)
class DeviceRefusedError(DeviceError):
    code = "device_refused"
    device: str
    request: str
    reason: str

    def __str__(self) -> str:
        return f"{self.device} refuses {self.request}: {self.reason}"


@dataclass(eq=False)
class DeviceNotFoundError(DeviceError):
    code = "device_not_found"
    device: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.device} cannot be used: {self.reason}; {self.remedy}"


@dataclass(eq=False)
class DeviceMismatchError(DeviceError):
    """The device, or what was loaded into it, is not what this version of edge_rt or the model needs."""

    code = "device_mismatch"
    device: str
    what: str
    found: str
    wanted: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.device}: {self.what} is {self.found}, needed is {self.wanted}; {self.remedy}"


@dataclass(eq=False)
class DeviceMemoryError(DeviceError):
    """Memory that a device can reach does not suffice; kind names it as the system does. free_bytes -1: unknown."""

    code = "device_memory"
    device: str
    kind: str
    need_bytes: int
    free_bytes: int
    remedy: str

    def __str__(self) -> str:
        free = f"{self.free_bytes / 2**20:.1f} MiB are free" if self.free_bytes >= 0 else "it cannot have so much"
        return f"{self.device} needs {self.need_bytes / 2**20:.1f} MiB of {self.kind}, {free}; {self.remedy}"


@dataclass(eq=False)
class DeviceFaultError(DeviceError):
    """An engine stopped before its jobs were done, or what it computed cannot be right.

    what     what went wrong
    status   its STATUS register, and with it: cycles it was busy, cycles in which its lanes starved, address and port
             of the memory access that failed, the tag of the job under way, jobs left
    """

    code = "device_fault"
    device: str
    what: str
    status: int
    cycles: int
    starved_cycles: int
    address: int
    port: int
    job: int
    n_left: int

    def __str__(self) -> str:
        return f"{self.device} failed: {self.what}; {_registers(self)}"


@dataclass(eq=False)
class DeviceTimeoutError(DeviceError):
    """An engine was not done at its deadline; the fields are those of DeviceFaultError and the seconds it had."""

    code = "device_timeout"
    device: str
    limit_s: float
    status: int
    cycles: int
    starved_cycles: int
    address: int
    port: int
    job: int
    n_left: int

    def __str__(self) -> str:
        return f"{self.device} was not done after {self.limit_s:g} s; {_registers(self)}"


def _registers(error: DeviceFaultError | DeviceTimeoutError) -> str:
    return (
        f"STATUS 0x{error.status:08X}, {error.cycles} cycles, {error.starved_cycles} of them starved, address "
        f"0x{error.address:X}, port {error.port}, job {error.job}, {error.n_left} jobs left"
    )
