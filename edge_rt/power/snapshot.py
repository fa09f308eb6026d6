"""The machine's own limits, as they were before powerd's first write: one file, and the way back to them.

Imports next to nothing: what gives the machine back must run where everything else is broken, and where Python has no
more than Debian's python3-minimal.

The file is written before the first write to any limit, and says what each limit was then. The first value wins: a
later one may be powerd's own. It ends when every value in it has been put back and read back. It lies in /run, which a
reboot empties; a boot id tells one from another that survived. A line in it is

    KIND TAB VALUE…

boot, value (path, value, witness) and, last, end (number of values). The witness is the driver's or device's name: a
driver that was loaded anew has limits of its own already.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from edge_rt.devices.kernel_files import DryFiles, KernelFiles

DEFAULT_FILE = "/run/edge_rt-powerd/snapshot"

_HEAD = "edge_rt power snapshot 1"
_MAX_BYTES = 256 * 1024
_MAX_VALUES = 2048
_MAX_TEXT = 64
_N_ROUNDS = 3  # of putting back what does not take at once: a governor that is being changed, a bus that is busy
_PAUSE_S = 0.03
_CPUFREQ = "sys/devices/system/cpu/cpufreq"
_COOLING = "sys/class/thermal"
_ENOENT, _ENOTDIR = 2, 20
_NAME = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.:@-")
_CPU_LEAVES = ("scaling_max_freq", "scaling_min_freq", "energy_performance_preference")
_DEVFREQ_LEAVES = ("max_freq", "min_freq")

Files = KernelFiles | DryFiles


class BadSnapshotError(Exception):
    """The file exists and cannot be trusted or read."""


class Value:
    """What one file held. witness: what the driver or device called itself."""

    __slots__ = ("path", "text", "witness")

    def __init__(self, path: str, text: str, witness: str) -> None:
        self.path, self.text, self.witness = path, text, witness

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __repr__(self) -> str:
        return f"Value({self.path!r}, {self.text!r}, {self.witness!r})"

    def __str__(self) -> str:
        return f"value\t{self.path}\t{self.text}\t{self.witness}"


class Restored:
    """What became of one value.

    outcome  as_it_was · put_back · limited: the kernel itself holds it lower now · gone: no such device any more ·
             replaced: another driver is there · failed: it is not back, for the reason
    """

    __slots__ = ("outcome", "reason", "value")

    def __init__(self, value: Value, outcome: str, reason: str = "") -> None:
        self.value, self.outcome, self.reason = value, outcome, reason

    @property
    def is_done(self) -> bool:
        return self.outcome != "failed"

    def __repr__(self) -> str:
        return f"Restored({self.value.path!r}, {self.outcome!r}, {self.reason!r})"


class Snapshot:
    """The values kept in one file. Belongs to one thread; nobody else may write there."""

    __slots__ = ("_boot", "_written", "file", "values")

    def __init__(self, file: str, boot: str) -> None:
        self.file = file
        self.values: dict[str, Value] = {}
        self._boot = boot
        self._written: tuple[int, int, int] | None = None  # by which the file of the last write is known

    def load(self, *, keep: bool = False) -> bool:
        """Read what an earlier process has left; False for nothing, or for what another boot left.

        The latter is removed, unless keep only looks. Raises BadSnapshotError.
        """
        text = _read(self.file)
        if text is None:
            return False
        boot, values = parse(text)
        if boot != self._boot:
            if not keep:
                self.remove()
            return False
        self.values = {value.path: value for value in values}
        self._written = self._mark()
        return True

    def add(self, values: list[Value]) -> None:
        """Keep values of files that have none yet; they are on disk when this returns. Raises OSError."""
        new = {value.path: value for value in values if value.path not in self.values}
        if new:
            self._write({**self.values, **new})
            self.values.update(new)

    def drop(self, paths: list[str]) -> None:
        """Forget values that are back in force, and the file with the last one. Raises OSError."""
        left = {path: value for path, value in self.values.items() if path not in paths}
        if left == self.values:
            return
        if left:
            self._write(left)
        else:
            self.remove()
        self.values = left

    def write_again(self) -> None:
        """Have the values on disk once more where somebody has removed or changed the file. Raises OSError."""
        if self.values and self._written is not None and self._mark() != self._written:
            self._write(self.values)

    def remove(self) -> None:
        self._written = None
        try:
            os.unlink(self.file)
        except FileNotFoundError:
            return
        _sync_folder(self.file)

    def _write(self, values: dict[str, Value]) -> None:
        if len(values) > _MAX_VALUES:
            raise OSError(7, f"more than {_MAX_VALUES} values", self.file)
        lines = [_HEAD, f"boot\t{self._boot}", *map(str, values.values()), f"end\t{len(values)}", ""]
        raw = "\n".join(lines).encode("ascii")
        fresh = self.file + ".new"
        folder = os.path.dirname(self.file)
        if folder:
            os.makedirs(folder, mode=0o755, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)  # of a process that was killed while writing
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(fresh, flags, 0o600)
        try:
            while raw:
                raw = raw[os.write(fd, raw) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(fresh, self.file)
        self._written = self._mark()
        _sync_folder(self.file)

    def _mark(self) -> tuple[int, int, int] | None:
        try:
            found = os.lstat(self.file)
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns


def boot_id(files: Files) -> str:
    """Give the kernel's id of this boot; unknown where it has none, which equals only itself."""
    try:
        text = files.read("proc/sys/kernel/random/boot_id")
    except OSError:
        return "unknown"
    return text if _is_plain(text) else "unknown"


