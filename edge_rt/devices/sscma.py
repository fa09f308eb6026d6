"""Boards that look with a camera of their own and answer over a serial line: SSCMA firmware.

Seeed's Grove Vision AI V2 (Ethos-U55), XIAO ESP32-S3 Sense and their relatives run a model that is in their flash, on
what their camera sees. So they are no back end, which computes what it is given: they are asked what they see. Waiting
sleeps in the kernel until bytes come. Nothing on the line has a checksum, so a question is asked again where no answer
comes, and answers are checked as anything else that comes from outside.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from edge_rt.devices.sscma_results import Event, Sight, labels_of, sight
from edge_rt.devices.sscma_wire import BAUD, CODES, Reply, ReplyReader, SerialWire, Wire, crc16_maxim, request
from edge_rt.errors import DeviceError, DeviceRefusedError, DeviceSilentError, InvalidRequestError

ALGORITHMS: Final = {0: "undefined", 1: "FOMO", 2: "PFLD", 3: "YOLO", 4: "IMCLS"}
SENSORS: Final = {0: "undefined", 1: "camera"}

_log = logging.getLogger(__name__)

_ANSWER_S: Final = 2.0
_LOAD_S: Final = 10.0  # a model out of flash
_ATTEMPTS: Final = 3
_LONGEST_SLEEP_S: Final = 3600.0
_FOREVER: Final = -1
_Word = Annotated[str, Meta(max_length=200)]
_Small = Annotated[int, Meta(ge=0, le=65535)]


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model in the board's flash; ALGORITHMS names its algorithm."""

    id: _Small
    algorithm: _Small = msgspec.field(name="type", default=0)
    address: Annotated[int, Meta(ge=0, le=2**32)] = 0
    size: Annotated[int, Meta(ge=0, le=2**32)] = 0


class Sensor(msgspec.Struct, frozen=True, kw_only=True):
    """A camera; state 1 is registered, 2 available, 3 in use."""

    id: _Small
    kind: _Small = msgspec.field(name="type", default=0)
    state: _Small = 0


class _Version(msgspec.Struct, frozen=True):
    at_api: _Word = ""
    software: _Word = ""
    hardware: _Word = ""


class _State(msgspec.Struct, frozen=True):
    boot_count: Annotated[int, Meta(ge=0, le=2**32)] = 0
    is_ready: bool | Annotated[int, Meta(ge=0, le=1)] = 0


