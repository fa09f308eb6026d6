"""A serial NPU as its host sees it: what it can, a model, runs. Waits in one thread, with a deadline on everything.

What the line does to single bytes is the link's business. A session that ends all the same (the device has started
anew, an error that passed every check) is begun again once by itself, with the same model. A port that is gone is not.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from edge_rt.devices.serial_npu_frames import VERSION
from edge_rt.devices.serial_npu_link import Link, LinkCounts
from edge_rt.devices.serial_npu_messages import (
    BAD_MODEL,
    CANCEL,
    CANCELLED,
    ECHO,
    HELLO,
    INPUT,
    MODEL_BEGIN,
    MODEL_DATA,
    MODEL_END,
    OK,
    OUTPUT,
    OVERHEAD,
    REPLY,
    RUN,
    STATUS,
    DeviceFacts,
    Message,
    MessageReader,
    SerialNpuError,
    SerialNpuRefusalError,
    pack_message,
    printable,
    read_facts,
)

OPEN_S: Final = 3.0  # until a device on the port has answered
_T = TypeVar("_T")
STEP_S: Final = 0.05  # a wait at most, for a port that cannot be waited for

_AHEAD_S: Final = 0.02  # handed to a port before the line is free: a busy machine may not come back sooner
_MAX_WRITE: Final = 4096
# Without a word from a device that has something to answer, until it is asked whether it is there.
_QUIET_S: Final = 1.0
_ECHO_AHEAD: Final = 12_288  # bytes to be echoed: the device ends a session that has more than a window to be answered
_SESSION_BYTES: Final = 2**30  # after which another begins: a device counts a session's bytes in 32 bits


class Wire(Protocol):
    """A port that bytes go through. Errors are OSError."""

    def read(self, timeout_s: float) -> bytes:
        """Wait for bytes, for so long at most; give those that are there."""
        ...

    def room(self) -> int:
        """How many bytes write takes now without keeping them from the line for long."""
        ...

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class SerialWire:
    """A serial port by pyserial.

    is_paced  bytes are handed over as fast as the line takes them; None: unless it is a pseudo terminal, with none
    """

    def __init__(
        self,
        port: str,
        baud: int,
        *,
        is_paced: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        import serial  # of the extra power; who has no serial NPU need not have it

        self._port: Any = serial.Serial(port, baud, timeout=0, write_timeout=STEP_S, exclusive=True)
        self._byte_s = 10.0 / baud if (not is_pseudo_terminal(port) if is_paced is None else is_paced) else 0.0
        self._clock, self._free_s = clock, 0.0
        self._unwritten = bytearray()

    def read(self, timeout_s: float) -> bytes:
        if timeout_s > 0:
            select.select([self._port.fileno()], [], [], timeout_s)
        data: bytes = self._port.read(65_536)
        return data

    def room(self) -> int:
        if self._unwritten:
            self._flush()
        if self._unwritten:
            return 0
        if self._byte_s == 0:
            return _MAX_WRITE if select.select([], [self._port.fileno()], [], 0)[1] else 0
        return min(_MAX_WRITE, max(0, int((self._clock() + _AHEAD_S - self._free_s) / self._byte_s)))

    def write(self, data: bytes) -> None:
        self._free_s = max(self._free_s, self._clock()) + len(data) * self._byte_s
        self._unwritten += data
        self._flush()

    def _flush(self) -> None:
        """Write what the port takes now; the rest waits, and room says that there is none."""
        with contextlib.suppress(BlockingIOError):
            del self._unwritten[: os.write(self._port.fileno(), self._unwritten)]

    def close(self) -> None:
        self._port.close()


def is_pseudo_terminal(port: str) -> bool:
    """Say whether a port is no serial line: what answers there is a program, whatever it says of itself."""
    return os.path.realpath(port).startswith("/dev/pts/")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimes:
    """Where a run's time went, on the host's clock; compute_s on the device's."""

    upload_s: float
    compute_s: float
    download_s: float


