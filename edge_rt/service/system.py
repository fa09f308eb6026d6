"""What installing and looking at services does to a machine: files below a root, and programs. Tests pass a fake."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final, Protocol

_TIMEOUT_S: Final = 90.0  # starting a unit waits for its models
_MAX_OUTPUT: Final = 64 * 1024
_NO_END: Final = 124  # what timeout(1) gives


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a program ended."""

    status: int
    out: str
    err: str


class Machine(Protocol):
    """A machine, or a tree of files that will be one's root."""

    @property
    def is_live(self) -> bool:
        """Say whether systemd runs here, so that units can be started."""
        ...

    def read(self, path: PurePosixPath) -> str | None:
        """Read a file; None where there is none."""
        ...

    def exists(self, path: PurePosixPath) -> bool: ...

    def write(self, path: PurePosixPath, text: str) -> None:
        """Write a file that all may read, whole or not at all. Raises OSError."""
        ...

    def remove(self, path: PurePosixPath) -> bool:
        """Remove a file, link or whole directory; say whether there was one. Raises OSError."""
        ...

    def run(self, *command: str) -> Done:
        """Run a program. Raises FileNotFoundError where there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Host:
    """This machine, or with root a tree below it, in which nothing is run."""

    root: Path = field(default_factory=lambda: Path("/"))

    @property
    def is_live(self) -> bool:
        return self.root == Path("/") and Path("/run/systemd/system").is_dir()

    def read(self, path: PurePosixPath) -> str | None:
        try:
            return self._at(path).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None

    def exists(self, path: PurePosixPath) -> bool:
        return os.path.lexists(self._at(path))

    def write(self, path: PurePosixPath, text: str) -> None:
        at = self._at(path)
        at.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        beside = at.with_name(f".{at.name}.new")
        beside.write_text(text, encoding="utf-8")
        beside.chmod(0o644)
        beside.replace(at)

    def remove(self, path: PurePosixPath) -> bool:
        at = self._at(path)
        if not os.path.lexists(at):
            return False
        if at.is_dir() and not at.is_symlink():
            shutil.rmtree(at)
        else:
            at.unlink()
        return True

    def run(self, *command: str) -> Done:
        environ = {**os.environ, "LC_ALL": "C.UTF-8", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": "cat"}
        try:
            ended = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False, env=environ
            )
        except subprocess.TimeoutExpired:
            return Done(status=_NO_END, out="", err=f"no end within {_TIMEOUT_S:g} s")
        out, err = (part[:_MAX_OUTPUT].decode(errors="replace") for part in (ended.stdout, ended.stderr))
        return Done(status=ended.returncode, out=out, err=err)

    def _at(self, path: PurePosixPath) -> Path:
        return self.root / path.relative_to("/")
