"""What goes over the line to a board with SSCMA firmware: requests, replies, and where a reply begins among noise.

    AT+[TAG@]NAME[?|=ARGUMENTS]\\r        a request, at most 4095 bytes of ASCII
    \\r{"type":…,"name":…,"code":…,"data":…}\\n     a reply, an event or a line of the log; one line of JSON

Nothing on the line has a checksum, and the boot loader and the firmware's own prints come between replies. So a reply
begins at `{` behind the end of a line, and one that another begins in, that is too long or no such JSON is left out and
counted. The protocol: docs/protocol/at_protocol.md of Seeed's SSCMA-Micro.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta, field

from edge_rt.devices.serial_meter import port_problem
from edge_rt.errors import DeviceLostError

MAX_REQUEST_BYTES: Final = 4095
MAX_REPLY_BYTES: Final = 512 * 2**10  # a picture of 640 × 480 as base64 is a fifth of it
BAUD: Final = 921_600

_NAME: Final = re.compile(r"(?:(?P<tag>[A-Za-z0-9]{1,16})@)?(?P<name>[A-Z0-9]{1,32})(?P<asks>\??)", re.ASCII)
_BEGINNING: Final = re.compile(rb"[\r\n]\{")
_CHUNK: Final = 64 * 2**10
_WRITE_S: Final = 2.0
_T = TypeVar("_T")


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A line that the board has sent.

    kind  0 the answer to a request, 1 an event, 2 a line of the log, with which unknown requests are answered too
    name  of the request, with its tag and `?`; AT for those that the board could not read
    code  0 for success; CODES has the others
    """

    kind: Literal[0, 1, 2] = field(name="type")
    name: Annotated[str, Meta(max_length=128)]
    code: Annotated[int, Meta(ge=-1000, le=1000)]
    data: msgspec.Raw = msgspec.Raw(b"null")

    def is_of(self, tag: str, name: str) -> bool:
        """Say whether it belongs to a request; firmware that drops tags leaves them empty."""
        found = _NAME.fullmatch(self.name)
        return found is not None and found["name"] == name and found["tag"] in (tag, None)

    def payload(self, shape: type[_T]) -> _T:
        """Decode data. Raises ValueError for another one, which msgspec's errors are."""
        try:
            return msgspec.json.decode(self.data, type=shape)
        except RecursionError:
            raise ValueError("is nested too deeply") from None


CODES: Final = {
    1: "try again",
    2: "a logic error",
    3: "a timeout of its own",
    4: "an input or output error",
    5: "an invalid argument",
    6: "out of memory",
    7: "busy",
    8: "not supported",
    9: "not permitted",
}


def request(tag: str, name: str, arguments: tuple[int | str, ...] = (), *, asks: bool = False) -> bytes:
    """Write a request; texts are quoted. Raises ValueError for what cannot be written so."""
    text = f"AT+{tag}@{name}{'?' if asks else ''}"
    if arguments:
        text += "=" + ",".join(_argument(value) for value in arguments)
    line = (text + "\r").encode("ascii")
    if len(line) > MAX_REQUEST_BYTES:
        raise ValueError(f"the request has {len(line)} bytes, of {MAX_REQUEST_BYTES} that the board takes")
    return line


def _argument(value: int | str) -> str:
    if isinstance(value, int):
        return str(value)
    if any(not " " <= char <= "~" for char in value):
        raise ValueError(f"{value[:40]!r} is not printable ASCII")
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def crc16_maxim(data: bytes) -> int:
    """Give the checksum that the firmware keeps beside stored texts."""
    crc = 0
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0xA001 if crc & 1 else 0)
    return crc ^ 0xFFFF


