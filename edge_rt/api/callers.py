"""Who is asking: the peer of a Unix socket as the kernel names it, or the holder of an API key over TCP."""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_rt.errors import AuthError, ConfigError
from edge_rt.regular import read_regular

_UCRED = struct.Struct("3i")
_MAX_KEYS_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a Unix socket, by SO_PEERCRED when it connected."""

    pid: int
    uid: int
    gid: int

    @classmethod
    def of(cls, sock: socket.socket) -> Peer | None:
        """Ask the kernel; None for a socket that is not a Unix socket."""
        if sock.family != socket.AF_UNIX:
            return None
        return cls(*_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


class ApiKeys:
    """The keys that open the TCP port. Only their hashes are kept."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    @classmethod
    def load(cls, path: Path) -> ApiKeys:
        """Read one key a line; '#' begins a comment line. Raises ConfigError for a file without keys."""
        try:
            lines = read_regular(path, _MAX_KEYS_BYTES).decode("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as exc:
            problem = exc.strerror if isinstance(exc, OSError) else str(exc)
            raise ConfigError(
                key="server.api_keys_file", problem=f"cannot be read: {problem}", origin=str(path)
            ) from exc
        keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
        if not keys:
            raise ConfigError(key="server.api_keys_file", problem="holds no key", origin=str(path))
        return cls(keys)

    def tenant(self, authorization: bytes) -> str:
        """Check an Authorization header and name its key's tenant. Raises AuthError.

        Every key is compared, and in constant time, so that the time taken tells nothing.
        """
        scheme, _, key = authorization.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        if not found or scheme.lower() != b"bearer":
            raise AuthError
        return f"key:{digest.hex()[:8]}"


def tenant(peer: Peer | None, keys: ApiKeys | None, headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Name the quota key of a request. Raises AuthError for a caller that neither the kernel nor a key vouches for."""
    if peer is not None:
        return f"uid:{peer.uid}"
    if keys is None:
        raise AuthError
    authorization = next((value for name, value in headers if name == b"authorization"), b"")
    if not authorization:  # Anthropic's clients send theirs otherwise
        authorization = b"Bearer " + next((value for name, value in headers if name == b"x-api-key"), b"")
    return keys.tenant(authorization)
