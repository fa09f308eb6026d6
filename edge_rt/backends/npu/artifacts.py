"""Compiled models on disk: found again by all that they depend on, verified when loaded, bounded in bytes.

FOLDER/KEY/ holds a compiler's files and artifact.json, which says what they are and hash to. A folder appears by a
rename and is never changed; the time of its artifact.json is that of its last use. What is not whole, or was not
written by us, root or the model's owner, is deleted and made again: a vendor's loader may crash on damaged bytes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Annotated

import msgspec
from msgspec import Meta

from edge_rt.backends.base import ModelFile
from edge_rt.backends.npu.vendor import Artifact, Compiled, Target
from edge_rt.catalog.part import hash_file, hash_rest
from edge_rt.errors import AcceleratorLostError, BackendLoadError
from edge_rt.regular import open_regular, read_regular

_log = logging.getLogger(__name__)

DESCRIPTION = "artifact.json"
MAX_DESCRIPTION_BYTES = 4 * 2**20
FORMAT = 1
_MAX_TRIES = 3
_SCARCE_BYTES = 16 * 2**20
_LEFT_OVER_S = 3600.0  # a folder of a compiler that ended before it was through
Key = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]


class File(msgspec.Struct, frozen=True, kw_only=True):
    name: Name
    size_bytes: Annotated[int, Meta(ge=0)]
    sha256: Key


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What artifact.json holds. model_sha256 is over the model's bytes and those of its external files."""

    format: int
    key: Key
    model: str
    variant: str
    model_sha256: Key
    target: Target
    rows: int
    compiled: Compiled
    files: tuple[File, ...]
    compile_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An artefact as it lies there, whatever it was made for."""

    folder: Path
    description: Description
    size_bytes: int


def model_digest(file: ModelFile, external: tuple[Path, ...] = ()) -> str:
    """Hash a model's bytes and those of the files that it names. Raises BackendLoadError where one cannot be read."""
    digest = hashlib.sha256()
    for path in (file.path, *sorted(external)):
        try:
            digest.update(bytes.fromhex(hash_file(path)))
        except OSError as exc:
            raise BackendLoadError(model=file.model, reason=f"{path.name} cannot be read: {exc.strerror}") from exc
    return digest.hexdigest()


def artifact_key(model_sha256: str, target: Target, rows: int) -> str:
    """Name what a model compiled for a target is kept under."""
    told = (FORMAT, model_sha256, target.vendor, target.soc, target.versions, sorted(target.options.items()))
    return hashlib.sha256(msgspec.json.encode((*told, target.calibration, rows))).hexdigest()


