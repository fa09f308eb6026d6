"""Make the environments in which pynq's own releases run on the simulated engine, once each, outside the tree.

pynq wants numpy below 2 and a grpcio of its own, so it cannot live beside edge_rt's other packages. `make test-pynq`
makes them and runs the tests.

Standard library only. `python -m tools.pynq_venv` prints the path of each one's Python; it needs pip and the network.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tools.build_llama import BuildError, cache_dir, failed, one_at_a_time
from tools.progress import CommandError, pip_stage, run

NEWEST_PYTHON = (3, 12)  # numpy 1.26 and grpcio 1.64 have no wheels for later ones
# Of each board's line the last release. pynq 3 does not say that it needs the old pycparser.
REQUIREMENTS: Mapping[str, tuple[str, ...]] = {
    "4.0.0": ("pynq==4.0.0", "pycparser<3"),
    "3.1.2": ("pynq==3.1.2", "pycparser<3"),
}
_MADE = "made"  # in the folder when all of it is there: an environment cannot be moved into place


def find(version: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Give the Python that has this version of pynq, None where it was not made."""
    folder = _folder(version, environ)
    return folder / "bin" / "python" if (folder / _MADE).exists() else None


def ensure(version: str, python: Path | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """Give find's Python, making its environment with python or another that is old enough. Raises BuildError."""
    if (found := find(version, environ)) is not None:
        return found
    folder = _folder(version, environ)
    with one_at_a_time(folder.with_name(folder.name + ".lock")):
        return find(version, environ) or _make(python or _old_enough(environ), version, folder, environ)


def _folder(version: str, environ: Mapping[str, str]) -> Path:
    digest = hashlib.blake2b("\0".join(REQUIREMENTS[version]).encode(), digest_size=4).hexdigest()
    return cache_dir("pynq", environ) / f"{version}-{digest}"


def _old_enough(environ: Mapping[str, str]) -> Path:
    if sys.version_info[:2] <= NEWEST_PYTHON:
        return Path(sys.executable)
    for minor in (12, 11):
        named = shutil.which(f"python3.{minor}", path=environ.get("PATH", os.defpath))
        if named and subprocess.run([named, "-c", ""], capture_output=True, check=False).returncode == 0:
            return Path(named)
    raise BuildError("pynq needs Python 3.12 or 3.11 (numpy below 2); this is a later one, and neither is on PATH.")


def _make(python: Path, version: str, folder: Path, environ: Mapping[str, str]) -> Path:
    log = folder.with_name(folder.name + ".log")
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted run left
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="building-") as scratch:
        env = {name: value for name, value in environ.items() if name not in ("BOARD", "PYTHONPATH")}
        env["TMPDIR"] = scratch  # /tmp is often a small part of memory on a board
        made = folder / "bin" / "python"
        pip = [str(made), "-m", "pip", "--disable-pip-version-check", "install", *REQUIREMENTS[version]]
        try:
            run(
                f"making pynq {version}'s environment",
                [str(python), "-m", "venv", str(folder)],
                stage=pip_stage,
                log=log,
            )
            run(f"installing pynq {version}", pip, stage=pip_stage, log=log, env=env)
        except CommandError as exc:
            shutil.rmtree(folder, ignore_errors=True)
            raise failed(exc) from exc
    (folder / _MADE).touch()
    log.unlink()
    return made


if __name__ == "__main__":
    try:
        for each in REQUIREMENTS:
            print(ensure(each))
    except BuildError as exc:
        sys.exit(f"edge_rt: {exc}")
