"""Keys of cloud endpoints: read from files only their owner may read, shown nowhere.

What keeps a key secret, and what does not: it never enters a configuration value, a log line, an exception or a repr,
and hide_memory keeps it out of core dumps and away from debuggers of the same user. Who can read this process' memory
as root can read the key, and so can any code inside this process; Python cannot wipe a string from memory either.
"""

from __future__ import annotations

import ctypes
import hmac
import logging
import os
import re
import resource
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from edge_rt.errors import ConfigError
from edge_rt.regular import open_regular

_log = logging.getLogger(__name__)

_PREFIX: Final = "credential:"
_MAX_KEY_BYTES: Final = 8192
_MIN_ECHO: Final = 8  # characters of a key in a row that count as a part of it, in an answer that repeats it
_ASCII_UPPER: Final = re.compile("[A-Z]+")
_MASKS: Final = re.compile(r"\*{3}(?:\*+|\.{2,}|…)+")
_PR_SET_DUMPABLE: Final = 4

_Stamp = tuple[int, int, int, int]


class Key:
    """A secret string that shows itself only to `authorization`."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def authorization(self) -> bytes:
        return b"Bearer " + self._text.encode("ascii")

    def is_same(self, other: Key | None) -> bool:
        return other is not None and hmac.compare_digest(self._text, other._text)  # noqa: SLF001  another of this class

    def censored(self, text: str) -> str:
        """Take the key, and long parts of it, out of a text that a server sent, in whatever case and amid whatever."""
        key, lowered = self._text.lower(), _ASCII_UPPER.sub(lambda found: found[0].lower(), text)
        n_chars = min(len(key), _MIN_ECHO)
        parts = {key[at : at + n_chars] for at in range(len(key) - n_chars + 1)}
        shown, end = [], 0  # end of what is shown or cut out
        for at in range(len(text) - n_chars + 1):
            if lowered[at : at + n_chars] in parts:
                if at >= end:
                    shown += [text[end:at], "***"]
                end = at + n_chars
        return _MASKS.sub("***", "".join(shown) + text[end:])

    def __repr__(self) -> str:
        return "Key(***)"

    __str__ = __repr__

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a key is not written anywhere")


class KeyFile:
    """The key that a setting names, read again when its file has changed. Raises ConfigError, as load_key does.

    A file that cannot be read later on, or does not hold a key, changes nothing: the last key stays, with a warning.
    """

    def __init__(
        self,
        setting: str,
        value: str,
        environ: Mapping[str, str] = os.environ,
        *,
        status: Callable[[Path], os.stat_result] = os.stat,
    ) -> None:
        self._setting, self._value, self._environ, self._status = setting, value, environ, status
        self._stamp = self._look()  # before the file is read: a change in between is found the next time
        self._key = load_key(setting, value, environ)

    @property
    def key(self) -> Key | None:
        """The last key that was read."""
        return self._key

    def current(self) -> Key | None:
        """Give the key, after a look at whether its file is another one now."""
        stamp = self._look()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                key = load_key(self._setting, self._value, self._environ)
            except ConfigError as exc:
                _log.warning("the key that was read before stays in use: %s", exc)
            else:
                if key is not None and not key.is_same(self._key):
                    _log.info("%s: another key was read", self._setting)
                    self._key = key
        return self._key

    def doubt(self) -> None:
        """Read the file again the next time, whatever its times say: the key was refused."""
        self._stamp = None

    def _look(self) -> _Stamp | None:
        if not self._value:
            return None
        try:
            found = self._status(_path(self._setting, self._value, self._environ))
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def is_credential(value: str) -> bool:
    """Tell whether a setting names a credential of systemd's, not a file."""
    return value.startswith(_PREFIX)


def load_key(setting: str, value: str, environ: Mapping[str, str] = os.environ) -> Key | None:
    """Read the key that a setting (its dotted name and value) names; None where the value is "".

    credential:NAME is a file of that name in $CREDENTIALS_DIRECTORY, which systemd makes. Raises ConfigError, that
    never shows what the file holds, for one that others may read or write, and for one that does not hold one key.
    """
    if not value:
        return None
    path = _path(setting, value, environ)
    try:
        with open_regular(path) as file:
            mode = os.fstat(file.fileno())
            if not is_credential(value):  # systemd's directory is guarded as a whole
                _check_mode(setting, path, mode)
            raw = file.read(_MAX_KEY_BYTES + 1)
    except OSError as exc:
        raise ConfigError(key=setting, problem=f"cannot be read: {exc.strerror}", origin=str(path)) from exc
    key = raw.strip()
    if not key or len(raw) > _MAX_KEY_BYTES or not re.fullmatch(rb"[\x21-\x7e]+", key):
        problem = f"must hold one key: a line of visible ASCII characters, {_MAX_KEY_BYTES} bytes at most"
        raise ConfigError(key=setting, problem=problem, origin=str(path))
    return Key(key.decode("ascii"))


def _path(setting: str, value: str, environ: Mapping[str, str]) -> Path:
    if not is_credential(value):
        return Path(value)
    name = value.removeprefix(_PREFIX)
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name) or name in (".", ".."):
        raise ConfigError(key=setting, problem=f"{name!r} is no name of a credential", origin="configuration")
    directory = environ.get("CREDENTIALS_DIRECTORY")
    if not directory:
        problem = f"needs the credential {name!r}: start by systemd with LoadCredential={name}:FILE"
        raise ConfigError(key=setting, problem=problem, origin="CREDENTIALS_DIRECTORY is not set")
    return Path(directory, name)


def _check_mode(setting: str, path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(key=setting, problem=f"belongs to another user (uid {status.st_uid})", origin=str(path))
    if mode & 0o027:
        problem = f"has mode {mode:04o}: others may read or change it. chmod 600 it and replace the key"
        raise ConfigError(key=setting, problem=problem, origin=str(path))
    if mode & 0o040:
        _log.warning("%s has mode %04o: its group may read a key; 0600 is enough", path, mode)


def hide_memory() -> None:
    """Keep this process' memory, which holds a key, out of core dumps.

    PR_SET_DUMPABLE also keeps other processes of this user from reading it through ptrace and /proc. RLIMIT_CORE alone
    would not do: the kernel ignores it where cores go to a program, as to systemd-coredump. Both leave worker
    processes alone as far as dumps go, which begin anew with exec.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        _log.warning("the kernel does not let core dumps be switched off: %s", os.strerror(ctypes.get_errno()))