class SerialNpu:
    """A device on an open wire. Not for several threads; cancel may come from another.

    max_chunk  bytes of a tensor or model in one message, beside the device's own limit
    """

    def __init__(self, wire: Wire, *, clock: Callable[[], float] = time.monotonic, max_chunk: int = 65_536) -> None:
        self._wire, self._clock, self._max_chunk = wire, clock, max_chunk
        self._link = Link()
        self._messages = MessageReader()
        self._waiting: list[Message] = []
        self._next_id = 0
        self._model: bytes | None = None
        self._facts: DeviceFacts | None = None
        self._is_cancelled = False
        self._ask_at_s = float("inf")  # when to ask whether it is still there

    @property
    def facts(self) -> DeviceFacts:
        assert self._facts is not None, "open comes first"
        return self._facts

    @property
    def _chunk(self) -> int:
        return min(self.facts.max_chunk, self._max_chunk)

    @property
    def counts(self) -> LinkCounts:
        return self._link.counts

    def open(self, timeout_s: float = OPEN_S) -> DeviceFacts:
        """Begin a session and ask the device what it can. Raises SerialNpuError, also where nothing answers in time."""
        deadline_s = self._clock() + timeout_s
        self._link.open(int.from_bytes(os.urandom(4), "little") | 1, self._now_us())
        self._messages, self._waiting, self._ask_at_s = MessageReader(), [], float("inf")
        self._until(lambda: self._link.state == "open", deadline_s, "no device answers there")
        reply = self._ask(HELLO, bytes([VERSION, VERSION]), deadline_s)
        self._facts = read_facts(reply.body)
        self._ask_at_s = self._clock() + _QUIET_S
        return self._facts

    def load(self, model: bytes, timeout_s: float) -> None:
        """Give the device a model's file, unless it has it. Raises SerialNpuError or SerialNpuRefusalError."""
        self._model = None
        self._retried(lambda deadline_s: self._load(model, deadline_s), timeout_s)
        self._model = model

    def run(
        self, inputs: Sequence[bytes], output_bytes: Sequence[int], timeout_s: float
    ) -> tuple[list[bytes], RunTimes]:
        """Compute once. Raises SerialNpuError or SerialNpuRefusalError; CANCELLED is a refusal."""
        self._is_cancelled = False
        return self._retried(lambda deadline_s: self._run(inputs, output_bytes, deadline_s), timeout_s)

    def cancel(self) -> None:
        """End the run that is under way; it raises SerialNpuRefusalError. From any thread."""
        self._is_cancelled = True

    def echo(self, data: bytes, timeout_s: float) -> bytes:
        """Let the device send data back."""
        return self.echo_all([data], timeout_s)[0]

    def echo_all(self, parts: Sequence[bytes], timeout_s: float) -> list[bytes]:
        """Let the device send each part back, several on their way at a time."""
        deadline_s = self._clock() + timeout_s
        said: list[tuple[int, int]] = []
        answers: list[bytes] = []
        for part in parts:
            said.append((self._say(ECHO, part, deadline_s), len(part)))
            while sum(n_bytes for _, n_bytes in said[len(answers) :]) > _ECHO_AHEAD:
                answers.append(self._wait_for(ECHO, said[len(answers)][0], deadline_s))
        while len(answers) < len(said):
            answers.append(self._wait_for(ECHO, said[len(answers)][0], deadline_s))
        return answers

    def close(self) -> None:
        """Take leave and close the wire; legal after any failure."""
        try:
            self._link.close()
            if data := self._link.transmit(self._now_us(), 64):
                self._wire.write(data)
        except OSError:
            pass  # it is gone already
        finally:
            self._wire.close()

    def _now_us(self) -> int:
        return int(self._clock() * 1e6)

    def _retried(self, work: Callable[[float], _T], timeout_s: float) -> _T:
        deadline_s = self._clock() + timeout_s
        counts = self._link.counts
        try:
            if self._link.state != "open" or counts.sent_bytes + counts.received_bytes > _SESSION_BYTES:
                self._begin_again(deadline_s)
            return work(deadline_s)
        except SerialNpuError as exc:
            if self._clock() >= deadline_s or isinstance(exc.__cause__, OSError):
                raise
        self._begin_again(deadline_s)
        return work(deadline_s)

    def _begin_again(self, deadline_s: float) -> None:
        self._link.counts.sent_bytes = self._link.counts.received_bytes = 0
        self.open(min(OPEN_S, deadline_s - self._clock()))
        if self._model is not None:
            self._load(self._model, deadline_s)

    def _load(self, model: bytes, deadline_s: float) -> None:
        for may_be_unsound in (True, False):
            n_kept = self._upload(model, deadline_s)
            try:
                self._ask(MODEL_END, b"", deadline_s)
                return
            except SerialNpuRefusalError as exc:
                if exc.status != BAD_MODEL or n_kept == 0 or not may_be_unsound:
                    raise  # else the device has forgotten what it had kept

    def _upload(self, model: bytes, deadline_s: float) -> int:
        """Send what the device has not got of a model; give how many bytes it had."""
        digest = hashlib.sha256(model).digest()
        begun = self._ask(MODEL_BEGIN, digest + struct.pack("<I", len(model)), deadline_s)
        n_kept = int.from_bytes(begun.body, "little")
        if len(begun.body) != 4 or n_kept > len(model):
            raise SerialNpuError(f"it has {n_kept} bytes of a model of {len(model)}")
        for start in range(n_kept, len(model), self._chunk):
            self._say(MODEL_DATA, struct.pack("<I", start) + model[start : start + self._chunk], deadline_s)
        return n_kept

    def _run(
        self, inputs: Sequence[bytes], output_bytes: Sequence[int], deadline_s: float
    ) -> tuple[list[bytes], RunTimes]:
        began_s = self._clock()
        for index, data in enumerate(inputs):
            for start in range(0, len(data), self._chunk):
                chunk = data[start : start + self._chunk]
                self._say(INPUT, struct.pack("<B3xI", index, start) + chunk, deadline_s)
        self._until(lambda: self._link.is_idle, deadline_s, "it does not take the inputs")
        uploaded_s = self._clock()
        ran = self._ask_to_run(deadline_s)
        if len(ran.body) != 8:
            raise SerialNpuError("an answer to a run has another length")
        compute_s = int.from_bytes(ran.body, "little") / 1e6
        ran_s = self._clock()
        outputs = [self._output(index, n_bytes, ran.id, deadline_s) for index, n_bytes in enumerate(output_bytes)]
        times = RunTimes(upload_s=uploaded_s - began_s, compute_s=compute_s, download_s=max(0.0, self._clock() - ran_s))
        return outputs, times

    def _ask_to_run(self, deadline_s: float) -> Message:
        run_id = self._say(RUN, b"", deadline_s)
        has_asked = False
        while (ran := self._take(RUN, run_id)) is None:
            if self._is_cancelled and not has_asked:
                has_asked = True
                self._say(CANCEL, struct.pack("<H", run_id), deadline_s)
            self._step(deadline_s, "the run takes too long")
        if has_asked and ran.status == OK:
            raise SerialNpuError("cancelled when it was over")  # its outputs come: only a new session forgets them
        return ran

    def _output(self, index: int, n_bytes: int, run_id: int, deadline_s: float) -> bytes:
        output = bytearray()
        while len(output) < n_bytes:
            while (message := self._take(OUTPUT, run_id)) is None:
                self._step(deadline_s, "its outputs do not come")
            if message.body[:8] != struct.pack("<B3xI", index, len(output)) or len(message.body) == 8:
                raise SerialNpuError("its outputs come in another order")
            output += message.body[8:]
        if len(output) != n_bytes:
            raise SerialNpuError(f"output {index} has {len(output)} bytes, not {n_bytes}")
        return bytes(output)

    def _say(self, op: int, body: bytes, deadline_s: float) -> int:
        self._next_id = (self._next_id + 1) & 0xFFFF
        n_bytes = len(body) + OVERHEAD
        self._until(lambda: self._link.room >= n_bytes, deadline_s, "it takes nothing more")
        self._link.send(pack_message(op, self._next_id, body))
        return self._next_id

    def _wait_for(self, op: int, message_id: int, deadline_s: float) -> bytes:
        while (reply := self._take(op, message_id)) is None:
            self._step(deadline_s, "it does not answer")
        return reply.body

    def _ask(self, op: int, body: bytes, deadline_s: float) -> Message:
        message_id = self._say(op, body, deadline_s)
        while (reply := self._take(op, message_id)) is None:
            self._step(deadline_s, "it does not answer")
        return reply

    def _take(self, op: int, message_id: int) -> Message | None:
        """Give an answer if it has come. Raises SerialNpuRefusalError where it, or what was said before, is refused."""
        for at, message in enumerate(self._waiting):
            if message.status != OK:
                del self._waiting[at]
                reason = printable(message.body[:200])
                raise SerialNpuRefusalError(message.status, "" if message.status == CANCELLED else reason)
            if (message.op, message.id) == (op | REPLY, message_id):
                del self._waiting[at]
                return message
        return None

    def _until(self, holds: Callable[[], bool], deadline_s: float, problem: str) -> None:
        while not holds():
            self._step(deadline_s, problem)

    def _step(self, deadline_s: float, problem: str) -> None:
        """Move what can move, and wait for what comes next."""
        now_s = self._clock()
        if now_s >= deadline_s:
            self._link.close()  # what was said may still come through, and be answered: only another session forgets it
            raise SerialNpuError(problem)
        if now_s >= self._ask_at_s and self._link.is_idle:
            # The answer is of no interest; where none comes the link is lost in seconds, and not with the deadline.
            self._link.send(pack_message(STATUS, 0))
            self._ask_at_s = now_s + _QUIET_S
        try:
            room = self._wire.room()
            data = self._link.transmit(self._now_us(), room) if room > 0 else b""
            if data:
                self._wire.write(data)
            wait_s = min(STEP_S, deadline_s - now_s)
            if (wake_us := self._link.wake_at_us()) is not None:
                wait_s = min(wait_s, max(0.0, wake_us / 1e6 - self._clock()))
            if data or room <= 0:
                wait_s = min(wait_s, 0.001)  # there may be more to write
            stream = self._link.receive(self._wire.read(wait_s), self._now_us())
        except OSError as exc:  # pyserial's SerialException is one
            raise SerialNpuError(f"the port is gone: {exc}"[:200]) from exc
        if stream and self._ask_at_s < float("inf"):
            self._ask_at_s = self._clock() + _QUIET_S
        self._waiting += [message for message in self._messages.feed(stream) if message.op != STATUS | REPLY]
        if len(self._waiting) > 4096:
            raise SerialNpuError("it answers what nobody has asked")
        if self._link.state == "lost":
            raise SerialNpuError(self._link.problem)
