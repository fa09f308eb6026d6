"""Look for a back end's devices in a process of its own: vendor libraries may crash or hang while they are imported.

`python -m edge_rt.worker.probe NAME` is that process; for each line that comes in it prints one JSON array of devices.
It stays while the devices are in use: to import a vendor's library takes much longer than to read a temperature.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import msgspec

from edge_rt import same_package
from edge_rt.errors import BackendUnavailableError, EdgeRtError
from edge_rt.tensor_types import DeviceState

TIMEOUT_S = 40.0  # longer than a back end gives its vendor's library, so that it can say itself what fails
MAX_OUTPUT_BYTES = 64 * 1024
_MAX_REASON = 300

Survey = Mapping[str, tuple[DeviceState, ...]]


class ProbeChild:
    """The process that looks for one back end's devices, each time it is asked. Started by the first read.

    command  runs instead of this module
    """

    def __init__(self, backend: str, *, timeout_s: float = TIMEOUT_S, command: Sequence[str] = ()) -> None:
        self._backend, self._timeout_s = backend, timeout_s
        self._command = command or same_package.command("edge_rt.worker.probe", backend)
        self._child: asyncio.subprocess.Process | None = None

    async def read(self) -> tuple[DeviceState, ...]:
        """Ask the back end. One that is absent, crashes or hangs is a device with that as its fault."""
        try:
            devices = await self._ask()
        except BaseException:
            await self.end()
            raise
        if any(device.fault for device in devices):
            await self.end()  # the next one begins anew
        return devices

    async def _ask(self) -> tuple[DeviceState, ...]:
        try:
            child = self._child = self._child or await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                limit=MAX_OUTPUT_BYTES,
            )
        except OSError as exc:
            return absent(self._backend, f"its probe cannot be started: {exc}")
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                with contextlib.suppress(ConnectionError):  # it has ended: its status tells
                    child.stdin.write(b"\n")
                    await child.stdin.drain()
                line = await child.stdout.readline()
                status = None if line else await child.wait()
        except TimeoutError:
            return absent(self._backend, f"its probe did not answer within {self._timeout_s:g} s")
        except ValueError:
            return absent(self._backend, f"its probe cannot be read: more than {MAX_OUTPUT_BYTES} bytes")
        if status is not None:
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            return absent(self._backend, f"its probe ended with {how}")
        return _read(self._backend, line)

    async def end(self) -> None:
        """End the process with all that it has started."""
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()


async def probe(backend: str, *, timeout_s: float = TIMEOUT_S, command: Sequence[str] = ()) -> tuple[DeviceState, ...]:
    """Ask a back end for its devices once, as ProbeChild.read does."""
    child = ProbeChild(backend, timeout_s=timeout_s, command=command)
    try:
        return await child.read()
    finally:
        await child.end()


def survey(names: Sequence[str], ask: Callable[[str], Awaitable[tuple[DeviceState, ...]]] = probe) -> Survey:
    """Ask several back ends at once, as ProbeChild.read does; by name."""

    async def ask_all() -> Survey:
        found = await asyncio.gather(*(ask(name) for name in names))
        return dict(zip(names, found, strict=True))

    return asyncio.run(ask_all())


class ProbeChildren:
    """A child for each back end that is asked for, until end."""

    def __init__(self) -> None:
        self._children: dict[str, ProbeChild] = {}

    async def read(self, backend: str) -> tuple[DeviceState, ...]:
        """Ask a back end, as ProbeChild.read does."""
        if backend not in self._children:
            self._children[backend] = ProbeChild(backend)
        return await self._children[backend].read()

    async def end(self) -> None:
        """End them all; one that is asked for again is started again."""
        await asyncio.gather(*(child.end() for child in self._children.values()))


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
    except EdgeRtError as exc:  # a setting that is none, too
        return absent(name, str(exc))
    except Exception as exc:  # noqa: BLE001 - whatever it is, an exit status would tell less
        return absent(name, f"its probe failed: {type(exc).__name__}: {exc}")
    if isinstance(found, Absent):
        return absent(name, str(BackendUnavailableError(backend=name, reason=found.reason, extra=found.extra)))
    features = cpu.features()
    return tuple(
        DeviceState(
            backend=name,
            id=device.id,
            kind=device.kind,
            detail=device.detail,
            evidence=device.evidence,
            reference=device.reference,
            features=features if device.kind == "cpu" else frozenset(),
            free_bytes=device.free_bytes,
            temp_c=device.temp_c,
            fault=device.fault,
        )
        for device in found
    )


def main(
    argv: Sequence[str] = sys.argv[1:],
    questions: Iterable[bytes] = sys.stdin.buffer,
    write: Callable[[bytes], object] = sys.stdout.buffer.write,
) -> int:
    """Run as the child: an answer for each line, until there are no more: its parent has ended."""
    (name,) = argv
    for _ in questions:
        write(msgspec.json.encode(look(name)) + b"\n")
    return 0


if __name__ == "__main__":
    # What a library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    same_package.end_with_parent()  # also where a library hangs
    sys.exit(main(write=answers.write))