class ArtifactCache:
    """The compiled forms of one model. folder None keeps none: what is compiled goes with the session.

    passing     the folder for what is not kept; None: the system's
    free_bytes  tells what a folder's disk has free
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        max_bytes: int,
        passing: Path | None = None,
        free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._max_bytes, self._passing, self._clock = folder, max_bytes, passing, clock
        self._free_bytes = free_bytes

    @contextmanager
    def artifact(
        self,
        file: ModelFile,
        target: Target,
        rows: int,
        compile_to: Callable[[Path], Compiled],
        *,
        external: tuple[Path, ...] = (),
    ) -> Iterator[tuple[Artifact, Callable[[], Artifact]]]:
        """Give the compiled model, made now unless it is kept, and what makes it anew if it will not load.

        What is not kept lasts as long as the context; so does what the folder's disk has no room for. Raises what
        compile_to raises, and BackendLoadError.
        """
        sha256 = model_digest(file, external)
        key = artifact_key(sha256, target, rows)
        try:
            passing = tempfile.mkdtemp(prefix="edge_rt-npu-", dir=self._passing)
        except OSError as exc:
            raise _unwritable(file, exc) from exc
        try:
            kept = self._usable_folder()

            def make() -> Artifact:
                if kept is not None:
                    try:
                        if (free_bytes := self._free_bytes(kept)) < _SCARCE_BYTES:
                            raise _NoRoomError(f"its disk has {free_bytes} bytes free")
                        return self._make(kept, key, file, sha256, target, rows, compile_to)
                    except _NoRoomError as exc:
                        told = "%s: its compiled form cannot be kept in %s, and each load will compile it anew: %s"
                        _log.warning(told, file.model, kept, exc)
                try:
                    return self._make(Path(passing), key, file, sha256, target, rows, compile_to)
                except _NoRoomError as exc:
                    raise _unwritable(file, exc) from exc

            def again() -> Artifact:
                for folder in filter(None, (kept, Path(passing))):
                    _remove(folder / key)
                return make()

            found = _open(kept / key, key, file) if kept is not None else None
            yield found or make(), again
        finally:
            shutil.rmtree(passing, ignore_errors=True)

    def _usable_folder(self) -> Path | None:
        """Give the folder if something may be kept there."""
        if self._folder is None:
            return None
        try:
            self._folder.mkdir(mode=0o755, exist_ok=True)
        except OSError:
            return None
        return self._folder if os.access(self._folder, os.W_OK) else None

    def _make(
        self,
        into: Path,
        key: str,
        file: ModelFile,
        sha256: str,
        target: Target,
        rows: int,
        compile_to: Callable[[Path], Compiled],
    ) -> Artifact:
        _remove_left_overs(into)
        try:
            new = Path(tempfile.mkdtemp(prefix=".new-", dir=into))
        except OSError as exc:
            raise _NoRoomError(str(exc)) from exc
        try:
            begun_s = self._clock()
            compiled = compile_to(new)
            description = Description(
                format=FORMAT,
                key=key,
                model=file.model,
                variant=file.variant,
                model_sha256=sha256,
                target=target,
                rows=rows,
                compiled=compiled,
                files=tuple(_describe(new, name, file) for name in compiled.files),
                compile_s=self._clock() - begun_s,
            )
            _write(new / DESCRIPTION, msgspec.json.format(msgspec.json.encode(description)))
            for left in new.iterdir():  # what the compiler has left beside
                if left.name not in {DESCRIPTION, *compiled.files}:
                    _remove(left)
            new.chmod(0o755)
            artifact = _placed(new, into / key, key, file) or _as_artifact(into / key, description)
        except OSError as exc:
            raise _NoRoomError(str(exc)) from exc
        except (BackendLoadError, AcceleratorLostError) as exc:
            free_bytes = self._free_bytes(into)
            if free_bytes >= _SCARCE_BYTES:
                raise
            # Compilers do not say so: "Protobuf serialization failed" is all that one has for it, or a crash.
            raise _NoRoomError(f"{exc.reason}; the disk of {into} has {free_bytes} bytes free") from exc
        finally:
            shutil.rmtree(new, ignore_errors=True)
        self._prune(into, key)
        return artifact

    def _prune(self, folder: Path, newest: str) -> None:
        """Delete what was used least recently, until the rest has no more than max_bytes; never the newest."""
        rest = self._max_bytes
        for found in sorted(artifacts(folder), key=lambda a: (a.description.key == newest, _used_s(a)), reverse=True):
            rest -= found.size_bytes
            if rest < 0 and found.description.key != newest:
                shutil.rmtree(found.folder, ignore_errors=True)


def artifacts(folder: Path) -> list[Found]:
    """List what is kept in a folder, without hashing it; [] where there is none."""
    found = []
    with contextlib.suppress(OSError):
        for place in sorted(folder.iterdir()):
            if place.name[0] != "." and (description := _read(place)) is not None:
                size = sum(file.size_bytes for file in description.files)
                found.append(Found(folder=place, description=description, size_bytes=size))
    return found


def is_whole(artifact: Artifact, file: ModelFile) -> bool:
    """Say whether an artefact is still what was written; what is not is deleted."""
    return _open(artifact.folder, artifact.key, file) is not None


def _open(folder: Path, key: str, file: ModelFile) -> Artifact | None:
    """Give a kept artefact if it is whole and by somebody who may write it; delete it if not."""
    if not os.path.lexists(folder):
        return None
    if folder.is_symlink() or not folder.is_dir():
        problem = "it is no folder"
    elif (description := _read(folder)) is None:
        problem = "its description cannot be read"
    elif description.key != key:
        problem = "it is another model's"
    elif not (problem := _problem(folder, description, file.path)):
        with contextlib.suppress(OSError):
            os.utime(folder / DESCRIPTION)
        return _as_artifact(folder, description)
    _log.warning("%s: a compiled form cannot be used and is made anew: %s", file.model, problem)
    _remove(folder)
    return None


def _placed(new: Path, place: Path, key: str, file: ModelFile) -> Artifact | None:
    """Put a folder in its place; give the one that another process has put there meanwhile. Raises OSError."""
    for _ in range(_MAX_TRIES):
        if (theirs := _open(place, key, file)) is not None:
            return theirs  # it may be loading that
        try:
            new.rename(place)
        except OSError as exc:
            if exc.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise
        else:
            return None
    raise OSError(errno.EEXIST, "what is there cannot be removed", str(place))


def _remove(place: Path) -> None:
    """Remove what is there, as far as possible; of a link the link."""
    with contextlib.suppress(OSError):
        if place.is_symlink() or not place.is_dir():
            place.unlink()
        else:
            shutil.rmtree(place, ignore_errors=True)


class _NoRoomError(Exception):
    """A folder takes no compiled form; another may."""


def _unwritable(file: ModelFile, exc: Exception) -> BackendLoadError:
    return BackendLoadError(model=file.model, reason=f"its compiled form cannot be written: {exc}")


def _problem(folder: Path, description: Description, model: Path) -> str:
    """Say what is wrong with an artefact's files, "" if nothing is."""
    trusted = {0, os.geteuid(), model.stat().st_uid}
    for told in (File(name=DESCRIPTION, size_bytes=-1, sha256=""), *description.files):
        try:
            with open_regular(folder / told.name) as opened:
                found = os.fstat(opened.fileno())
                if not S_ISREG(found.st_mode) or found.st_uid not in trusted:
                    return f"{told.name} is another user's"
                if told.name == DESCRIPTION:
                    continue
                if found.st_size != told.size_bytes:
                    return f"{told.name} has {found.st_size} bytes, {told.size_bytes} were written"
                if hash_rest(opened) != told.sha256:
                    return f"{told.name} is not what was written"
        except OSError as exc:
            return f"{told.name} cannot be read: {exc.strerror}"
    return ""


def _read(folder: Path) -> Description | None:
    try:
        raw = read_regular(folder / DESCRIPTION, MAX_DESCRIPTION_BYTES)
        description = msgspec.json.decode(raw, type=Description)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return description if description.format == FORMAT else None


def _describe(folder: Path, name: str, file: ModelFile) -> File:
    try:
        with open_regular(folder / name) as opened:
            os.fsync(opened.fileno())
            size = os.fstat(opened.fileno()).st_size
            return File(name=name, size_bytes=size, sha256=hash_rest(opened))
    except OSError as exc:
        reason = f"its compiler has not written {name}: {exc.strerror}"
        raise BackendLoadError(model=file.model, reason=reason) from exc


def _as_artifact(folder: Path, description: Description) -> Artifact:
    return Artifact(
        key=description.key,
        folder=folder,
        target=description.target,
        compiled=description.compiled,
        rows=description.rows,
        compile_s=description.compile_s,
    )


def _used_s(found: Found) -> float:
    try:
        return (found.folder / DESCRIPTION).stat().st_mtime
    except OSError:
        return 0.0


def _remove_left_overs(folder: Path) -> None:
    for left in folder.glob(".new-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _LEFT_OVER_S:
                shutil.rmtree(left, ignore_errors=True)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
