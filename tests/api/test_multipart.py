from __future__ import annotations

import httpx2
import pytest

from edge_rt.api.multipart import MAX_HEADER_BYTES, MAX_PARTS, media_type, parse
from edge_rt.errors import InvalidRequestError

HEAD = b'Content-Disposition: form-data; name="%b"\r\n\r\n'


def body(*parts: bytes, end: bytes = b"--b--\r\n") -> bytes:
    return b"".join(b"--b\r\n" + part + b"\r\n" for part in parts) + end


def field(name: bytes, value: bytes) -> bytes:
    return HEAD % name + value


def test_what_a_client_sends_is_read() -> None:
    """httpx2 writes it, so that writer and reader are not of one mind."""
    picture = bytes(range(256)) * 50 + b"\r\n--\r\n--b"
    request = httpx2.Request(
        "POST",
        "http://x/",
        data={"model": "m", "text": "größer"},
        files={"file": ('a"; name="b.png', picture, "image/png")},
    )
    kind, parameters = media_type(request.headers["content-type"])
    assert kind == "multipart/form-data"
    parts = parse(request.read(), parameters["boundary"])
    assert [(p.name, p.is_file, p.content_type) for p in parts] == [
        ("model", False, ""),
        ("text", False, ""),
        ("file", True, "image/png"),
    ]
    assert [parts[0].text(), parts[1].text()] == ["m", "größer"]
    assert bytes(parts[2].data) == picture


def test_empty_parts_and_no_parts() -> None:
    (part,) = parse(body(field(b"a", b"")), "b")
    assert (part.name, bytes(part.data)) == ("a", b"")
    assert parse(b"--b--\r\n", "b") == []


def test_header_names_and_values_in_any_case() -> None:
    (part,) = parse(body(b"CONTENT-disposition: Form-Data; NAME=a; filename=x\r\n\r\n1"), "b")
    assert (part.name, part.is_file, bytes(part.data)) == ("a", True, b"1")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "does not begin with its boundary"),
        (b"preamble\r\n" + body(), "does not begin with its boundary"),
        (b"--bx\r\n", "not followed by a line break"),
        (b"--b\r\n" + field(b"a", b"1"), "the body is cut"),
        (b"--b\r\n" + field(b"a", b"1") + b"\r\n--b", "not followed by a line break"),
        (body(field(b"a", b"1")) + b"more", "something follows"),
        (body(*[field(b"a", b"1")] * (MAX_PARTS + 1)), "more than 16 parts"),
        (body(b"X: " + b"x" * MAX_HEADER_BYTES + b"\r\n\r\n1"), "headers do not end within 4096 bytes"),
        (body(b"Content-Disposition: form-data\r\n\r\n1"), "form-data with a name"),
        (body(b"Content-Type: text/plain\r\n\r\n1"), "form-data with a name"),
        (body(b'Content-Disposition: attachment; name="a"\r\n\r\n1'), "form-data with a name"),
        (body(b'Content-Disposition: form-data; name="a\r\n\r\n1'), "a header cannot be read"),
        (body(b'Content-Disposition: form-data; name="a"; name="b"\r\n\r\n1'), "a header cannot be read"),
        (body(b"nonsense\r\n" + field(b"a", b"1")), "a header that cannot be read"),
        (body(b"A: 1\r\nA: 2\r\n" + field(b"a", b"1")), "a header that cannot be read"),
        (body(b"Content-Transfer-Encoding: base64\r\n" + field(b"a", b"MQ==")), "Content-Transfer-Encoding"),
    ],
)
def test_malformed_body_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        parse(data, "b")


@pytest.mark.parametrize("boundary", ["", "x" * 71, "a\r\nb", "ends with space ", "ä"])
def test_bad_boundary_is_refused(boundary: str) -> None:
    with pytest.raises(InvalidRequestError, match="the boundary in Content-Type"):
        parse(body(), boundary)


def test_value_that_is_no_text_is_refused() -> None:
    (part,) = parse(body(field(b"a", b"\xff")), "b")
    with pytest.raises(InvalidRequestError, match="a: is not UTF-8"):
        part.text()
