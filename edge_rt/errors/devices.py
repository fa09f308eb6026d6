"""Devices behind a port: boards that answer requests over a serial line."""

from __future__ import annotations

from dataclasses import dataclass

from edge_rt.errors.base import EdgeRtError


class DeviceError(EdgeRtError):
    """A device that edge_rt talks with failed."""

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
