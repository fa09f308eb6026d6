"""Who sets this machine's clocks, as `edge_rt power status` shows it: powerd, and other power managers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edge_rt.devices.kernel_files import KernelFiles
from edge_rt.errors import DaemonLostError, DaemonUnreachableError, InvalidRequestError
from edge_rt.power.client import ask
from edge_rt.power.conflicts import Rival, rivals


@dataclass(frozen=True, slots=True, kw_only=True)
class Setter:
    """powerd's own status, or why there is none; and others that are here."""

    status: Mapping[str, Any] | None
    reason: str
    rivals: tuple[Rival, ...]


def look(socket_path: str, files: KernelFiles) -> Setter:
    """Ask powerd, and look for other power managers."""
    found = rivals(files)
    if not socket_path:
        return Setter(status=None, reason="power.socket_path is empty", rivals=found)
    try:
        return Setter(status=dict(ask(socket_path, "status")), reason="", rivals=found)
    except (DaemonUnreachableError, DaemonLostError, InvalidRequestError) as exc:
        return Setter(status=None, reason=str(exc), rivals=found)


def lines(setter: Setter) -> Iterator[str]:
    """Draw it, a line each."""
    if setter.status is None:
        yield f"none: {setter.reason}"
    else:
        yield from _powerd(setter.status)
    for rival in setter.rivals:
        what = "sets clocks too" if rival.writes else "acts in heat"
        yield f"{rival.name} ({rival.evidence}) {what}. Remedy: {rival.remedy}"


def _powerd(status: Mapping[str, Any]) -> Iterator[str]:
    state, reason = status.get("state", "?"), status.get("reason", "?")
    yield f"{state}: {status.get('stopped_by')}" if status.get("stopped_by") else f"{state}, {reason}"
    if status.get("is_postponed"):
        yield "waits until the chip has cooled: until then the user's own limits cannot be read"
    caps = [f"{status[key]:g} {unit}" for key, unit in (("max_w", "W"), ("max_c", "°C")) if status.get(key)]
    if caps:
        yield f"keeps below {' and '.join(caps)}"
    clocks = status.get("clocks")
    for name, clock in clocks.items() if isinstance(clocks, dict) else ():
        wanted, in_force = clock.get("wanted_hz"), clock.get("in_force_hz")
        if wanted is not None and in_force is not None:
            yield f"{name}: up to {in_force / 1e9:.2f} GHz" + (
                f", {wanted / 1e9:.2f} GHz wanted" if abs(wanted - in_force) > 1e3 else ""
            )
    yield from _advice(status)
    for fault in status.get("faults", ()):
        yield f"fails: {fault}"


def _advice(status: Mapping[str, Any]) -> Iterator[str]:
    """Say what the daemon is advised, and whether it works by it."""
    advice = status.get("advice")
    if not isinstance(advice, dict):
        return
    words = advice_words(advice)
    n_at_work = status.get("n_at_work")
    if words:
        is_taken = status.get("takes_advice") and status.get("state") == "acting"
        nobody = "nobody is at work" if n_at_work == 0 else "nobody at work takes it"
        is_shown = "shown only" if status.get("state") == "dry-run" else nobody
        yield f"advises {words}" + ("" if is_taken else f" ({is_shown})")
    elif isinstance(n_at_work, int) and n_at_work > 1:
        yield f"advises nothing: {n_at_work} daemons are at work"


def advice_words(advice: Mapping[str, Any]) -> str:
    """Write down advice; "" for none."""
    parts = [
        f"{phase} on {n} thread{'s' if n != 1 else ''}"
        for phase, n in (("prefill", advice.get("n_prefill_threads")), ("decode", advice.get("n_decode_threads")))
        if n is not None
    ]
    if (n := advice.get("max_batch")) is not None:
        parts.append(f"{n} answer{'s' if n != 1 else ''} together at most")
    return ", ".join(parts)
