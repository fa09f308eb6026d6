"""Compile a model for a board with Rockchip's NPU, which compiles nothing: NAME.SOC.rknn and its .json beside it.

rknnlite_driver.py takes both on the board. Runs where the toolkit is (`edge_rt npu setup rknn`, x86-64).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from edge_rt.backends.base import Absent, ModelFile, NpuOptions, TensorOptions
from edge_rt.backends.npu.needs import unmet_soc
from edge_rt.backends.npu.rknn import NAME, RknnBackend
from edge_rt.backends.npu.rknn_driver import COMPILED
from edge_rt.backends.npu.vendor import CompileRequest
from edge_rt.catalog.part import hash_file
from edge_rt.errors import BackendLoadError, BackendUnavailableError
from edge_rt.tensor_types import ChipNeeds, NodePlacement

_ROWS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written: file and, beside it, its .json; cycles are the compiler's own estimate."""

    file: Path
    soc: str
    compiler: str
    placement: tuple[NodePlacement, ...]
    cycles: int

    @property
    def facts(self) -> Path:
        return self.file.with_name(f"{self.file.name}.json")


def export(
    file: ModelFile,
    soc: str,
    own: Mapping[str, str],
    *,
    needs: ChipNeeds | None = None,
    folder: Path | None = None,
    backend: RknnBackend | None = None,
) -> Exported:
    """Compile a model for a chip and write it into folder, by default the model's own.

    own   npu_rknn's options; needs  what the form wants of the chip, None: nobody says
    Raises BackendUnavailableError without the compiler, BackendLoadError for what it does not take.
    """
    backend = backend or RknnBackend()
    options = TensorOptions(n_threads=1, npu=NpuOptions(soc={NAME: soc}, needs=needs, options={NAME: dict(own)}))
    found = backend.probe()
    if isinstance(found, Absent):
        raise BackendUnavailableError(backend=NAME, reason=found.reason, extra=found.extra)
    if found[0].fault:
        raise BackendUnavailableError(backend=NAME, reason=found[0].fault)
    if (reason := backend.supports_tensor(file, options)) is not None:
        raise BackendLoadError(model=file.model, reason=reason)
    target = backend.vendor.target(file, found[0], options)
    if needs is not None and (reason := unmet_soc(needs, soc)) is not None:
        raise BackendLoadError(model=f"{file.model}:{file.variant}", reason=reason)
    written = (folder or file.path.parent) / f"{file.path.stem}.{soc}.rknn"
    with tempfile.TemporaryDirectory(prefix="edge_rt-rknn-") as scratch:
        request = CompileRequest(file=file, device=found[0], target=target, folder=Path(scratch), rows=_ROWS)
        compiled = backend.vendor.compile(request)
        told: dict[str, Any] = {
            "soc": soc,
            "compiler": target.versions.compiler,
            "model_sha256": hash_file(file.path),
            "sha256": hash_file(Path(scratch, COMPILED)),
            "calibration_sha256": target.calibration,
            "facts": msgspec.to_builtins(compiled.facts),
        }
        shutil.copyfile(Path(scratch, COMPILED), written)
    exported = Exported(
        file=written,
        soc=soc,
        compiler=target.versions.compiler,
        placement=compiled.placement,
        cycles=int(told["facts"].get("cycles", 0)),
    )
    exported.facts.write_text(json.dumps(told, indent=1))
    return exported
