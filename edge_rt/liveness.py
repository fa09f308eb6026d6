"""What the daemon tells systemd while it runs: that work goes on, and what it does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

# A worker without progress is killed once worker.step_timeout_s is over and is gone some seconds later, also for a
# front process that cannot kill it. Where it is not, the supervision itself does not work.
SUPERVISION_S: Final = 10.0
_INTERVAL_S: Final = 5.0  # between two looks, where systemd's watchdog asks for none sooner
_EXTENSION_S: Final = 30.0  # that a start may go on for after each look


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What the daemon does.

    models   in memory
    loading  on their way there
    late_s   for how long a worker without progress should have been gone
    """

    models: Sequence[str] = ()
    loading: Sequence[str] = ()
    n_running: int = 0
    n_waiting: int = 0
    late_s: float = 0.0


def is_alive(activity: Activity) -> bool:
    """Say whether work goes on. The caller proves by calling that the event loop turns."""
    return activity.late_s <= SUPERVISION_S


def status_line(activity: Activity, note: str = "") -> str:
    """Write what the daemon does for `systemctl status`."""
    parts = []
    if activity.loading:
        parts.append(f"loading {', '.join(activity.loading)}")
    parts.append(f"{', '.join(activity.models)} in memory" if activity.models else "no model in memory")
    if activity.n_running or activity.n_waiting:
        parts.append(f"{activity.n_running} running, {activity.n_waiting} waiting")
    else:
        parts.append("idle")
    if not is_alive(activity):
        parts.append(f"a worker makes no progress, {activity.late_s:.0f} s after it should have been killed")
    if note:
        parts.append(note)
    return "; ".join(" ".join(part.split()) for part in parts)


class Supervised(Protocol):
    """What is looked at; runtime.Runtime is one."""

    def activity(self) -> Activity: ...


class Reporter:
    """Tells systemd how the daemon is, from its event loop. Quiet where nobody listens.

    send         sd_notify of one message
    watchdog_s   how often WATCHDOG=1 is wanted; None: not at all
    """

    def __init__(
        self, supervised: Supervised, send: Callable[[str], object], *, watchdog_s: float | None = None
    ) -> None:
        self._supervised, self._send = supervised, send
        self._watchdog_s = watchdog_s
        self._is_starting = True
        self._note = self._said = ""

    async def run(self) -> None:
        """Report for ever."""
        while True:
            self.report()
            await asyncio.sleep(min(self._watchdog_s or _INTERVAL_S, _INTERVAL_S))

    def report(self) -> None:
        """Look once and tell what is new; that work goes on is told each time, and not at all if it does not."""
        activity = self._supervised.activity()
        message = []
        if self._is_starting:
            message.append(f"EXTEND_TIMEOUT_USEC={round(_EXTENSION_S * 1e6)}")
        if self._watchdog_s is not None and is_alive(activity):
            message.append("WATCHDOG=1")
        if (line := status_line(activity, self._note)) != self._said:
            message.append(f"STATUS={line}")
            self._said = line
        if message:
            self._send("\n".join(message))

    def started(self) -> None:
        """Tell that requests are taken."""
        self._is_starting = False
        self._send("READY=1")
        self.report()

    def reloading(self, monotonic_us: int) -> None:
        """Tell that the configuration is being read again; reloaded ends it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={monotonic_us}")

    def reloaded(self, note: str) -> None:
        """Tell that the configuration has been read. note: what shall stay in the status, "" nothing."""
        self._note = note
        self._send("READY=1")
        self.report()

    def stopping(self, within_s: float) -> None:
        """Tell that the end has begun, and ask for the time that running answers may take."""
        self._send(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={round(within_s * 1e6)}\nSTATUS=finishing running answers")