class ReplyReader:
    """Finds replies in what comes over the line, in pieces of any size.

    n_broken  replies that began and were none
    noise     the last printable characters that belonged to no reply: boot messages, another protocol
    """

    def __init__(self) -> None:
        self.n_broken = 0
        self.noise = ""
        self._buffer = bytearray()
        self._n_searched = 0  # bytes of the buffer that no reply ends in

    def feed(self, data: bytes) -> list[Reply]:
        """Take bytes as they come; give the replies that are whole now."""
        self._buffer += data
        found: list[Reply] = []
        while self._next_begins():
            end = self._buffer.find(b"\n", self._n_searched)
            again = self._buffer.find(b"\r{", max(2, self._n_searched - 1), len(self._buffer) if end < 0 else end)
            if again >= 0:  # its end was lost
                self.n_broken += 1
                self._drop(again)
            elif end >= 0:
                if (reply := _decoded(bytes(self._buffer[1:end]))) is not None:
                    found.append(reply)
                else:
                    self.n_broken += 1
                self._drop(end)  # the line's end may be the one that the next reply begins behind
            else:
                self._n_searched = len(self._buffer)
                if len(self._buffer) > MAX_REPLY_BYTES:
                    self.n_broken += 1
                    self._drop(len(self._buffer))
                break
        return found

    def _next_begins(self) -> bool:
        """Drop what comes before the next reply's beginning; say whether there is one."""
        beginning = _BEGINNING.search(self._buffer)
        if beginning is None:
            kept = 1 if self._buffer.endswith((b"\r", b"\n")) else 0
            self._hear(self._buffer[: len(self._buffer) - kept])
            self._drop(len(self._buffer) - kept)
            return False
        if beginning.start():
            self._hear(self._buffer[: beginning.start()])
            self._drop(beginning.start())
        self._n_searched = max(2, self._n_searched)
        return True

    def _hear(self, noise: bytearray) -> None:
        text = "".join(chr(byte) if 32 <= byte < 127 else " " for byte in noise[-80:])
        self.noise = (self.noise + text).strip()[-80:] if text.strip() else self.noise

    def _drop(self, n_bytes: int) -> None:
        del self._buffer[:n_bytes]
        self._n_searched = 0


def _decoded(line: bytes) -> Reply | None:
    try:
        return msgspec.json.decode(line, type=Reply) if len(line) <= MAX_REPLY_BYTES else None
    except (ValueError, RecursionError):  # msgspec's and Unicode's errors are ValueErrors
        return None


class Wire(Protocol):
    """The line to a board. Both raise DeviceLostError."""

    name: str

    def receive(self, timeout_s: float) -> bytes:
        """Sleep until bytes come, at most so long; b"" where none did."""
        ...

    def send(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class SerialWire:
    """A serial port. One thread receives; the kernel wakes it, it never looks by itself."""

    def __init__(self, path: str, baud: int = BAUD, *, open_port: Callable[..., Any] | None = None) -> None:
        self.name = path
        try:
            self._port = (open_port or _pyserial(path))(path, baud, timeout=0, write_timeout=_WRITE_S, exclusive=True)
        except (OSError, ValueError) as exc:
            raise DeviceLostError(device=path, reason=port_problem(exc)) from exc

    def receive(self, timeout_s: float) -> bytes:
        try:
            self._port.timeout = max(0.0, timeout_s)
            data: bytes = self._port.read(1)
            return data + self._port.read(min(_CHUNK, self._port.in_waiting)) if data else data
        except (OSError, TypeError) as exc:  # pyserial's own after a port has been closed
            raise DeviceLostError(device=self.name, reason=port_problem(exc)) from exc

    def send(self, data: bytes) -> None:
        try:
            self._port.write(data)
        except (OSError, TypeError) as exc:
            raise DeviceLostError(device=self.name, reason=port_problem(exc)) from exc

    def close(self) -> None:
        self._port.close()


def _pyserial(path: str) -> Callable[..., Any]:
    try:
        import serial
    except ImportError:
        remedy = "cannot be opened without pyserial: pip install 'edge_rt[power]'"
        raise DeviceLostError(device=path, reason=remedy) from None
    opener: Callable[..., Any] = serial.Serial
    return opener
