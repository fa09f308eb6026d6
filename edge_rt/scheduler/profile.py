"""What was measured of models on this machine's devices: a JSON file that `edge_rt bench --save-profile` writes.

It is read by processes that did not write it, so nothing in it is believed without a look: an entry that is damaged, of
another file, machine or version is left out with the reason, and the placement guesses instead.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from edge_rt import config
from edge_rt.catalog.manifest import Variant
from edge_rt.devices import cpu
from edge_rt.errors import StoreError
from edge_rt.regular import open_regular
from edge_rt.scheduler.placement import Measured

FORMAT = 1
MAX_PROFILE_BYTES = 2**20
MAX_ENTRIES = 2048

_Text = Annotated[str, Meta(max_length=200)]
_Time = Annotated[float, Meta(gt=0, le=3600)]


def profile_path(settings: config.Placement, store_dir: Path) -> Path:
    return Path(settings.profile_file).expanduser() if settings.profile_file else store_dir / "profile.json"


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One form of a model on one device.

    file        what file_key says of the form's file
    versions    of the packages that computed
    latency_s   median of a request by itself; latency_p95_s of the same
    energy_j    of one request; None was not measured, for energy_reason
    """

    model: _Text
    variant: _Text
    file: _Text
    backend: _Text
    device: _Text
    cpu: _Text
    versions: Annotated[dict[_Text, _Text], Meta(max_length=16)]
    measured_at: _Text
    n_runs: Annotated[int, Meta(ge=1)]
    latency_s: _Time
    latency_p95_s: _Time
    energy_j: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    energy_reason: _Text = ""
    memory_bytes: Annotated[int, Meta(gt=0, le=2**45)] | None = None

    @property
    def key(self) -> tuple[str, ...]:
        return self.model, self.variant, self.backend, self.device


class _File(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    entries: Annotated[list[msgspec.Raw], Meta(max_length=MAX_ENTRIES)]


def file_key(variant: Variant, path: Path | None) -> str:
    """Name the exact file of a form: by its hash, or where it was made here by its size and when it was."""
    if variant.sha256 or path is None:
        return variant.sha256
    stat = path.stat()
    return f"{variant.quant}, {stat.st_size} bytes, {stat.st_mtime_ns}"


def read(path: Path) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """Read a profile: its entries, and what was wrong with the rest. A file that is not there has none."""
    try:
        with open_regular(path) as file:
            raw = file.read(MAX_PROFILE_BYTES + 1)
    except FileNotFoundError:
        return (), ()
    except OSError as exc:
        return (), (f"{path} cannot be read: {exc.strerror}",)
    if len(raw) > MAX_PROFILE_BYTES:
        return (), (f"{path} is longer than {MAX_PROFILE_BYTES} bytes and is ignored",)
    try:
        found = msgspec.json.decode(raw, type=_File)
    except (msgspec.DecodeError, RecursionError) as exc:
        return (), (f"{path} is damaged and is ignored: {exc}",)
    if found.format != FORMAT:
        return (), (f"{path} has format {found.format}, this edge_rt reads {FORMAT}; measure again",)
    entries: list[Entry] = []
    problems: list[str] = []
    for at, entry in enumerate(found.entries):
        try:
            entries.append(msgspec.json.decode(entry, type=Entry))
        except (msgspec.DecodeError, RecursionError) as exc:
            problems.append(f"{path}: entry {at} is damaged and is ignored: {exc}")
    return tuple(entries), tuple(problems)


def save(path: Path, entries: Iterable[Entry]) -> None:
    """Put entries into a profile, in place of those of the same candidates. Readers see the old file or the new one.

    Raises StoreError.
    """
    merged = {entry.key: entry for entry in (*read(path)[0], *entries)}
    body = msgspec.json.format(msgspec.json.encode({"format": FORMAT, "entries": list(merged.values())[-MAX_ENTRIES:]}))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".profile-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(file.fileno(), 0o644)
                file.write(body + b"\n")
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise
    except OSError as exc:
        raise StoreError(path=str(path), problem=exc.strerror or str(exc)) from exc


def versions_now(packages: Iterable[str]) -> dict[str, str]:
    """Give the installed versions of packages, "" where one is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # only where something has been measured

    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found


def why_stale(entry: Entry, *, file: str, cpu_model: str, versions: Callable[[Iterable[str]], dict[str, str]]) -> str:
    """Say why an entry does not hold here and now, "" if it does."""
    if entry.file != file:
        return "another file"
    if entry.cpu != cpu_model:
        return f"measured on {entry.cpu}"
    now = versions(entry.versions)
    changed = [f"{name} {was}, now {now[name] or 'absent'}" for name, was in entry.versions.items() if now[name] != was]
    return f"measured with {', '.join(changed)}" if changed else ""


class Profile:
    """A profile file as the placement asks it; read again when it has changed.

    warn  hears what is wrong with it, each time that it is read
    """

    def __init__(
        self,
        path: Path | None,
        *,
        cpu_model: Callable[[], str] = lambda: cpu.model().value or "",
        versions: Callable[[Iterable[str]], dict[str, str]] = versions_now,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._path, self._versions, self._warn = path, versions, warn
        self._cpu_model = cpu_model
        self._stamp: tuple[int, int, int] | None = None
        self._entries: dict[tuple[str, ...], Entry] = {}
        self.problems: tuple[str, ...] = ()

    def refresh(self) -> None:
        if self._path is None:
            return
        try:
            stat = self._path.stat()
            stamp = stat.st_mtime_ns, stat.st_size, stat.st_ino
        except OSError:
            stamp = None
        if stamp is None or stamp != self._stamp:
            entries, self.problems = read(self._path)
            self._entries = {entry.key: entry for entry in entries}
            self._stamp = stamp
            for problem in self.problems:
                self._warn(problem)

    def measured(
        self, model: str, variant: str, backend: str, device: str, *, file: str
    ) -> tuple[Measured | None, str]:
        """Give what was measured of a candidate, or None and why an entry is left out ("" without one)."""
        entry = self._entries.get((model, variant, backend, device))
        if entry is None:
            return None, ""
        if reason := why_stale(entry, file=file, cpu_model=self._cpu_model(), versions=self._versions):
            return None, f"its profile is stale: {reason}"
        return Measured(latency_s=entry.latency_s, energy_j=entry.energy_j, memory_bytes=entry.memory_bytes), ""
