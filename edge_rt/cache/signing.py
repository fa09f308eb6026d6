"""The local key that signs what the cache has stored: who can write the file but not read the key can forge nothing."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import stat
from pathlib import Path
from typing import Final

_log = logging.getLogger("edge_rt.cache")

_KEY_BYTES: Final = 32


class Signer:
    """Signs entries with one key, for one store."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def load(cls, path: Path) -> Signer:
        """Read the key in path, or make one there that only its owner reads. Raises OSError.

        A key that others can read or write, or that is too short, has not been secret: it is replaced, so that nothing
        it signed is believed.
        """
        try:
            secret, problem = _read(path)
        except FileNotFoundError:
            return cls(_make(path))
        if problem:
            _log.warning("%s: the cache's key %s; a new one is made, and what was stored is not used", path, problem)
            path.unlink()
            return cls(_make(path))
        return cls(secret)

    def sign(self, key: bytes, meta: bytes, value: bytes) -> bytes:
        """Give the MAC of an entry: it can be put under no other key, and its parts cannot be exchanged."""
        return hmac.digest(self._secret, b"%d:%d:" % (len(key), len(meta)) + key + meta + value, "sha256")

    def is_genuine(self, key: bytes, meta: bytes, value: bytes, mac: bytes) -> bool:
        return hmac.compare_digest(self.sign(key, meta, value), mac)


def _read(path: Path) -> tuple[bytes, str]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return b"", "is no regular file"
        if status.st_uid != os.geteuid():
            return b"", "belongs to another user"
        if stat.S_IMODE(status.st_mode) & 0o077:
            return b"", "could be read by others"
        secret = os.read(descriptor, _KEY_BYTES + 1)
        return secret, "" if len(secret) == _KEY_BYTES else "is damaged"
    finally:
        os.close(descriptor)


def _make(path: Path) -> bytes:
    """Write a new key, whole or not at all: a crash leaves no half of one."""
    secret = secrets.token_bytes(_KEY_BYTES)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, secret)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    try:
        os.link(draft, path)
    except FileExistsError:  # another process made one just now
        secret, problem = _read(path)
        if problem:
            raise OSError(f"the key {problem}") from None
    finally:
        draft.unlink(missing_ok=True)
    return secret
