"""Take trained detectors into edge_rt's store, so that `edge_rt run pcb-defect board.png` finds them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

import msgspec
import onnx

from edge_rt import config
from edge_rt.catalog.chains import DIRECTORY, load_chain
from edge_rt.catalog.part import Derivation, PullProgress
from edge_rt.catalog.place import manifest_file
from edge_rt.catalog.store import Store
from tools.pcb.boards import KINDS, SIDE
from tools.pcb.cascade import BoardsOutcome
from tools.pcb.detect import MIN_SHOWN
from tools.pcb.graph import INPUTS, OUTPUTS

RESULTS = "accuracy.json"  # what `evaluate` leaves beside the files
CASCADE = "cascade.toml"  # and `cascade`


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What one file reached: mean average precision on n_boards boards of data."""

    file: str
    mean: float
    by_kind: dict[str, float]
    n_boards: int
    n_marks: int
    data: str
    size_bytes: int
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """license_id: of the weights; note: what they were trained on."""

    license_id: str
    note: str


def manifest_text(name: str, files: dict[str, str], folder: Path, origin: Origin, results: dict[str, Result]) -> str:
    """Describe a detector; files: the source of each form, "fp32", "int8" and "int4"."""
    weights = onnx.load(folder / f"{name}.fp32.onnx").graph.initializer
    n_params = sum(int(onnx.numpy_helper.to_array(w).size) for w in weights if w.name.endswith((".weight", ".bias")))
    lines = [
        "# Written by tools.pcb: flaws on a bare board, beside the picture of a good one in the same place.",
        f'id = "{name}"',
        'name = "PCB defect detector"',
        f'license = "{origin.license_id}"',
        f'source_note = "{origin.note}"',
        'kind = "tensor"',
        f"n_params = {n_params}",
        "",
    ]
    for form, source in files.items():
        path = folder / f"{name}.{form}.onnx"
        lines += [
            "[[variants]]",
            f'id = "{form}"',
            f'quant = "{form.upper()}"',
            f'file = "{path.name}"',
            f'source = "{source}"',
            f"size_bytes = {path.stat().st_size}",
            f'sha256 = "{sha256(path.read_bytes()).hexdigest()}"',
        ]
        if result := results.get(path.name):
            told = f'metric = "mAP@0.33", value = {result.mean:.4f}, data = "{result.data}", n = {result.n_boards}'
            lines += [f"accuracy = {{ {told} }}"]
        lines += [""]
    lines += [
        "[pipeline]",
        'task = "detect"',
        f"labels = {json.dumps(KINDS)}",
        'reference = "input"',
        f'reference_input = "{INPUTS[1]}"',
        f"min_score = {MIN_SHOWN}",
        f'image = {{ input = "{INPUTS[0]}", width = {SIDE}, height = {SIDE}, resize = "letterbox", color = "gray", '
        'datatype = "UINT8", pad = 255 }',
        f'decode = {{ kind = "centers", heatmap = "{OUTPUTS[0]}", sizes = "{OUTPUTS[2]}", offsets = "{OUTPUTS[1]}", '
        "sigmoid = true, log_sizes = true }",
    ]
    return "\n".join(lines) + "\n"


def cascade_text(small: str, large: str, outcome: BoardsOutcome, data: str) -> str:
    """Describe the chain of both detectors; the higher of the halves' thresholds is the one to be sure with."""
    lines = [
        "# Written by tools.pcb: the small detector answers for boards that it is sure of.",
        'kind = "cascade"',
        f'id = "{large}-cascade"',
        'name = "PCB defect detector, small one first"',
        f'first = "{small}"',
        f'then = "{large}"',
        'confidence = "least"',
        f"min_score = {max(outcome.thresholds):.6f}",
        f"n = {outcome.n_boards}",
        f"stops_early = {outcome.stopped.value:.4f}",
        f"cost = {outcome.cost.value:.4f}",
        f'note = "cost: of mAP@0.33, {data}, 95 % interval {outcome.cost.low:.4f} to {outcome.cost.high:.4f}"',
    ]
    return "\n".join(lines) + "\n"


def register_cascade(folder: Path, catalog: config.Catalog) -> Path | None:
    """Copy what `cascade` wrote into the store; None if it has not."""
    source = folder / CASCADE
    if not source.exists():
        return None
    load_chain(source)
    path = manifest_file(Store.open(catalog).root, "pcb-defect-cascade")
    path = path.parent / DIRECTORY / path.name
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(source.read_bytes())
    new.replace(path)
    return path


def read_results(folder: Path) -> dict[str, Result]:
    """Read what `evaluate` measured of the files in folder; {} if it has not."""
    path = folder / RESULTS
    if not path.exists():
        return {}
    return {result.file: result for result in msgspec.json.decode(path.read_bytes(), type=list[Result])}


def register(folder: Path, name: str, origin: Origin, catalog: config.Catalog) -> list[Path]:
    """Write the manifest of folder's NAME.*.onnx into the store and pull the files; gives where they stand."""
    forms = [form for form in ("fp32", "int8", "int4") if (folder / f"{name}.{form}.onnx").exists()]
    if "fp32" not in forms:
        raise FileNotFoundError(f"{folder / name}.fp32.onnx is not there: train writes it")
    files = {form: f"file:{quote(str((folder / f'{name}.{form}.onnx').absolute()))}" for form in forms}
    path = manifest_file(Store.open(catalog).root, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(manifest_text(name, files, folder, origin, read_results(folder)), encoding="utf-8")
    new.replace(path)
    store = Store.open(catalog)
    return [store.pull(name, form, progress=_quiet, offline=False, derive=_no_derivation) for form in forms]


def _quiet(_: PullProgress) -> None:
    """Files of a few hundred kilobytes need no bar."""


def _no_derivation(src: Path, dst: Path, how: Derivation) -> None:
    raise NotImplementedError(f"{dst} of {src} by {how}: every form has a file of its own")
