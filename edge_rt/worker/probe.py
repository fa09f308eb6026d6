"""Look for a back end's devices in a process of its own: vendor libraries may crash or hang while they are imported.

`python -m edge_rt.worker.probe NAME` is that process; it prints one JSON array of devices.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence

import msgspec

from edge_rt.errors import BackendUnavailableError
from edge_rt.tensor_types import DeviceState

TIMEOUT_S = 20.0
MAX_OUTPUT_BYTES = 64 * 1024
_MAX_REASON = 300


async def probe(backend: str, *, timeout_s: float = TIMEOUT_S, command: Sequence[str] = ()) -> tuple[DeviceState, ...]:
    """Ask a back end for its devices. One that is absent, crashes or hangs is a device with that as its fault.

    command  runs instead of this module
    """
    command = command or (sys.executable, "-P", "-m", "edge_rt.worker.probe", backend)
    try:
        child = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as exc:
        return absent(backend, f"its probe cannot be started: {exc}")
    assert child.stdout is not None
    output = b""
    try:
        async with asyncio.timeout(timeout_s):
            while len(output) <= MAX_OUTPUT_BYTES and (data := await child.stdout.read(MAX_OUTPUT_BYTES)):
                output += data
            status = await child.wait() if len(output) <= MAX_OUTPUT_BYTES else 0
    except TimeoutError:
        return absent(backend, f"its probe did not end within {timeout_s:g} s")
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # what it started goes with it
            await child.wait()
    if status != 0:
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return absent(backend, f"its probe ended with {how}")
    return _read(backend, output)


def absent(backend: str, reason: str) -> tuple[DeviceState, ...]:
    return (DeviceState(backend=backend, id="none", kind="none", fault=reason[:_MAX_REASON]),)


def _read(backend: str, output: bytes) -> tuple[DeviceState, ...]:
    try:
        devices = msgspec.json.decode(output, type=tuple[DeviceState, ...])
    except msgspec.DecodeError as exc:
        return absent(backend, f"its probe cannot be read: {exc}")
    if not devices or any(device.backend != backend for device in devices):
        return absent(backend, "its probe names no device of it")
    return devices


def look(name: str) -> tuple[DeviceState, ...]:
    """Import a back end and ask it; the child's work."""
    from edge_rt.backends import registry  # only here: what imports this module imports no back end
    from edge_rt.backends.base import Absent
    from edge_rt.devices import cpu

    try:
        found = registry.get(name).probe()
    except BackendUnavailableError as exc:
        return absent(name, str(exc))
    if isinstance(found, Absent):
        return absent(name, str(BackendUnavailableError(backend=name, reason=found.reason, extra=found.extra)))
    features = cpu.features()
    return tuple(
        DeviceState(
            backend=name,
            id=device.id,
            kind=device.kind,
            detail=device.detail,
            simulated=device.simulated,
            reference=device.reference,
            features=features if device.kind == "cpu" else frozenset(),
            free_bytes=device.free_bytes,
            temp_c=device.temp_c,
            fault=device.fault,
        )
        for device in found
    )


def main(argv: Sequence[str] = sys.argv[1:], write: Callable[[bytes], object] = sys.stdout.buffer.write) -> int:
    """Run as the child. What a library prints while it is imported must not be taken for the answer."""
    (name,) = argv
    answer = os.dup(1)
    os.dup2(2, 1)
    try:
        devices = look(name)
    finally:
        sys.stdout.flush()
        os.dup2(answer, 1)
        os.close(answer)
    write(msgspec.json.encode(devices))
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.exit(status)
