"""The client for boards with SSCMA firmware: the parser by itself, then all of it on a stub at a pseudo terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.devices.sscma import Sscma
from edge_rt.devices.sscma_results import Event, labels_of, sight
from edge_rt.devices.sscma_wire import MAX_REPLY_BYTES, ReplyReader, SerialWire, crc16_maxim, request
from edge_rt.errors import DeviceLostError, DeviceRefusedError, DeviceSilentError, InvalidRequestError
from tests.sscma_board import BOOT, CARD, JPEG, LABELS, Board, Firmware, frame, stored

NAMES = st.from_regex(r"[A-Za-z0-9]{1,8}@[A-Z]{1,8}\??", fullmatch=True)
JSONS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
REPLIES = st.tuples(st.integers(0, 2), NAMES, JSONS, st.integers(0, 10))


class Line:
    """A wire with no board: what the test says comes at once, and otherwise only time passes."""

    name = "line"

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = list(pieces)
        self.sent: list[bytes] = []
        self.now_s = 0.0
        self.n_waits = 0

    def clock(self) -> float:
        return self.now_s

    def receive(self, timeout_s: float) -> bytes:
        self.n_waits += 1
        if self.pieces:
            return self.pieces.pop(0)
        self.now_s += timeout_s
        return b""

    def send(self, data: bytes) -> None:
        self.sent.append(data)

    def close(self) -> None:
        self.pieces = []


def on(line: Line, **kwargs: Any) -> Sscma:
    return Sscma(line, clock=line.clock, **kwargs)


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return (data[start:end] for start, end in pairwise(places))


@given(st.lists(REPLIES, max_size=6), st.lists(st.integers(0, 10**6), max_size=20), st.binary(max_size=30))
def test_replies_come_through_whole_however_they_are_cut(
    replies: list[tuple[int, str, Any, int]], cuts: list[int], noise: bytes
) -> None:
    quiet = noise.replace(b"\r", b"").replace(b"\n", b"").replace(b"{", b"")
    line = quiet + b"".join(frame(kind, name, data, code) + quiet for kind, name, data, code in replies)
    reader = ReplyReader()
    found = [reply for piece in pieces(line, cuts) for reply in reader.feed(piece)]
    assert [(reply.kind, reply.name, json.loads(bytes(reply.data)), reply.code) for reply in found] == replies
    assert reader.n_broken == 0


@given(st.binary(max_size=300), st.lists(st.integers(0, 10**6), max_size=5), REPLIES)
def test_after_any_noise_the_next_whole_reply_is_read(
    noise: bytes, cuts: list[int], reply: tuple[int, str, Any, int]
) -> None:
    reader = ReplyReader()
    for piece in pieces(noise, cuts):
        reader.feed(piece)
    kind, name, data, code = reply
    (*_, last) = reader.feed(b"\n" + frame(kind, name, data, code))
    assert (last.kind, last.name, last.code) == (kind, name, code)


@given(st.data())
def test_a_reply_with_lost_bytes_costs_no_other(data: st.DataObject) -> None:
    whole = frame(0, "a@ID?", "7e2d02cf")
    hurt = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 5))):
        del hurt[data.draw(st.integers(0, len(hurt) - 1))]
    reader = ReplyReader()
    found = reader.feed(whole + bytes(hurt) + whole)
    assert len(found) in (2, 3)  # with a byte less in a text the middle one may still be a reply
    assert found[0] == found[-1]
    assert found[0].payload(str) == "7e2d02cf"


def test_a_reply_without_end_is_dropped_at_the_limit() -> None:
    reader = ReplyReader()
    for _ in range(MAX_REPLY_BYTES // 2**16 + 2):
        assert reader.feed(b'\r{"type":0,"name":"' + b"x" * 2**16 if not reader.n_broken else b"x" * 2**16) == []
    assert reader.n_broken >= 1
    assert reader.feed(b"\n" + frame(0, "a@ID?", 1))[0].payload(int) == 1


@pytest.mark.parametrize(
    "line",
    [
        b"\r" + b'{"type":0,"name":"a@ID?","code":0,"data":' + b"[" * 5000 + b"]" * 5000 + b"}\n",
        b'\r{"type":3,"name":"a@ID?","code":0,"data":1}\n',
        b'\r{"type":0,"name":"a@ID?","data":1}\n',
        b'\r{"type":0,"name":"\xff","code":0,"data":1}\n',
        b'\r{"type":0,"name":"a@ID?","code":1e400,"data":1}\n',
        b'\r{"type":0,"name":"' + b"N" * 200 + b'","code":0,"data":1}\n',
        b"\r{xip enabled}\n",
    ],
)
def test_what_is_no_reply_is_counted(line: bytes) -> None:
    reader = ReplyReader()
    assert [reply for reply in reader.feed(line) if reply.name != "a@ID?" or reply.kind != 0] == []
    if not line.startswith(b'\r{"type":0,"name":"a@ID?","code":0'):
        assert reader.n_broken == 1


@pytest.mark.parametrize(
    ("text", "crc"), [("Hello World!", 43073), ("((max_score(target,0)>=80)&&led(1))||led(0)", 19753)]
)
def test_the_checksum_is_that_of_the_protocols_page(text: str, crc: int) -> None:
    assert crc16_maxim(text.encode()) == crc


def test_requests_are_written_as_the_protocol_says() -> None:
    assert request("10", "ID", asks=True) == b"AT+10@ID?\r"
    assert request("a", "INVOKE", (-1, 0, 1)) == b"AT+a@INVOKE=-1,0,1\r"
    assert request("a", "INFO", ('a "b" \\',)) == b'AT+a@INFO="a \\"b\\" \\\\"\r'


@pytest.mark.parametrize("text", ["a\rAT+RST", "é", "x" * 4096])
def test_a_request_that_would_be_another_is_not_sent(text: str) -> None:
    with pytest.raises(ValueError, match=r"printable|bytes|ascii"):
        request("a", "INFO", (text,))


def test_a_minute_without_a_result_wakes_nobody() -> None:
    line = Line()
    board = on(line, labels=())
    with pytest.raises(DeviceSilentError, match="within 60 s: it says nothing"):
        next(board.invoke(None, only_changes=True, timeout_s=60))
    assert line.now_s >= 60
    assert line.n_waits == 2  # the minute, and the answer to BREAK


def test_without_a_limit_an_hour_is_one_wait() -> None:
    class Patient(Line):
        def receive(self, timeout_s: float) -> bytes:
            if self.now_s > 86_400:
                raise DeviceLostError(device="line", reason="is not plugged in")
            return super().receive(timeout_s)

    line = Patient()
    with pytest.raises(DeviceLostError):
        next(on(line, labels=()).invoke(None, timeout_s=math.inf))
    assert line.n_waits == 25


def test_results_of_somebody_elses_request_are_passed_over() -> None:
    mine = frame(1, "e1@INVOKE", {"count": 1, "perf": [1, 2, 3], "boxes": []})
    line = Line(frame(1, "zz@INVOKE", {"count": 7}), frame(1, "e1@SAMPLE", {}), mine)
    assert next(on(line, labels=()).invoke(1)).count == 1


def test_firmware_that_drops_tags_is_understood() -> None:
    line = Line(frame(0, "INVOKE", {}), frame(1, "INVOKE", {"count": 3}))
    assert [each.count for each in on(line, labels=()).invoke(1)] == [3]


def test_a_request_that_a_lost_byte_spoiled_is_asked_again() -> None:
    line = Line(frame(2, "AT", "Unknown command: e1@D?", 5), frame(0, "e2@ID?", 657103005))
    with pytest.raises(DeviceSilentError):
        on(line).identify()
    assert line.sent[:2] == [b"AT+e1@ID?\r", b"AT+e2@ID?\r"]


def test_firmware_that_stores_no_labels_is_asked_what_it_sees_all_the_same() -> None:
    refused = [frame(2, "AT", f"Unknown command: e{n}@INFO?", 5) for n in (1, 2, 3)]
    line = Line(*refused, frame(1, "e4@INVOKE", {"classes": [[90, 1]]}))
    (label,) = next(on(line).invoke(1)).answer.labels
    assert (label.label, label.score) == ("1", 0.9)


def test_a_reply_that_ends_as_the_pages_break_does_is_read() -> None:
    (reply,) = ReplyReader().feed(b'\n{"type": 0, "name": "BREAK", "code": 0, "data": 1530898}\r\n')
    assert reply.payload(int) == 1530898


def test_silence_says_what_was_heard_instead() -> None:
    line = Line(b"CircuitPython 9.1.0 REPL >>> ")
    with pytest.raises(DeviceSilentError, match="CircuitPython"):
        on(line).model()
    line = Line(b"\r{\x00\x7f\n")
    with pytest.raises(DeviceSilentError, match="1 replies were broken"):
        on(line).model()


@pytest.mark.parametrize(
    "data",
    [
        {"boxes": [[1, 2, 3, 4, 101, 0]]},
        {"boxes": [[1, 2, 3, 4, 50]]},
        {"boxes": [[1e30, 2, 3, 4, 50, 0]]},
        {"boxes": [[1, 2, 3, 4, 50, 0]] * 1001},
        {"perf": [-1, 0, 0]},
        {"count": "many"},
        {"image": "no base64!"},
        {"image": "aGVsbG8="},
        "text",
    ],
)
def test_a_result_that_cannot_be_is_refused(data: Any) -> None:
    line = Line(frame(1, "e1@INVOKE", data))
    with pytest.raises(DeviceRefusedError, match="cannot be read"):
        next(on(line, labels=()).invoke(1))


def test_labels_come_from_what_is_stored_beside_the_model() -> None:
    assert labels_of(CARD) == tuple(LABELS)
    assert labels_of("Hello World!") == ()
    assert labels_of("e30=") == ()


def test_classes_and_points_are_answers_too() -> None:
    seen = sight(Event(perf=(8, 365, 1), classes=[(30, 1), (70, 0)]), ("cat",), place="p")
    assert [(label.label, label.score) for label in seen.answer.labels] == [("cat", 0.7), ("1", 0.3)]
    assert seen.answer.task == "classify"
    (point,) = sight(Event(points=[(10, 20, 50, 0)]), (), place="p").answer.boxes
    assert (point.x, point.y, point.width, point.label) == (10, 20, 0, "0")


@pytest.fixture
def firmware() -> Firmware:
    return Firmware()


@pytest.fixture
def plugged(firmware: Firmware) -> Iterator[tuple[Board, Sscma]]:
    with ExitStack() as stack:
        board = Board(firmware)
        stack.callback(board.unplug)
        yield board, stack.enter_context(Sscma(SerialWire(board.path)))


@pytest.mark.stub
def test_a_stub_board_tells_who_it_is_after_its_boot_messages(plugged: tuple[Board, Sscma]) -> None:
    identity = plugged[1].identify()
    assert (identity.id, identity.name, identity.firmware) == ("7e2d02cf", "Grove Vision AI (WE2)", "2023.10.10")
    assert identity.is_ready
    assert identity.n_boots == 1631
    assert BOOT.startswith(b"\r\n")  # the first reply comes behind it


@pytest.mark.stub
def test_a_stub_boards_models_and_cameras(plugged: tuple[Board, Sscma]) -> None:
    board = plugged[1]
    assert [(model.id, model.algorithm, model.size) for model in board.models()] == [(2, 3, 267024), (5, 3, 267024)]
    assert board.use_model(5).id == 5
    assert [(sensor.id, sensor.kind, sensor.state) for sensor in board.sensors()] == [(1, 1, 1)]
    with pytest.raises(InvalidRequestError, match="9 is not on the board, which has 2, 5"):
        board.use_model(9)


@pytest.mark.stub
def test_what_a_stub_board_sees_is_a_detection(plugged: tuple[Board, Sscma]) -> None:
    seen = list(plugged[1].invoke(2))
    (box,) = seen[0].answer.boxes
    assert (box.x, box.y, box.width, box.height) == (87 - 77 / 2, 83 - 65 / 2, 77, 65)  # theirs is the middle
    assert (box.label, box.score) == ("person", 0.7)
    assert (seen[1].preprocess_s, seen[1].infer_s, seen[1].postprocess_s) == (0.008, 0.365, 0.001)
    assert (seen[0].answer.width, seen[0].answer.height) == (240, 240)
    assert seen[0].jpeg == b""


@pytest.mark.stub
def test_a_stub_boards_picture_comes_when_asked_for(plugged: tuple[Board, Sscma]) -> None:
    assert next(plugged[1].invoke(1, with_picture=True)).jpeg == JPEG


@pytest.mark.stub
def test_a_watch_that_is_left_stops_the_stub_board(plugged: tuple[Board, Sscma], firmware: Firmware) -> None:
    watch = plugged[1].invoke(None)
    next(watch)
    watch.close()  # type: ignore[attr-defined]
    assert firmware.requests[-1].endswith("@BREAK")
    assert plugged[1].model().id == 2  # what still came of the watch is no answer to this


@pytest.mark.stub
def test_a_text_with_another_checksum_is_not_believed(plugged: tuple[Board, Sscma], firmware: Firmware) -> None:
    firmware.info = stored(CARD) | {"info": CARD.lower()}
    with pytest.raises(DeviceRefusedError, match="checksum"):
        plugged[1].labels()


@pytest.mark.stub
def test_a_command_that_the_stub_board_lacks_is_refused_at_once(firmware: Firmware) -> None:
    board = Board(firmware, lambda said: said.replace(b'"name": "e3@', b'"name": "e3x@'))
    try:
        with Sscma(SerialWire(board.path)) as client, pytest.raises(DeviceRefusedError, match="Unknown command"):
            client._command("FLY", (), timeout_s=60)
    finally:
        board.unplug()


@pytest.mark.stub
def test_a_stub_board_that_is_unplugged_is_lost(plugged: tuple[Board, Sscma]) -> None:
    board, client = plugged
    watch = client.invoke(None)
    for _ in range(3):
        next(watch)
    board.unplug()
    with pytest.raises(DeviceLostError):
        next(watch)


def test_a_port_that_is_not_there_is_lost() -> None:
    with pytest.raises(DeviceLostError, match="is not plugged in"):
        SerialWire("/dev/ttyNONE0")


@pytest.mark.stub
def test_bytes_that_get_lost_cost_time_and_no_answer(firmware: Firmware) -> None:
    """One reply in three loses bytes of its frame; every question is answered, for it is asked again."""
    n_said = 0

    def spoil(said: bytes) -> bytes:
        nonlocal n_said
        n_said += 1
        return said[:7] + said[9:] if n_said % 3 == 0 else said

    line = Scripted(firmware, spoil)
    board = on(line)
    for _ in range(50):
        assert board.model().id == 2
        assert board.labels() == tuple(LABELS)
    assert n_said > 60
    assert line.now_s < 60  # of the line's own clock: what was lost was waited for


class Scripted(Line):
    """The stub's firmware on a wire without a pseudo terminal."""

    def __init__(self, firmware: Firmware, spoil: Callable[[bytes], bytes]) -> None:
        super().__init__()
        self.firmware, self.spoil = firmware, spoil

    def send(self, data: bytes) -> None:
        super().send(data)
        self.pieces.append(self.spoil(self.firmware.answer(data.decode().rstrip("\r"))))
