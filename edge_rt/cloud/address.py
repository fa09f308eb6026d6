"""Which addresses an endpoint's name may lead to, judged on the address that is really connected to.

A name is resolved once, each address is judged, and the connection is made to a judged address and not to the name, so
that a name server cannot answer the check with one address and the connection with another.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any, Final

import httpcore2

from edge_rt.regular import read_regular

Address = IPv4Address | IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
_SocketOption = tuple[int, int, int] | tuple[int, int, bytes | bytearray] | tuple[int, int, None, int]

_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_NAT64_LOCAL: Final = ipaddress.IPv6Network("64:ff9b:1::/48")
_MIN_TRY_S: Final = 0.25
_MAX_CA_BYTES: Final = 8 * 2**20
_MAX_LOOKUPS: Final = 8  # at a time


class RefusedAddressError(httpcore2.ConnectError):
    """Every address of the name is one that may not be asked."""


def problem(address: Address, *, allow_private: bool) -> str:
    """Say why this address may not be connected to, "" if it may.

    Addresses that carry an IPv4 address (mapped, 6to4, Teredo, NAT64) are judged by that one too.
    """
    if address.is_multicast or address.is_unspecified or str(address) == "255.255.255.255":
        return f"{address} is no address of a server"
    if allow_private:
        return ""
    carried = _carried(address)
    for one in (address, *carried):
        if one.is_loopback:
            return f"{address} is this machine itself"
        if one.is_link_local:
            return f"{address} is a link-local address"
        # The carriers are special ranges themselves; what they carry decides.
        if not one.is_global and not (one is address and carried):
            return f"{address} is of a private or reserved range"
    return ""


def _carried(address: Address) -> tuple[Address, ...]:
    if isinstance(address, IPv4Address):
        return ()
    found: list[Address | None] = [address.ipv4_mapped, address.sixtofour]
    if address.teredo is not None:
        found.extend(address.teredo)
    if address in _NAT64 or address in _NAT64_LOCAL:
        found.append(IPv4Address(int(address) & 0xFFFFFFFF))
    return tuple(one for one in found if one is not None)


_lookups = threading.BoundedSemaphore(_MAX_LOOKUPS)


async def resolve(host: str, port: int) -> Sequence[str]:
    """Ask the system's resolver for a host's addresses, in its order of preference. Raises OSError.

    Each lookup has a thread of its own, that ends with the process: the loop's few threads, which others need, would
    hang with a name server that does not answer, and so would the end of the process.
    """
    if not _lookups.acquire(blocking=False):
        raise OSError(f"{_MAX_LOOKUPS} lookups wait for the name server")
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Sequence[str]] = loop.create_future()

    def settle(addresses: Sequence[str], error: OSError | UnicodeError | None) -> None:
        if not found.done():  # nobody waits any more
            found.set_exception(error) if error is not None else found.set_result(addresses)

    def look_up() -> None:
        addresses: Sequence[str] = ()
        error: OSError | UnicodeError | None = None
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            addresses = tuple(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in infos))
        except (OSError, UnicodeError) as exc:
            error = exc
        finally:
            _lookups.release()
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(settle, addresses, error)

    threading.Thread(target=look_up, name=f"look up {host}", daemon=True).start()
    return await found


class GuardedNetwork(httpcore2.AsyncNetworkBackend):
    """Connects to judged addresses only. `name` is the setting that would allow private ones."""

    def __init__(self, *, allow_private: bool, setting: str, resolve: Resolve = resolve) -> None:
        self._allow_private, self._setting, self._resolve = allow_private, setting, resolve
        self._inner = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's interface
        local_address: str | None = None,
        socket_options: Iterable[_SocketOption] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        due_at_s = None if timeout is None else time.monotonic() + timeout
        allowed = await self._judged(host, port, timeout)
        for n_left, address in zip(range(len(allowed), 0, -1), allowed, strict=True):
            left_s = None if due_at_s is None else max((due_at_s - time.monotonic()) / n_left, _MIN_TRY_S)
            try:
                return await self._inner.connect_tcp(
                    address, port, timeout=left_s, local_address=local_address, socket_options=socket_options
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                if n_left == 1:
                    raise
        raise httpcore2.ConnectError(f"{host} has no address")

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's interface
        socket_options: Iterable[_SocketOption] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        return await self._inner.connect_unix_socket(path, timeout=timeout, socket_options=socket_options)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _judged(self, host: str, port: int, timeout_s: float | None) -> list[str]:
        """Give the host's addresses that may be connected to, at least one."""
        found: Sequence[str]
        try:
            found = (str(ipaddress.ip_address(host.strip("[]"))),)
        except ValueError:
            try:
                found = await asyncio.wait_for(self._resolve(host, port), timeout_s)
            except TimeoutError as exc:
                raise httpcore2.ConnectTimeout(f"{host}: the name server did not answer") from exc
            except (OSError, UnicodeError) as exc:
                raise httpcore2.ConnectError(f"{host}: {getattr(exc, 'strerror', None) or exc}") from exc
        # A zone ("%eth0") belongs to link-local addresses, which are judged without it.
        problems = {
            one: problem(ipaddress.ip_address(one.partition("%")[0]), allow_private=self._allow_private)
            for one in found
        }
        allowed = [one for one, why in problems.items() if not why]
        if not allowed and problems:
            first = next(iter(problems.values()))
            raise RefusedAddressError(f"{first}, which {self._setting} would have to allow")
        return allowed


def tls_context(ca_file: str) -> ssl.SSLContext:
    """Make a context that verifies the server's certificate and name. Raises OSError or ssl.SSLError for a bad file."""
    if not ca_file:
        context = ssl.create_default_context()
    else:
        # Read here: OpenSSL would wait for a pipe. Comments between certificates may be in any encoding.
        certificates = read_regular(Path(ca_file), _MAX_CA_BYTES).decode("ascii", "ignore")
        if "-----BEGIN CERTIFICATE" not in certificates:  # the system's would be taken
            raise ssl.SSLError("it holds no certificate in PEM form")
        context = ssl.create_default_context(cadata=certificates)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def reason(error: BaseException) -> str:
    """Say in the system's words why a connection failed, where it has some."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted: {cause.verify_message}"
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    text: Any = str(error)
    return text or type(error).__name__
