"""Where the vendors' environments stand, which of them are there, and taking one away.

ROOT/VENDOR        a link to the environment that is used; it appears when that is whole and has been tried
ROOT/VENDOR-DIGEST the environment, unless it was made somewhere else; DIGEST is stacks.py's
ROOT/.VENDOR.lock  held while one is made or removed; never deleted

installing.py makes them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from edge_rt.backends.npu.stacks import Stack
from edge_rt.catalog.store import SYSTEM_DIR, data_dir
from edge_rt.errors import VendorSetupError

RECORD: Final = "edge_rt.json"  # in an environment that is whole
_MAX_RECORD_BYTES: Final = 64 * 1024


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment holds; written when all of it is there."""

    vendor: str
    digest: str
    python: str
    packages: tuple[str, ...]
    size_bytes: int
    made_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A vendor's environment that is whole; is_current: it holds what this version of edge_rt wants."""

    folder: Path
    record: Record
    is_current: bool

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


def usual_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Give where environments are made and looked for first: $EDGE_RT_NPU_DIR or below edge_rt's data."""
    named = environ.get("EDGE_RT_NPU_DIR")
    return Path(named) if named else data_dir(environ) / "npu"


def find(stack: Stack, environ: Mapping[str, str] = os.environ, system_dir: Path = SYSTEM_DIR) -> Environment | None:
    """Give a vendor's environment: this user's or, without one, what root has made for the machine."""
    for folder in dict.fromkeys((usual_dir(environ), system_dir / "npu")):
        if (found := _read(folder / stack.name, stack)) is not None:
            return found
    return None


def missing(stack: Stack, environ: Mapping[str, str] = os.environ, system_dir: Path = SYSTEM_DIR) -> str | None:
    """Say why the vendor's packages cannot be used, with the remedy; None if they can."""
    found = find(stack, environ, system_dir)
    command = f"`edge_rt npu setup {stack.name}`"
    if found is None:
        return f"its packages are not installed; {command} makes an environment for them"
    if not found.is_current:
        return f"{found.folder} holds other versions than this edge_rt wants; {command} makes it anew"
    return None


def remove(stack: Stack, environ: Mapping[str, str] = os.environ) -> int:
    """Remove this user's environment of a vendor; give the bytes that it had, 0 where there was none."""
    root = usual_dir(environ)
    if not root.is_dir():
        return 0
    with locked(stack, root):
        found = _read(root / stack.name, stack)
        return drop(root / stack.name) if found is None else drop(root / stack.name, found.record.size_bytes)


def drop(link: Path, size_bytes: int = 0) -> int:
    """Remove a link, then the environment behind it; the caller holds the lock."""
    if not link.is_symlink():
        return 0
    folder = link.resolve()
    link.unlink()
    if (folder / RECORD).is_file():  # nothing else is removed, wherever the link leads
        (folder / RECORD).unlink()
        shutil.rmtree(folder)
    return size_bytes


@contextmanager
def locked(stack: Stack, root: Path) -> Iterator[None]:
    """Hold a vendor's lock. Raises VendorSetupError where somebody else does, or the folder cannot be written."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = os.open(root / f".{stack.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        problem = f"{exc.filename} cannot be written: {exc.strerror}"
        raise VendorSetupError(
            vendor=stack.name, problem=problem, remedy="run it as the folder's owner, or as another user"
        ) from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as exc:
        raise VendorSetupError(
            vendor=stack.name, problem="another process makes or removes them now", remedy="wait until it is done"
        ) from exc
    finally:
        os.close(lock)


def _read(link: Path, stack: Stack) -> Environment | None:
    """Read what a link leads to; None unless it is whole and belongs to root or to who asks: it will be run."""
    folder = link.resolve()
    try:
        with (folder / RECORD).open("rb") as file:
            if os.fstat(file.fileno()).st_uid not in {0, os.geteuid()}:
                return None
            record = msgspec.json.decode(file.read(_MAX_RECORD_BYTES), type=Record)
    except (OSError, msgspec.DecodeError):
        return None
    if record.vendor != stack.name or not os.access(folder / "bin" / "python", os.X_OK):
        return None
    return Environment(folder=folder, record=record, is_current=record.digest == stack.digest)
