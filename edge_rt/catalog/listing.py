"""What the directories of manifests say, all at once, and whether they say something else by now."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_rt.catalog.chains import DIRECTORY, Chain, load_chains
from edge_rt.catalog.manifest import Manifest, load_manifests
from edge_rt.errors import ModelFormatError

Signature = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """left_out: the errors of manifests that cannot be used, by the id they claim, else by their path."""

    manifests: tuple[Manifest, ...] = ()
    chains: tuple[Chain, ...] = ()
    left_out: Mapping[str, ModelFormatError]


def read_listing(dirs: Sequence[Path]) -> Listing:
    """Read manifests and chains; one that is bad takes no other with it."""
    left_out: dict[str, ModelFormatError] = {}
    manifests = load_manifests(dirs, left_out=left_out)
    return Listing(manifests=manifests, chains=load_chains(dirs, left_out=left_out), left_out=left_out)


def signature(dirs: Sequence[Path]) -> Signature:
    """Tell the files that a listing is read from by name, inode, time and size; reads none of them."""
    found: list[tuple[str, int, int, int]] = []
    for path in (path for directory in dirs for path in (directory, directory / DIRECTORY)):
        try:
            with os.scandir(path) as entries:
                found += [_told(entry) for entry in entries if entry.name.endswith(".toml")]
        except OSError as exc:
            found.append((str(path), -(exc.errno or 1), 0, 0))
    return tuple(sorted(found))


def _told(entry: os.DirEntry[str]) -> tuple[str, int, int, int]:
    try:
        stat = entry.stat()
    except OSError as exc:  # a link to nowhere
        return (entry.path, -(exc.errno or 1), 0, 0)
    return (entry.path, stat.st_ino, stat.st_mtime_ns, stat.st_size)
