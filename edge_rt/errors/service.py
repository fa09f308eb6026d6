"""What edge_rt is to the machine: a service of systemd, a helper that sets clocks, a daemon on a socket."""

from __future__ import annotations

from dataclasses import dataclass

from edge_rt.errors.base import EdgeRtError


class ServiceError(EdgeRtError):
    """edge_rt cannot be made a service of systemd."""

    code = "service_error"


@dataclass(eq=False)
class NoSystemdError(ServiceError):
    code = "no_systemd"
    reason: str

    def __str__(self) -> str:
        return (
            f"there is no systemd to install into: {self.reason}. `edge_rt serve` runs under any supervisor; "
            "--root DIR writes the units into a tree that will be a system's root"
        )


@dataclass(eq=False)
class NotRootError(ServiceError):
    code = "not_root"
    what: str
    command: str

    def __str__(self) -> str:
        return f"{self.what} takes root: `sudo {self.command}`; --dry-run shows what it would do"


@dataclass(eq=False)
class InterpreterError(ServiceError):
    """The service's user could not run this Python; problems are sentences."""

    code = "interpreter"
    python: str
    problems: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"a service could not run {self.python}: {'; '.join(self.problems)}. Install edge_rt where all may "
            "read it, with a Python that all may read: `/usr/bin/python3 -m venv /opt/edge_rt`, install it there with "
            "`/opt/edge_rt/bin/pip`, then `/opt/edge_rt/bin/edge_rt install`"
        )


@dataclass(eq=False)
class UnitError(ServiceError):
    """A program that installing needs has failed."""

    code = "unit_failed"
    command: str
    status: int
    said: str
    remedy: str = "`edge_rt doctor` looks further"

    def __str__(self) -> str:
        return f"`{self.command}` ended with {self.status}: {self.said or 'it said nothing'}; {self.remedy}"


@dataclass(eq=False)
class PowerUnknownError(EdgeRtError):
    """A power that is needed cannot be told; reason is the meter's."""

    code = "power_unknown"
    source: str
    reason: str

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}. Type in what an instrument shows, with --idle-w and --active-w"


@dataclass(eq=False)
class DaemonUnreachableError(EdgeRtError):
    """A client found nobody to talk to, or may not."""

    code = "daemon_unreachable"
    retryable = True
    address: str
    reason: str
    remedy: str = "start one with `edge_rt serve`"

    def __str__(self) -> str:
        return f"no daemon answers on {self.address}: {self.reason}; {self.remedy}"


@dataclass(eq=False)
class DaemonLostError(EdgeRtError):
    """A client's daemon went away in the middle of an answer."""

    code = "daemon_lost"
    retryable = True
    address: str
    reason: str

    def __str__(self) -> str:
        return f"the daemon on {self.address} was lost before the answer was whole: {self.reason}; see its log"