def parse(text: str) -> tuple[str, list[Value]]:
    """Read a snapshot's text: the boot's id and the values. Raises BadSnapshotError for anything unexpected."""
    lines = text.split("\n")
    if len(lines) < 4 or lines[0] != _HEAD or lines[-1] != "":
        raise BadSnapshotError("is no snapshot of this version, or is cut off")
    kind, _, boot = lines[1].partition("\t")
    if kind != "boot" or not _is_plain(boot):
        raise BadSnapshotError("names no boot")
    values = []
    for line in lines[2:-2]:
        parts = line.split("\t")
        if len(parts) != 4 or parts[0] != "value":
            raise BadSnapshotError(f"has a line that is no value: {line[:80]!r}")
        value = Value(*parts[1:])
        problem = "" if is_ours(value.path) else "is no file that powerd writes"
        problem = problem or ("" if _is_plain(value.text) else "has no plain value")
        problem = problem or ("" if _is_witness(value.witness) else "has no plain name of a driver")
        if problem:
            raise BadSnapshotError(f"{value.path[:120]!r} {problem}")
        values.append(value)
    if len({value.path for value in values}) != len(values) or lines[-2] != f"end\t{len(values)}":
        raise BadSnapshotError("is cut off, or names a file twice")
    return boot, values


def is_ours(path: str) -> bool:
    """Say whether a path is a limit that powerd writes: whoever could write the snapshot writes nothing else."""
    parts = path.split("/")
    if any(not part or part[0] == "." or not _NAME.issuperset(part) for part in parts):
        return False
    folder, name, leaf = "/".join(parts[:-2]), parts[-2] if len(parts) > 1 else "", parts[-1]
    if folder == _CPUFREQ:
        return name[:6] == "policy" and _is_number(name[6:]) and leaf in _CPU_LEAVES
    if folder == "sys/class/devfreq":
        return leaf in _DEVFREQ_LEAVES
    if folder == "sys/class/powercap":
        head, tail = "constraint_", "_power_limit_uw"
        is_limit = leaf[: len(head)] == head and leaf[-len(tail) :] == tail
        return is_limit and _is_number(leaf[len(head) : -len(tail)])
    return False


def witness_path(path: str) -> str:
    """Name the file beside a limit that says whose it is."""
    folder = path.rpartition("/")[0]
    return f"{folder}/scaling_driver" if folder.startswith(_CPUFREQ) else f"{folder}/name"


def take(files: Files, path: str) -> Value:
    """Read what a limit is now. Raises OSError, also for a value that could not be written back."""
    if not is_ours(path):
        raise OSError(1, "is no limit that powerd writes", path)
    text = files.read(path)
    if not _is_plain(text):
        raise OSError(5, f"holds no plain value: {text[:40]!r}", path)
    return Value(path, text, _witness(files, path))


def is_held_down(files: Files) -> bool:
    """Say whether the kernel's thermal framework holds a clock down now.

    What a limit's file says then is the lower of the user's and the kernel's, and the user's cannot be told from it.
    """
    try:
        names = files.names(_COOLING)
    except OSError:
        return False
    for name in names:
        if name.startswith("cooling_device"):
            try:
                kind = files.read(f"{_COOLING}/{name}/type").lower()
                if ("freq" in kind or kind == "processor") and int(files.read(f"{_COOLING}/{name}/cur_state")) > 0:
                    return True
            except (OSError, ValueError):
                continue
    return False


def put_back(files: Files, values: list[Value], sleep: Callable[[float], None] | None = None) -> list[Restored]:
    """Write every value back and read it back: upper limits, then lower ones, then the rest.

    In that order a limit is never below the other one for long; where the driver insists on it, the next round has the
    other one right. sleep(seconds) is called between rounds; without it there is one more round at once.
    """
    order = sorted(values, key=_rank)
    done: dict[str, Restored] = {}
    for round_ in range(_N_ROUNDS):
        for value in order:
            found = done.get(value.path)
            if found is None or not found.is_done:
                done[value.path] = _put_back(files, value)
        # A lower limit that is raised may have moved an upper one that was right before.
        for value in order:
            if done[value.path].outcome in {"as_it_was", "put_back"} and not _is_in_force(files, value):
                done[value.path] = _put_back(files, value)
        if all(found.is_done for found in done.values()):
            break
        if sleep is not None and round_ < _N_ROUNDS - 1:
            sleep(_PAUSE_S)
    return [done[value.path] for value in values]


