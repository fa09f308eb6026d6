"""What goes wrong with a kernel file: the errno's name, what it means here, and whether trying again makes sense."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Literal

# gone: the device is not there (now). denied: not for this process, ever. refused: not this value. busy: not now.
# broken: the device or what stands behind it does not work.
Kind = Literal["gone", "denied", "refused", "busy", "broken"]

_MEANING: dict[int, tuple[Kind, str]] = {
    errno.ENOENT: ("gone", "no such file: the device was unplugged, or this kernel has none"),
    errno.ENODEV: ("gone", "the device is gone"),
    errno.ENXIO: ("gone", "the device is gone"),
    errno.ENOTDIR: ("gone", "no such file"),
    errno.EACCES: ("denied", "read-only, or not for this user"),
    errno.EPERM: ("denied", "not permitted: a capability is missing, or the firmware locks it"),
    errno.EROFS: ("denied", "mounted read-only: ReadWritePaths does not name it"),
    errno.EINVAL: ("refused", "the driver takes no such value"),
    errno.ERANGE: ("refused", "out of range"),
    errno.ENOTSUP: ("refused", "the driver does not support it"),
    errno.EBUSY: ("busy", "the driver takes it not now: its CPUs are offline, or the governor forbids it"),
    errno.EAGAIN: ("busy", "not now"),
    errno.ENOTCONN: ("broken", "the file system behind it has ended"),
    errno.EIO: ("broken", "the device answers with an error"),
    errno.ENODATA: ("broken", "the device has no value"),
    errno.ETIMEDOUT: ("broken", "the device does not answer"),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One failed access. doing: read, write, or read back."""

    path: str
    doing: str
    code: str
    kind: Kind
    meaning: str

    def __str__(self) -> str:
        return f"/{self.path}: {self.doing}: {self.code}, {self.meaning}"


def fault(exc: OSError, path: str, doing: str) -> Fault:
    """Explain an OSError; one that is not in the table is broken, with the system's own words."""
    number = exc.errno or 0
    code = errno.errorcode.get(number, f"errno {number}")
    kind, meaning = _MEANING.get(number, ("broken", exc.strerror or type(exc).__name__))
    return Fault(path, doing, code, kind, meaning)
