"""TextStream: the joined pieces are the unary answer, and each piece is as long as it may be."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.engine.text import TextStream
from edge_rt.errors import InvalidRequestError


def run(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(pieces.__getitem__, stop)
    return [stream.push(i) for i in range(len(pieces))], stream


def unary(data: bytes, stop: tuple[str, ...]) -> str:
    """The answer made in one go: decode it all, cut at the stop string that is complete first."""
    text = data.decode("utf-8", "replace")
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    return text[: min(ends)[1]] if ends else text


def longest_beginning(text: str, stop: tuple[str, ...]) -> int:
    return max((n for s in stop for n in range(len(s)) if text.endswith(s[:n])), default=0)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"Hel", b"lo"], ["Hel", "lo"]),
        ([b"\xf0\x9f", b"\x98\x80!"], ["", "😀!"]),
        ([b"\xc3", b"\xa9", b"\xe2\x82", b"\xac"], ["", "é", "", "€"]),
        ([b"a\xe2\x82", b"b"], ["a", "\ufffdb"]),
        ([b"\xff", b"x"], ["\ufffd", "x"]),
        ([b"", b"x", b""], ["", "x", ""]),
    ],
)
def test_characters_are_never_split(pieces: list[bytes], expected: list[str]) -> None:
    assert run(pieces)[0] == expected


def test_bytes_left_at_the_end_become_a_replacement_character() -> None:
    sent, stream = run([b"ok\xf0\x9f\x98"])
    assert sent == ["ok"]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_encoded_surrogates_do_not_come_out() -> None:
    sent, stream = run([b"\xed\xa0", b"\x80\xed\xb0\x80"])
    assert "".join(sent) + stream.flush() == b"\xed\xa0\x80\xed\xb0\x80".decode("utf-8", "replace")
    assert all(char < "\ud800" or char > "\udfff" for char in "".join(sent))


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        pytest.param([b"one", b"\n\n", b"two"], ("\n\n",), ["one", "", ""], id="one token"),
        pytest.param([b"one\n", b"\ntwo"], ("\n\n",), ["one", ""], id="across a border"),
        pytest.param([b"one\n", b"two"], ("\n\n",), ["one", "\ntwo"], id="only its beginning"),
        pytest.param([b"a", b"a", b"a", b"b", b"c"], ("aab",), ["", "", "a", "", ""], id="overlapping beginnings"),
        pytest.param([b"ab", b"ab", b"ab", b"c"], ("ababc",), ["", "", "ab", ""], id="a beginning inside another"),
        pytest.param([b"xEND", b"y"], ("END", "STOP"), ["x", ""], id="text after it is dropped"),
        pytest.param([b"ab", b"c", b"d"], ("abcd", "bc"), ["", "a", ""], id="the one that is complete first"),
        pytest.param([b"abcd"], ("abcd", "bc"), ["a"], id="the same in one token"),
        pytest.param([b"xabc"], ("bc", "abc"), ["x"], id="the longest of those complete together"),
        pytest.param([b"x\xe2\x82", b"\xac"], ("€",), ["x", ""], id="a character over two tokens"),
        pytest.param([b"x\xff"], ("\ufffd",), ["x"], id="a replacement character"),
        pytest.param([b"END"], ("END",), [""], id="nothing before it"),
    ],
)
def test_a_stop_string_ends_the_answer(pieces: list[bytes], stop: tuple[str, ...], expected: list[str]) -> None:
    assert run(pieces, stop)[0] == expected


def test_stopped_tells_and_nothing_comes_after() -> None:
    sent, stream = run([b"a", b"END", b"b"], ("x", "END"))
    assert stream.stopped
    assert stream.stopped_by == "END"
    assert sent == ["a", "", ""]
    assert stream.flush() == ""


def test_held_text_comes_out_at_the_end() -> None:
    sent, stream = run([b"1 <", b"|"], ("<|end|>",))
    assert sent == ["1 ", ""]
    assert stream.flush() == "<|"
    assert not stream.stopped


def test_a_stop_string_that_the_last_bytes_complete_is_cut_by_flush() -> None:
    _, stream = run([b"a-\xc3"], ("-\ufffd",))
    assert stream.flush() == ""
    assert stream.stopped


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="stop: holds an empty string"):
        TextStream(lambda _: b"", ("a", ""))


_TEXT = st.text(alphabet="ab€😀", max_size=12)
_PIECES = st.lists(st.one_of(_TEXT.map(str.encode), st.binary(max_size=3), st.sampled_from([b"\xe2", b"\x82"])))
_STOP = st.lists(st.text(alphabet="ab€😀\ufffd", min_size=1, max_size=5), max_size=5).map(tuple)


@given(pieces=_PIECES, stop=_STOP)
def test_joined_pieces_are_the_unary_answer(pieces: list[bytes], stop: tuple[str, ...]) -> None:
    sent, stream = run(pieces, stop)
    joined = "".join(sent) + stream.flush()
    assert joined == unary(b"".join(pieces), stop)
    assert stream.stopped == any(s in b"".join(pieces).decode("utf-8", "replace") for s in stop)
    assert joined == joined.encode().decode()


@given(data=_TEXT, cuts=st.lists(st.integers(0, 40)), stop=_STOP)
def test_token_borders_make_no_difference(data: str, cuts: list[int], stop: tuple[str, ...]) -> None:
    raw = data.encode()
    places = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    pieces = [raw[a:b] for a, b in pairwise(places)]
    sent, stream = run(pieces, stop)
    whole, whole_stream = run([raw], stop)
    assert "".join(sent) + stream.flush() == "".join(whole) + whole_stream.flush()


@given(pieces=st.lists(_TEXT.map(str.encode)), stop=_STOP)
def test_no_more_is_held_than_may_begin_a_stop_string(pieces: list[bytes], stop: tuple[str, ...]) -> None:
    stream = TextStream(pieces.__getitem__, stop)
    sent = ""
    for i in range(len(pieces)):
        sent += stream.push(i)
        if stream.stopped:
            break
        text = b"".join(pieces[: i + 1]).decode()
        assert sent == text[: len(text) - longest_beginning(text, stop)]
