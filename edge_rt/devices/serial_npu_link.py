"""The serial NPU's link: a stream of bytes each way over a line that loses and garbles some, as a pure state machine.

Bytes and the time go in, bytes of the stream and bytes for the line come out; nothing here waits or opens anything.
Times are whole microseconds and every number is an integer, so that hw/npu/serial/link.c decides the same, byte for
byte.

The stream is cut into segments that carry their offset in it. How long they are follows the line: two kilobytes where
nothing is lost, 48 bytes where one byte in a hundred is, since of longer frames too many would have two errors, and
only one is mended. What was lost is cut anew when it is sent again. A line keeps its order: when something is
acknowledged that was sent later, all that was sent before it and is not is lost, and is sent again at once. Only the
end of what there is to send needs a timer.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final, Literal

from edge_rt.devices.serial_npu_frames import (
    ACCEPT,
    CLOSE,
    MAX_RANGES,
    MAX_SHORT,
    NO_SESSION,
    RESET,
    VERSION,
    Ack,
    Control,
    Data,
    FrameReader,
    pack_ack,
    pack_control,
    pack_data,
    wire_bytes,
)
from edge_rt.devices.serial_npu_quality import MAX_SEGMENT, MIN_SEGMENT, LineQuality

State = Literal["closed", "opening", "open", "lost"]

WINDOW: Final = 24_576  # bytes on their way, at most; both ends must hold them
ACK_DELAY_US: Final = 5_000  # without another frame
ACK_LAST_US: Final = 100_000
ACK_AGAIN_US: Final = (10_000, 160_000)  # while something is missing and nothing comes
ACK_BYTES: Final = (512, 3072)  # that have come before an ACK goes out: where something is missing, and where not
FIRST_RTO_US: Final = (30_000, 200_000)
RTO_US: Final = (30_000, 2_000_000)
OPENING_US: Final = (100_000, 800_000)
MAX_TIMEOUTS: Final = 6  # in a row, without a word from the other end,
MAX_SILENT_US: Final = 3_000_000  # and for as long
_FIRST_WINDOW: Final = 4096  # on their way before anything was acknowledged
_MAX_IN_FLIGHT: Final = 2048  # segments, and
_MAX_GAPS: Final = 1024  # ranges behind what is missing: a device keeps tables of these sizes
_PROBES: Final = 4  # segments sent again after a timeout
_MAX_COPIES: Final = 4  # of one
_NO_SESSION_US: Final = 100_000


@dataclass(slots=True)
class _Segment:
    """Bytes on their way.

    order        how many frames went before it
    known_order  that of the oldest frame with these bytes that an ACK may mean
    """

    start: int
    end: int
    order: int
    known_order: int
    sent_us: int
    is_again: bool
    is_lost: bool = False


@dataclass(slots=True)
class LinkCounts:
    """What has gone over the line and what became of it."""

    sent_bytes: int = 0
    received_bytes: int = 0
    n_sent: int = 0
    n_sent_again: int = 0
    n_timeouts: int = 0


class Link:
    """One end of the line. The host calls open; the device's end waits for it (is_device)."""

    def __init__(self, *, is_device: bool = False, max_segment: int = MAX_SEGMENT, window: int = WINDOW) -> None:
        self.state: State = "closed"
        self.problem = ""
        self.counts = LinkCounts()
        self.n_sessions = 0
        self._is_device = is_device
        self._own = (max_segment, window)
        self._reader = FrameReader()
        self._control: list[bytes] = []
        self._said_no_session_us: int | None = None
        self._asked_us = self._opening_at_us = 0
        self._opening_wait_us = OPENING_US[0]
        self._begin(0, max_segment, window)

    def _begin(self, epoch: int, max_segment: int, window: int) -> None:
        self.quality = LineQuality(max_segment)
        self._epoch, self._window = epoch, window
        self._unsent = bytearray()
        self._kept = bytearray()  # sent and not acknowledged, from _una on
        self._una = 0
        self._allowed = min(_FIRST_WINDOW, window)
        self._in_flight: list[_Segment] = []
        self._order = self._acked_order = 0
        self._srtt_us, self._rttvar_us, self._rto_us = 0, 0, FIRST_RTO_US[1]
        self._progress_us = self._heard_us = 0
        self._n_timeouts = self._n_stalls = 0
        self._next = 0
        self._ranges: list[list[int]] = []
        self._early = bytearray(window)
        self._told_mended = 0  # by the other end, of what it has mended
        self._reader.n_mended = 0
        self._unacked_bytes = 0
        self._ack_at_us: int | None = None
        self._ack_last_us = 0
        self._ack_again_us = ACK_AGAIN_US[0]
        self._cursor = 0  # the range that the next ACK begins with

    def open(self, epoch: int, now_us: int) -> None:
        """Begin a session; epoch is a random number that is not 0. What was under way is forgotten."""
        self._begin(epoch, *self._own)
        self._control.clear()
        self._reader.epoch = None
        self.state, self.problem = "opening", ""
        self._opening_at_us, self._opening_wait_us = now_us, OPENING_US[0]

    def close(self) -> None:
        """Say that the session is over; transmit gives the last bytes."""
        if self.state == "open":
            self._control = [pack_control(Control(CLOSE, self._epoch))]
        self.state = "closed"

    @property
    def room(self) -> int:
        """How many bytes send may take without keeping more than a window waiting."""
        return max(0, self._window - len(self._unsent))

    @property
    def is_idle(self) -> bool:
        """Whether everything was sent and acknowledged."""
        return not self._unsent and not self._in_flight

    def send(self, data: bytes) -> None:
        self._unsent += data

    # What comes

    def receive(self, data: bytes, now_us: int) -> bytes:
        """Take what came from the line, b"" when time has passed; give what continues the stream."""
        self.counts.received_bytes += len(data)
        bad = self._reader.n_bad_bytes
        stream = bytearray()
        for frame in self._reader.feed(data, now_us):
            if isinstance(frame, Control):
                if frame.what == RESET and self._is_device and self._reset(frame, now_us):
                    stream.clear()  # of the session before
                elif frame.what == CLOSE and self._is_device and frame.epoch == self._epoch:
                    self.state = "closed"
                elif not self._is_device:
                    self._hear_control(frame, now_us)
            elif self.state == "open":
                self._n_timeouts, self._heard_us = 0, now_us
                if isinstance(frame, Ack):
                    self._hear_ack(frame, now_us)
                else:
                    stream += self._hear_data(frame, now_us)
            elif self._is_device:
                self.say_no_session(now_us)
        if self._is_device and self.state != "open" and self._reader.n_bad_bytes > bad:
            self.say_no_session(now_us)
        return bytes(stream)

    def say_no_session(self, now_us: int) -> None:
        """Tell the host that nothing is known of it here, at most ten times a second."""
        if self._said_no_session_us is None or now_us - self._said_no_session_us >= _NO_SESSION_US:
            self._said_no_session_us = now_us
            self._control = [pack_control(Control(NO_SESSION, 0, VERSION, *self._own))]

    def _reset(self, frame: Control, now_us: int) -> bool:
        is_new = self.state != "open" or frame.epoch != self._epoch
        if is_new:
            segment, window = min(frame.max_segment, self._own[0]), min(frame.window, self._own[1])
            if frame.epoch == 0 or segment < MIN_SEGMENT or window < segment:
                return False
            self._begin(frame.epoch, segment, window)
            self._reader.epoch = frame.epoch
            self.state = "open"
            self.n_sessions += 1
            self._progress_us = self._heard_us = now_us
        self._control = [pack_control(Control(ACCEPT, self._epoch, VERSION, self.quality.max_segment, self._window))]
        return is_new

    def _hear_control(self, frame: Control, now_us: int) -> None:
        if frame.what == ACCEPT and self.state == "opening" and frame.epoch == self._epoch:
            if frame.version != VERSION or frame.max_segment < MIN_SEGMENT or frame.window < frame.max_segment:
                self._lose(
                    f"it speaks version {frame.version} of the protocol, not {VERSION}: "
                    "put this edge_rt's firmware on it (hw/npu/serial)"
                )
                return
            self.quality.max_segment = min(frame.max_segment, self._own[0])
            self._window = min(frame.window, self._own[1])
            self._allowed = min(self._allowed, self._window)
            # RESET and ACCEPT are 26 bytes; how long a kilobyte takes shows only when one has gone.
            self._rto_us = min(max(64 * (now_us - self._asked_us), FIRST_RTO_US[0]), FIRST_RTO_US[1])
            self._reader.epoch = self._epoch
            self.state = "open"
            self.n_sessions += 1
            self._progress_us = self._heard_us = now_us
        elif frame.what == NO_SESSION and self.state == "open":
            self._lose("the device has started anew")

    def _lose(self, problem: str) -> None:
        self.state, self.problem = "lost", problem

    def _hear_data(self, frame: Data, now_us: int) -> bytes:
        start = self._next + ((frame.offset - self._next + 0x8000) & 0xFFFF) - 0x8000
        end = start + len(frame.payload)
        if end > self._next + self._window:
            return b""  # nobody who keeps to the window sends this
        if self._unacked_bytes == 0:
            self._ack_last_us = now_us + ACK_LAST_US
        self._ack_at_us = min(now_us + ACK_DELAY_US, self._ack_last_us)
        self._ack_again_us = ACK_AGAIN_US[0]
        self._unacked_bytes += wire_bytes(len(frame.payload))
        if end <= self._next:
            self._ack_at_us = now_us  # an ACK was lost
            return b""
        if start > self._next:
            if len(self._ranges) < _MAX_GAPS:
                self._keep_early(start, end, frame.payload)
            return b""
        stream = bytearray(frame.payload[self._next - start :])
        self._next = end
        while self._ranges and self._ranges[0][0] <= self._next:
            _, last = self._ranges.pop(0)
            if last > self._next:
                stream += self._early_bytes(self._next, last)
                self._next = last
        return bytes(stream)

    def _keep_early(self, start: int, end: int, payload: bytes) -> None:
        first = start % self._window
        n_before_wrap = min(len(payload), self._window - first)
        self._early[first : first + n_before_wrap] = payload[:n_before_wrap]
        self._early[: len(payload) - n_before_wrap] = payload[n_before_wrap:]
        at = bisect_left(self._ranges, start, key=lambda known: known[1])  # the first that touches it
        while at < len(self._ranges) and self._ranges[at][0] <= end:
            known = self._ranges.pop(at)
            start, end = min(start, known[0]), max(end, known[1])
        self._ranges.insert(at, [start, end])

    def _early_bytes(self, start: int, end: int) -> bytes:
        first, last = start % self._window, (end - 1) % self._window + 1
        return bytes(self._early[first:last] if first < last else self._early[first:] + self._early[:last])

    def _hear_ack(self, ack: Ack, now_us: int) -> None:
        n_known = (ack.next - self._una) & 0xFFFF
        if n_known > len(self._kept):
            return  # says again what an older one has said, or more than was sent
        upto = self._una + n_known
        ranges = [(upto + start, upto + end) for start, end in ack.ranges]
        told_from = ranges[0][0] if ack.is_tail and ranges else upto
        told_to = ranges[-1][1] if ranges else upto
        self.quality.mended((ack.n_mended - self._told_mended) & 0xFF)
        self._told_mended = ack.n_mended
        newest: _Segment | None = None
        left = []
        for segment in self._in_flight:
            if segment.end <= upto or any(a <= segment.start and segment.end <= b for a, b in ranges):
                self._acked_order = max(self._acked_order, segment.known_order)
                if not segment.is_lost:
                    self.quality.arrived(wire_bytes(segment.end - segment.start))
                if newest is None or segment.order > newest.order:
                    newest = segment
            else:
                left.append(segment)
        self._in_flight = left
        for segment in left:
            is_told = segment.start < upto or told_from <= segment.start < told_to
            if is_told and not segment.is_lost and segment.order < self._acked_order:
                segment.is_lost = True
                self.quality.lost(wire_bytes(segment.end - segment.start))
        del self._kept[:n_known]
        self._allowed = min(self._allowed + n_known, self._window)
        self._una = upto
        if newest is not None:
            self._progress_us, self._n_stalls = now_us, 0
            if not newest.is_again:  # others may have been told of late
                self._measure(now_us - newest.sent_us)
            self._set_rto()

    def _measure(self, rtt_us: int) -> None:
        if self._srtt_us == 0:
            self._srtt_us, self._rttvar_us = rtt_us, rtt_us // 2
        else:
            self._rttvar_us += (abs(rtt_us - self._srtt_us) - self._rttvar_us) // 4
            # A long one is as often an ACK that was lost as a line that has become slow.
            self._srtt_us += (rtt_us - self._srtt_us) // (8 if rtt_us > self._srtt_us else 2)

    def _set_rto(self) -> None:
        if self._srtt_us:
            self._rto_us = min(max(self._srtt_us + 4 * self._rttvar_us + ACK_DELAY_US, RTO_US[0]), RTO_US[1])

    # What goes

    def transmit(self, now_us: int, max_bytes: int) -> bytes:
        """Give whole frames for the line, until they are max_bytes or more, or there is nothing more to say."""
        out = bytearray()
        while self._control and len(out) < max_bytes:
            out += self._control.pop(0)
        if self.state == "opening":
            self._ask_to_open(out, now_us, max_bytes)
        elif self.state == "open":
            self._look_at_clock(now_us)
            self._put_ack(out, now_us, max_bytes)
            self._put_data(out, now_us, max_bytes)
        self.counts.sent_bytes += len(out)
        return bytes(out)

    def wake_at_us(self) -> int | None:
        """Give the time at which receive and transmit should be called though nothing came; None for never."""
        times = [self._reader.stale_at_us]
        if self.state == "opening":
            times.append(self._opening_at_us)
        elif self.state == "open":
            times.append(None if self._ack_at_us is None else self._ack_due_us())
            if self._in_flight:
                times.append(self._progress_us + self._rto_us)
        return min((at for at in times if at is not None), default=None)

    def _ask_to_open(self, out: bytearray, now_us: int, max_bytes: int) -> None:
        if now_us >= self._opening_at_us and len(out) < max_bytes:
            out += pack_control(Control(RESET, self._epoch, VERSION, *self._own))
            self._asked_us = now_us
            self._opening_at_us = now_us + self._opening_wait_us
            self._opening_wait_us = min(2 * self._opening_wait_us, OPENING_US[1])

    def _look_at_clock(self, now_us: int) -> None:
        waiting = [segment for segment in self._in_flight if not segment.is_lost]
        if not waiting or now_us - self._progress_us < self._rto_us:
            return
        self._n_timeouts += 1
        self.counts.n_timeouts += 1
        if self._n_timeouts > MAX_TIMEOUTS and now_us - self._heard_us > MAX_SILENT_US:
            self._lose(f"silent for {(now_us - self._heard_us) / 1e6:.1f} s")
            if self._is_device:
                self._said_no_session_us = None
                self.say_no_session(now_us)
            return
        for _ in range(self._n_stalls):  # the other end may be busy; but a long one must not be sent again for ever
            self.quality.lost(wire_bytes(waiting[0].end - waiting[0].start))
        self._n_stalls += 1
        for segment in waiting[:_PROBES]:
            segment.is_lost = True
            segment.known_order = min(segment.known_order, segment.order)
            segment.is_again = True
            segment.order = -1  # nobody knows whether it was lost
        self._progress_us = now_us
        if self._n_timeouts > 1:
            self._rto_us = min(2 * self._rto_us, RTO_US[1])

    def _ack_due_us(self) -> int:
        """Give when an ACK is due: later while a frame is coming in, which it can tell of too."""
        assert self._ack_at_us is not None
        return self._ack_last_us if self._reader.is_within_frame else self._ack_at_us

    def _put_ack(self, out: bytearray, now_us: int, max_bytes: int) -> None:
        if self._ack_at_us is None or self.state != "open" or len(out) >= max_bytes:
            return
        if now_us < self._ack_due_us() and self._unacked_bytes < ACK_BYTES[0 if self._ranges else 1]:
            return
        first = self._cursor if self._cursor < len(self._ranges) else 0
        chosen = self._ranges[first : first + MAX_RANGES]
        ranges = tuple((a - self._next, b - self._next) for a, b in chosen)
        out += pack_ack(Ack(self._next, ranges, first > 0, self._reader.n_mended), self._epoch)
        # The next one goes on with this one's last range, so that what lies between is told too.
        self._cursor = first + MAX_RANGES - 1 if first + MAX_RANGES < len(self._ranges) else 0
        self._unacked_bytes, self._ack_at_us = 0, None
        if self._ranges:
            self._ack_at_us = self._ack_last_us = now_us + self._ack_again_us
            self._ack_again_us = min(2 * self._ack_again_us, ACK_AGAIN_US[1])

    def _put_data(self, out: bytearray, now_us: int, max_bytes: int) -> None:
        if self.state != "open":
            return
        at = 0
        while at < len(self._in_flight):
            segment = self._in_flight[at]
            if segment.is_lost:
                size = self.quality.cut(segment.end - segment.start)
                is_cut = segment.start + size < segment.end
                if len(out) >= max_bytes or (is_cut and len(self._in_flight) == _MAX_IN_FLIGHT):
                    return
                guess = segment.order == -1
                for _ in range(self._n_copies(size) if guess else 1):
                    self._put(out, segment.start, size, now_us)
                again = _Segment(segment.start, segment.start + size, self._order, self._order, now_us, is_again=True)
                if guess:
                    again.known_order = segment.known_order
                self.counts.n_sent_again += 1
                if is_cut:
                    segment.start += size
                    self._in_flight.insert(at, again)
                else:
                    self._in_flight[at] = again
            at += 1
        while self._unsent and len(self._kept) < self._allowed and len(out) < max_bytes:
            if len(self._in_flight) == _MAX_IN_FLIGHT:
                break
            size = self.quality.cut(min(len(self._unsent), self._allowed - len(self._kept)))
            start = self._una + len(self._kept)
            payload = bytes(self._unsent[:size])
            self._kept += payload
            self._put(out, start, size, now_us)
            self._in_flight.append(_Segment(start, start + size, self._order, self._order, now_us, is_again=False))
            del self._unsent[:size]

    def _n_copies(self, size: int) -> int:
        """Give how often to send what timers call lost again and again: a bad line is idle meanwhile."""
        return 1 if size > MAX_SHORT else min(max(self._n_stalls, 1), _MAX_COPIES)

    def _put(self, out: bytearray, start: int, size: int, now_us: int) -> None:
        at = start - self._una
        out += pack_data(start, bytes(self._kept[at : at + size]), self._epoch)
        self._order += 1
        self._progress_us = now_us
        self.counts.n_sent += 1
