"""Models that are made of others: a manifest of its own names which is asked first and what becomes of its answer.

A chain has no files. Its manifests are the *.toml in the directory chains/ of each directory of manifests.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from edge_rt.catalog.manifest import MAX_MANIFEST_BYTES, Id, leave_out, toml_files
from edge_rt.catalog.pipelines import Line
from edge_rt.errors import ModelFormatError
from edge_rt.regular import open_regular

DIRECTORY = "chains"

_Score = Annotated[float, Meta(ge=0, le=1)]


class Cascade(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="cascade"):
    """The small model `first` answers; where it is not sure enough, the large one `then` does.

    min_score    from which confidence on the small one's answer counts
    confidence   best: the score of its best label or box · least: the least of those of all its boxes, and 1 if it
                 found nothing
    stops_early  share of the calibration's n inputs that it answered alone, and the accuracy which that cost
    """

    id: Id
    name: Line
    first: Id
    then: Id
    min_score: _Score
    confidence: Literal["best", "least"] = "best"
    n: Annotated[int, Meta(ge=0)] = 0
    stops_early: _Score | None = None
    cost: float | None = None
    note: Line = ""

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.first, self.then)


class Ocr(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="ocr"):
    """The model `detect` finds lines of text, `read` reads them, all lines of a picture in one call."""

    id: Id
    name: Line
    detect: Id
    read: Id
    note: Line = ""

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.detect, self.read)


Chain = Cascade | Ocr


def load_chains(dirs: Sequence[Path], *, left_out: dict[str, ModelFormatError] | None = None) -> tuple[Chain, ...]:
    """Read the chains below some directories, sorted by id; of two with one id the earlier directory's counts.

    left_out  as for load_manifests
    Raises ModelFormatError naming the field.
    """
    found: dict[str, Chain | None] = {}
    for directory in (directory / DIRECTORY for directory in dirs):
        for path in toml_files(directory, "chains", left_out) if directory.is_dir() else ():
            try:
                chain = load_chain(path)
            except ModelFormatError as exc:
                if left_out is None:
                    raise
                leave_out(path, exc, found, left_out)
                continue
            found.setdefault(chain.id, chain)
    return tuple(chain for _, chain in sorted(found.items()) if chain is not None)


def load_chain(path: Path) -> Chain:
    """Read and check one chain's manifest. Raises ModelFormatError."""
    try:
        with open_regular(path) as file:
            raw = file.read(MAX_MANIFEST_BYTES + 1)
        if len(raw) > MAX_MANIFEST_BYTES:
            raise ModelFormatError(path=str(path), field="file", problem=f"longer than {MAX_MANIFEST_BYTES} bytes")
        chain: Chain = msgspec.convert(tomllib.loads(raw.decode("utf-8")), Chain)
    except OSError as exc:
        raise ModelFormatError(path=str(path), field="file", problem=f"cannot be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ModelFormatError(path=str(path), field="TOML", problem=str(exc)) from exc
    except msgspec.ValidationError as exc:
        problem, _, place = str(exc).partition(" - at `$")
        raise ModelFormatError(path=str(path), field=place.strip("`.") or "chain", problem=problem) from exc
    if chain.parts[0] == chain.parts[1]:
        raise ModelFormatError(path=str(path), field="chain", problem=f"both its models are {chain.parts[0]}")
    return chain
