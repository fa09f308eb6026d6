"""Server-sent events coming in, from a server that may send anything: incremental, with limits, never regular."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

DONE: Final = b"[DONE]"
MAX_EVENT_BYTES: Final = 2**20  # an ordinary one has 300
MAX_STREAM_BYTES: Final = 64 * 2**20  # an answer of 100,000 tokens has 30 MB as events


class EventError(Exception):
    """What came is no stream of events, or more than is taken."""


class EventReader:
    """Bytes in any cut to the data of whole events, by the WHATWG's rules (lines end with LF, CR or CRLF).

    Only data lines matter here; comments, which keep a connection alive, and the other fields are passed over. Each
    byte is looked at once, so that the work is linear whatever the cuts.
    """

    __slots__ = ("_cr", "_data", "_line", "_line_bytes", "_n_bytes", "_n_data", "_start", "max_event", "max_total")

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES, max_stream_bytes: int = MAX_STREAM_BYTES) -> None:
        self.max_event, self.max_total = max_event_bytes, max_stream_bytes
        self._line: list[bytes] = []  # pieces of the line that is not whole yet
        self._line_bytes = 0
        self._data: list[bytes] = []  # of the event that is not whole yet
        self._n_data = 0
        self._n_bytes = 0
        self._cr = False  # the last byte was one, and a line feed that follows belongs to it
        self._start = True

    def feed(self, piece: bytes) -> list[bytes]:
        """Take the next bytes and give the data of the events they complete. Raises EventError at a limit."""
        self._n_bytes += len(piece)
        if self._n_bytes > self.max_total:
            raise EventError(f"more than {self.max_total} bytes")
        if self._cr and piece:
            self._cr = False
            piece = piece[1:] if piece[:1] == b"\n" else piece
        self._cr = piece[-1:] == b"\r" or (self._cr and not piece)
        events: list[bytes] = []
        # CRLF first, so that what is left of either kind is an end of its own.
        lines = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for part in lines[:-1]:
            self._hold(part)
            self._end_line(events)
        self._hold(lines[-1])
        return events

    def _hold(self, part: bytes) -> None:
        if part:
            self._line.append(part)
            self._line_bytes += len(part)
            if self._line_bytes > self.max_event:
                raise EventError(f"a line of more than {self.max_event} bytes")

    def _end_line(self, events: list[bytes]) -> None:
        line = b"".join(self._line)
        self._line.clear()
        self._line_bytes = 0
        if self._start:
            self._start = False
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
                self._n_data = 0
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            value = value.removeprefix(b" ")
            self._data.append(value)
            self._n_data += len(value) + 1
            if self._n_data > self.max_event:
                raise EventError(f"an event of more than {self.max_event} bytes")


_Tokens = Annotated[int, Meta(ge=0, le=10**9)]


class Details(msgspec.Struct):
    cached_tokens: _Tokens | None = None


class WireUsage(msgspec.Struct):
    prompt_tokens: _Tokens
    completion_tokens: _Tokens = 0
    prompt_tokens_details: Details | None = None


_MAX_CALLS: Final = 128


class Called(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class CallDelta(msgspec.Struct):
    """A piece of a tool call. Some servers send calls whole and leave out the index."""

    index: Annotated[int, Meta(ge=0, lt=_MAX_CALLS)] | None = None
    id: str | None = None
    function: Called | None = None


class Delta(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[tuple[CallDelta, ...], Meta(max_length=_MAX_CALLS)] | None = None


class Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    def said(self) -> str:
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.refusal or ""


class Event(msgspec.Struct):
    """One event of a chat or text completion, of which only what is used is read."""

    choices: tuple[Choice, ...] | None = None
    usage: WireUsage | None = None
    error: Any = None


_EVENTS: Final = msgspec.json.Decoder(Event)


def decode(data: bytes) -> Event:
    """Read one event's JSON. Raises EventError."""
    try:
        return _EVENTS.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:  # ValidationError among them
        raise EventError(f"an event that is no completion: {exc}") from exc
    except RecursionError as exc:
        raise EventError("an event that nests too deeply") from exc


def error_text(error: Any) -> str:
    """Find the words in an error object of any shape."""
    if isinstance(error, dict):
        error = error.get("message") or error.get("code") or error.get("type") or "without a message"
    return error if isinstance(error, str) else "without a message"
