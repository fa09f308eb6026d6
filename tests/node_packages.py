"""Packages of Node that tests run; fetched by npm once and kept beside the wheels."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tools.build_llama import cache_dir


def folder_of(manifest: Path) -> Path:
    """Give a folder with the packages that a package.json names, or skip the test where they cannot be had."""
    for command in ("node", "npm"):
        if shutil.which(command) is None:
            pytest.skip(f"needs {command} (sh tools/system_packages.sh node=nodejs npm=npm installs it)")
    digest = hashlib.sha256(manifest.read_bytes()).hexdigest()[:16]
    cache = cache_dir("node", os.environ)
    kept = cache / digest
    if not kept.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:  # whole or not at all
            found = Path(scratch) / digest
            found.mkdir()
            shutil.copy(manifest, found)
            # Packages' own scripts would run as whoever runs the tests.
            command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock"]
            done = subprocess.run(command, cwd=found, capture_output=True, text=True, timeout=600, check=False)
            if done.returncode:
                pytest.skip(f"the packages cannot be fetched: {done.stderr.strip()[-200:]}")
            found.rename(kept)
    return kept
