"""multipart/form-data (RFC 7578), as strict as can be: a body that is whole in memory, few parts, short headers.

The usual parsers spool files to disk; here the body has been read within its limits, and a part is a view of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from edge_rt.errors import InvalidRequestError

MAX_PARTS: Final = 16
MAX_HEADER_BYTES: Final = 4096
_BOUNDARY: Final = re.compile(r"""[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]""")
_PARAMETER: Final = re.compile(r"""\s*;\s*([A-Za-z0-9*_-]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^\s;"]+)""")


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    is_file: bool
    content_type: str
    data: memoryview

    def text(self) -> str:
        """Give the value of a field that is no file. Raises InvalidRequestError."""
        try:
            return str(self.data, "utf-8")
        except UnicodeDecodeError as exc:
            raise InvalidRequestError(param=self.name, problem="is not UTF-8") from exc


def media_type(header: str) -> tuple[str, dict[str, str]]:
    """Split a header such as Content-Type into its value, in lower case, and its parameters.

    Raises InvalidRequestError for one that cannot be read.
    """
    value, _, _ = header.partition(";")
    at, parameters = len(value), {}
    while at < len(header.rstrip()):
        match = _PARAMETER.match(header, at)
        if match is None or match[1].lower() in parameters:
            raise InvalidRequestError(param="", problem=f"a header cannot be read: {header[:100]!r}")
        quoted = match[2]
        if quoted.startswith('"'):
            quoted = re.sub(r"\\(.)", r"\1", quoted[1:-1])
        parameters[match[1].lower()] = quoted
        at = match.end()
    return value.strip().lower(), parameters


def parse(body: bytes, boundary: str) -> list[Part]:
    """Split a body into its parts. Raises InvalidRequestError for anything that is not well-formed."""
    if not _BOUNDARY.fullmatch(boundary):
        raise _bad("the boundary in Content-Type is missing or not of the characters that it may have")
    mark = b"--" + boundary.encode()
    if not body.startswith(mark):
        raise _bad("the body does not begin with its boundary")
    parts: list[Part] = []
    view, at = memoryview(body), len(mark)
    while body[at : at + 2] != b"--":
        if body[at : at + 2] != b"\r\n":
            raise _bad("a boundary is not followed by a line break")
        if len(parts) == MAX_PARTS:
            raise _bad(f"it has more than {MAX_PARTS} parts")
        # Where there are no headers, which nobody sends, this finds none either.
        head_end = body.find(b"\r\n\r\n", at, at + MAX_HEADER_BYTES)
        if head_end < 0:
            raise _bad(f"a part's headers do not end within {MAX_HEADER_BYTES} bytes")
        end = body.find(b"\r\n" + mark, head_end + 2)
        if end < 0:
            raise _bad("its last boundary is missing: the body is cut")
        parts.append(_part(body[at + 2 : head_end], view[head_end + 4 : end] if end > head_end + 2 else view[:0]))
        at = end + 2 + len(mark)
    if body[at + 2 :].strip(b"\r\n \t"):
        raise _bad("something follows the last boundary")
    return parts


def _part(head: bytes, data: memoryview) -> Part:
    headers: dict[str, str] = {}
    for line in head.split(b"\r\n"):
        name, colon, value = line.partition(b":")
        key = name.decode("latin-1").strip().lower()
        if not colon or not key or key in headers:
            raise _bad("a part has a header that cannot be read")
        headers[key] = value.decode("utf-8", "replace").strip()
    kind, parameters = media_type(headers.get("content-disposition", ""))
    if kind != "form-data" or "name" not in parameters:
        raise _bad("a part has no Content-Disposition: form-data with a name")
    if headers.get("content-transfer-encoding", "binary").lower() not in {"binary", "7bit", "8bit"}:
        raise _bad("a part has a Content-Transfer-Encoding; send it as it is")
    is_file = "filename" in parameters or "filename*" in parameters
    return Part(parameters["name"], is_file, media_type(headers.get("content-type", ""))[0], data)


def _bad(problem: str) -> InvalidRequestError:
    return InvalidRequestError(param="", problem=f"multipart/form-data is malformed: {problem}")