def _put_back(files: Files, value: Value) -> Restored:
    try:
        if _witness(files, value.path) != value.witness:
            return Restored(value, "replaced", "another driver serves it, with its own limits")
        was = files.read(value.path)
        # cpufreq brings a limit into force a moment after it took it. So one that reads as it should may have another
        # one on its way, and is written all the same: what is asked for last holds.
        if was == value.text and not value.path.endswith("_freq"):
            return Restored(value, "as_it_was")
        problem = ""
        try:
            files.write(value.path, value.text)
        except OSError as exc:
            problem = f"cannot be written: {exc.strerror or exc}"
        found = files.read(value.path)
        if found == value.text:
            return Restored(value, "as_it_was" if was == found else "put_back")
        if not problem and _is_limited(files, value, found):
            return Restored(value, "limited", f"the kernel holds it at {found} for now; the limit asked for is back")
        if _is_overruled(files, value):
            return Restored(value, "limited", f"the performance governor holds it at {found}")
        return Restored(value, "failed", problem or f"reads back as {found[:40]!r}")
    except OSError as exc:
        # A file that is missing for a moment, of a device that is there, will be back with what powerd wrote last.
        if exc.errno in {_ENOENT, _ENOTDIR} and not files.exists(value.path.rpartition("/")[0]):
            return Restored(value, "gone", "there is no such device any more")
        return Restored(value, "failed", exc.strerror or str(exc))


def _is_in_force(files: Files, value: Value) -> bool:
    try:
        return files.read(value.path) == value.text
    except OSError:
        return True  # it was a moment ago; the next round or the next start sees what is now


def _is_limited(files: Files, value: Value, found: str) -> bool:
    """Say whether a lower value than the one written is the kernel's own doing."""
    if not (_is_number(found) and _is_number(value.text) and int(found) < int(value.text)):
        return False
    if is_held_down(files):
        return True
    folder, _, leaf = value.path.rpartition("/")
    if leaf != "scaling_max_freq":
        return False
    try:
        # Boost was switched off, or the firmware's limit came down: there is no more to be had.
        return files.read(f"{folder}/cpuinfo_max_freq") == found or files.read(f"{folder}/bios_limit") == found
    except OSError:
        return False


def _is_overruled(files: Files, value: Value) -> bool:
    folder, _, leaf = value.path.rpartition("/")
    try:
        return leaf == "energy_performance_preference" and files.read(f"{folder}/scaling_governor") == "performance"
    except OSError:
        return False


def _rank(value: Value) -> int:
    leaf = value.path.rpartition("/")[2]
    return 0 if leaf.endswith("max_freq") else 1 if leaf.endswith("min_freq") else 2


def _witness(files: Files, path: str) -> str:
    """Read whose limit it is, "-" for one that does not say; raises OSError where the limit itself is not there."""
    try:
        text = files.read(witness_path(path))
    except OSError as exc:
        if exc.errno in {_ENOENT, _ENOTDIR}:
            files.read(path)
            return "-"
        raise
    return text if _is_witness(text) else "-"


def _read(file: str) -> str | None:
    """Read the snapshot; None if there is none. Raises BadSnapshotError for one that another user may have written."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise BadSnapshotError(f"cannot be read: {exc.strerror}") from exc
    try:
        found = os.fstat(fd)
        if found.st_mode & 0o170000 != 0o100000:
            raise BadSnapshotError("is no regular file")
        # As a service powerd is a user of its own, and root restores: whose the directory is, the file may be too.
        folder = os.stat(os.path.dirname(file) or ".")
        if found.st_uid not in {0, os.geteuid(), folder.st_uid} or (found.st_mode | folder.st_mode) & 0o022:
            raise BadSnapshotError("may have been written by another user")
        raw = b""
        while len(raw) <= _MAX_BYTES and (piece := os.read(fd, _MAX_BYTES)):
            raw += piece
    except OSError as exc:
        raise BadSnapshotError(f"cannot be read: {exc.strerror}") from exc
    finally:
        os.close(fd)
    if len(raw) > _MAX_BYTES:
        raise BadSnapshotError(f"is larger than {_MAX_BYTES} bytes")
    try:
        return raw.decode("ascii")
    except UnicodeDecodeError:
        raise BadSnapshotError("is no text") from None


def _sync_folder(file: str) -> None:
    fd = os.open(os.path.dirname(file) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _is_plain(text: str) -> bool:
    return 0 < len(text) <= _MAX_TEXT and _NAME.issuperset(text)


def _is_witness(text: str) -> bool:
    return 0 < len(text) <= _MAX_TEXT and text.isascii() and text.isprintable()


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()