class _Stored(msgspec.Struct, frozen=True):
    crc16_maxim: _Small = 0
    info: Annotated[str, Meta(max_length=4095)] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who answers: the chip's number, the board's name, and the versions of protocol, firmware and chip.

    n_boots, is_ready  None where the firmware does not tell
    """

    id: str
    name: str
    at_api: str
    firmware: str
    hardware: str
    n_boots: int | None
    is_ready: bool | None


def connect(path: str, baud: int = BAUD) -> Sscma:
    """Open a port. Raises DeviceLostError; whether a board is behind it shows when it is asked."""
    return Sscma(SerialWire(path, baud))


class Sscma:
    """A board. One thread calls it; every method raises DeviceLostError, DeviceSilentError and DeviceRefusedError.

    labels  of the model's classes; by default what the board has stored beside it, asked for once
    """

    def __init__(
        self, wire: Wire, *, labels: tuple[str, ...] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wire, self._labels, self._clock = wire, labels, clock
        self._reader = ReplyReader()
        self._replies: deque[Reply] = deque()
        self._n_requests = 0

    def __enter__(self) -> Sscma:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._wire.close()

    def identify(self) -> Identity:
        """Ask who is there."""
        number = self._ask("ID", int | _Word)
        version = self._ask("VER", _Version)
        try:
            state: _State | None = self._ask("STAT", _State)
        except DeviceRefusedError:  # not all firmware has it
            state = None
        return Identity(
            id=str(number),
            name=_shown(self._ask("NAME", _Word)),
            at_api=_shown(version.at_api),
            firmware=_shown(version.software),
            hardware=_shown(version.hardware),
            n_boots=None if state is None else state.boot_count,
            is_ready=None if state is None else bool(state.is_ready),
        )

    def models(self) -> tuple[Model, ...]:
        """List the models in its flash."""
        return tuple(self._ask("MODELS", Annotated[list[Model], Meta(max_length=64)]))

    def model(self) -> Model:
        """Tell which model it runs."""
        running: Model = self._ask("MODEL", Model)
        return running

    def sensors(self) -> tuple[Sensor, ...]:
        """List its cameras."""
        return tuple(self._ask("SENSORS", Annotated[list[Sensor], Meta(max_length=16)]))

    def use_model(self, model_id: int) -> Model:
        """Let it run another of its models. Raises InvalidRequestError for one that it does not have."""
        if model_id not in (there := sorted(model.id for model in self.models())):
            had = ", ".join(map(str, there)) or "none"
            raise InvalidRequestError(param="model", problem=f"{model_id} is not on the board, which has {had}")
        self._labels = None
        self._command("MODEL", (model_id,), timeout_s=_LOAD_S)
        return self.model()

    def labels(self) -> tuple[str, ...]:
        """Give the names of the model's classes; () where the board has stored none."""
        if self._labels is None:
            stored = self._ask("INFO", _Stored, check=_check_stored)
            self._labels = labels_of(stored.info)
        return self._labels

    def _labels_if_any(self) -> tuple[str, ...]:
        """Give the labels, or none where the board has none to give: its classes then have numbers."""
        try:
            return self.labels()
        except DeviceRefusedError as exc:
            _log.warning("%s; its classes are told by number", exc)
            self._labels = ()
            return ()

    def invoke(
        self,
        n: int | None = 1,
        *,
        with_picture: bool = False,
        only_changes: bool = False,
        timeout_s: float = 10.0,
    ) -> Iterator[Sight]:
        """Look n times, None until the iterator is closed.

        with_picture  send the JPEG that was looked at too
        only_changes  be silent about results like the last one
        timeout_s     for each result; math.inf waits for as long as it takes

        Raises InvalidRequestError for a number that is not from 1 to 65535.
        """
        if n is not None and not 1 <= n <= 65535:
            raise InvalidRequestError(param="n", problem=f"is {n}, and must be from 1 to 65535")
        labels = self._labels_if_any()
        arguments = (_FOREVER if n is None else n, int(only_changes), int(not with_picture))
        tag = self._send("INVOKE", arguments)
        n_left = math.inf if n is None else n
        try:
            while n_left > 0:
                reply = self._next(tag, "INVOKE", timeout_s, any_kind=True)
                if reply.code:
                    n_left = 0
                    raise self._refused("INVOKE", reply)
                if reply.kind == 1:
                    n_left -= 1
                    yield self._sight(reply, labels)
        finally:
            if n_left > 0:
                self._break()

    def _sight(self, reply: Reply, labels: tuple[str, ...]) -> Sight:
        try:
            return sight(reply.payload(Event), labels, place=f"sscma:{self._wire.name}")
        except ValueError as exc:
            raise DeviceRefusedError(
                device=self._wire.name, request="INVOKE", reason=f"its result cannot be read: {exc}"
            ) from exc

    def _break(self) -> None:
        """Stop what runs on the board, if it can still be told."""
        try:
            self._next(self._send("BREAK"), "BREAK", _ANSWER_S)
        except DeviceError:
            return  # what made the caller leave is the news

    def _ask(self, name: str, shape: Any, *, check: Callable[[Any], str] = lambda _: "") -> Any:
        """Ask a question until its answer can be read; check says what is wrong with one."""
        failure: DeviceError | None = None
        for _ in range(_ATTEMPTS):
            try:
                reply = self._next(self._send(name, asks=True), name, _ANSWER_S)
                if reply.code:
                    failure = self._refused(f"{name}?", reply)
                    continue
                value: Any = reply.payload(shape)
                problem = check(value)
            except DeviceSilentError as exc:
                failure = exc
                continue
            except ValueError as exc:
                problem = str(exc)
            if not problem:
                return value
            failure = DeviceRefusedError(
                device=self._wire.name, request=f"{name}?", reason=f"its answer cannot be read: {problem}"
            )
        assert failure is not None
        raise failure

    def _command(self, name: str, arguments: tuple[int | str, ...], *, timeout_s: float) -> Reply:
        reply = self._next(self._send(name, arguments), name, timeout_s)
        if reply.code:
            raise self._refused(name, reply)
        return reply

    def _send(self, name: str, arguments: tuple[int | str, ...] = (), *, asks: bool = False) -> str:
        """Send a request; give its tag, by which its replies are known."""
        self._n_requests += 1
        tag = f"e{self._n_requests % 10**6}"
        self._wire.send(request(tag, name, arguments, asks=asks))
        return tag

    def _next(self, tag: str, name: str, timeout_s: float, *, any_kind: bool = False) -> Reply:
        """Wait for the answer to a request, or for anything that belongs to it. Others' are passed over."""
        deadline_s = self._clock() + timeout_s
        while True:
            while self._replies:
                reply = self._replies.popleft()
                if reply.is_of(tag, name) and (any_kind or reply.kind == 0):
                    return reply
                if reply.kind == 2 and reply.code and f"{tag}@{name}" in _text(reply):
                    return reply  # a command that it does not know is told of in the log only
            left_s = deadline_s - self._clock()
            if left_s <= 0:
                raise DeviceSilentError(
                    device=self._wire.name, request=name, waited_s=timeout_s, heard=_heard(self._reader)
                )
            self._replies += self._reader.feed(self._wire.receive(min(left_s, _LONGEST_SLEEP_S)))

    def _refused(self, name: str, reply: Reply) -> DeviceRefusedError:
        reason = CODES.get(reply.code, f"code {reply.code}")
        if said := _text(reply):
            reason += f" ({said})"
        return DeviceRefusedError(device=self._wire.name, request=name, reason=reason)


def _check_stored(stored: _Stored) -> str:
    crc = crc16_maxim(stored.info.encode())
    return "" if crc == stored.crc16_maxim else f"its checksum is {crc}, not {stored.crc16_maxim} as it says"


def _heard(reader: ReplyReader) -> str:
    if reader.n_broken:
        return f"{reader.n_broken} replies were broken: another speed, or a bad cable"
    if reader.noise:
        return f"it says {reader.noise!r}, which is no reply: another firmware or another speed"
    return "it says nothing: another port or speed, or no SSCMA firmware"


def _text(reply: Reply) -> str:
    try:
        return _shown(reply.payload(str))[:200]
    except ValueError:
        return ""


def _shown(text: str) -> str:
    return "".join(char for char in text if char.isprintable())
