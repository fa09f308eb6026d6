"""Qualcomm's NPU by onnxruntime-qnn against onnxruntime's CPU on the same files; on x86-64 in Qualcomm's SIMULATOR.

    python benchmarks/npu_qnn.py [--data DeepPCB] [--pairs FILE.csv] [--quick] [--json FILE] [--check]

What is compared are answers, not speed: a simulator's time says nothing of a chip's. Bars: at least 99 % of the nodes
of the INT8 classifier on QNN, its logits' cosine at least 99.9 % and its first class the CPU's for at least 99 % of 200
photographs; a load from the kept form, processes and all, at most a quarter of one that compiles; `pcb-defect` and
MiniLM with 4-bit weights wholly on QNN, and within one point of 8-bit weights: mAP@0.33 there, texts that find each
other on the CPU, whose embeddings QNN's must be; 4-bit weights' at least 98.5 % of float ones'. The texts are halves of
paragraphs, and with --pairs those of a file with the columns text_a, text_b and label, 1 where both mean the same. The
boards are drawn, or with --data DeepPCB's test pairs. The forms must be in the store:

    edge_rt models pull efficientnet-lite0:fp32 efficientnet-lite0:npu-w8a8 efficientnet-lite0:npu-w8a16 \\
        pcb-defect:npu-w8a8 pcb-defect:npu-w4a16 minilm-l6:static minilm-l6:npu-w8a16 minilm-l6:npu-w4a16
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tools/ is not installed

from edge_rt import config
from edge_rt.backends.base import Absent, ModelFile, NpuOptions, TensorOptions, TensorSession
from edge_rt.backends.npu.artifacts import artifacts
from edge_rt.backends.npu.client import Client
from edge_rt.backends.npu.qnn import STACK, QnnBackend
from edge_rt.backends.npu.session import NpuSession
from edge_rt.backends.onnx_cpu import OnnxCpuBackend
from edge_rt.catalog.store import Store
from tools import npu_inputs, picture_set
from tools.pcb.average_precision import FoundBoxes, mean_average_precision
from tools.pcb.boards import Board, read_boards, unpacked
from tools.pcb.detect import boxes_of
from tools.pcb.graph import OUTPUTS

_CLASSIFIER, _DETECTOR, _ENCODER = "efficientnet-lite0", "pcb-defect", "minilm-l6"
_MIN_PLACED, _MIN_COSINE, _MIN_SAME, _MIN_FLOAT_COSINE = 99.0, 99.9, 99.0, 98.5  # %
_MAX_LOAD_RATIO, _MAX_POINTS_LOST = 0.25, 1.0
Arrays = Mapping[str, NDArray[Any]]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, help="DeepPCB pairs: a folder with test.lst, or an archive of one")
    parser.add_argument("--pairs", type=Path, help="texts that mean the same: CSV with text_a, text_b, label")
    parser.add_argument("--max-pairs", type=int, default=500, metavar="N", help="of them [500]")


class Forms:
    """The store's forms, opened on QNN or on the CPU."""

    def __init__(self, kept: Path) -> None:
        self._store = Store.open(config.load().config.catalog, os.environ)
        self._kept = kept
        self._backend = QnnBackend()
        found = self._backend.probe()
        if isinstance(found, Absent):
            sys.exit(f"no QNN: {found.reason}")
        self.device = found[0]

    def file(self, model: str, form: str) -> ModelFile:
        manifest = self._store.get(model)
        variant = manifest.variant(form)
        path = self._store.path(manifest, variant) if variant is not None else None
        if variant is None or path is None:
            sys.exit(f"{model}:{form} is not in the store: edge_rt models pull {model}:{form}")
        return ModelFile(model=model, variant=form, path=path, quant=variant.quant)

    def on_qnn(self, model: str, form: str, *, kept: Path | None = None) -> NpuSession:
        # Without requiring the NPU: what is not there is measured, and its answers count as wrong.
        npu = NpuOptions(require="prefer", artifacts=kept or self._kept)
        return self._backend.load_tensor(
            self.file(model, form), TensorOptions(n_threads=1, max_batch=8, device=self.device.id, npu=npu)
        )

    def on_cpu(self, model: str, form: str) -> TensorSession:
        return OnnxCpuBackend().load_tensor(self.file(model, form), TensorOptions(n_threads=1, max_batch=8))

    def manifest(self, model: str) -> Any:
        return self._store.get(model)

    def tokenizer(self) -> Path:
        manifest = self._store.get(_ENCODER)
        found = self._store.asset_path(manifest, next(a for a in manifest.assets if a.file.endswith(".json")))
        if found is None:
            sys.exit(f"{_ENCODER}'s tokenizer is not in the store: edge_rt models pull {_ENCODER}")
        return Path(found)


def placed(session: NpuSession) -> float:
    """Give the share of nodes on QNN in percent."""
    here = sum(part.n_nodes for part in session.info.placement if not part.reason)
    return 100 * here / sum(part.n_nodes for part in session.info.placement)


def cosine(a: NDArray[Any], b: NDArray[Any]) -> float:
    x, y = (v.astype(np.float64).ravel() for v in (a, b))
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def run(session: NpuSession, feeds: Arrays) -> dict[str, NDArray[Any]]:
    """Compute on QNN. Exits where the CPU had to step in: its answers would be compared with themselves."""
    answers = session.run(feeds)
    if session.computed_on != f"{session.info.backend}:{session.info.device}":
        sys.exit(f"{session.computed_on} has answered: {session.device_counts().last_fault}")
    return answers


def classifier(forms: Forms, n: int) -> tuple[list[harness.Figure], dict[str, Any]]:
    """Compare what QNN and the CPU see in n photographs by the same file, with 16-bit and with 8-bit activations.

    Beside it, how far both are from float.
    """
    manifest = forms.manifest(_CLASSIFIER)
    sides = {
        form: (forms.on_qnn(_CLASSIFIER, form), forms.on_cpu(_CLASSIFIER, form)) for form in ("npu-w8a16", "npu-w8a8")
    }
    float_cpu = forms.on_cpu(_CLASSIFIER, "fp32")
    seen: dict[str, list[tuple[float, bool]]] = {}
    for i, picture in enumerate(picture_set.pictures(n)):
        feeds = npu_inputs.picture_feed(manifest, picture)
        right = float_cpu.run(feeds)["logits"]
        for form, (npu, cpu) in sides.items():
            a, b = run(npu, feeds)["logits"], cpu.run(feeds)["logits"]
            for name, x, y in (
                (f"{form}: QNN, CPU", a, b),
                (f"{form}: QNN, float", a, right),
                (f"{form}: CPU, float", b, right),
            ):
                seen.setdefault(name, []).append((cosine(x, y), bool(x.argmax() == y.argmax())))
        if i % 20 == 19:
            print(f"{i + 1} pictures", flush=True)
    means = {name: np.mean(found, axis=0) for name, found in seen.items()}
    for name, (mean_cosine, same) in means.items():
        print(f"{name}: cosine {mean_cosine:.5f}, the same class {same:.1%}", flush=True)
    figures = []
    for form, (npu, cpu) in sides.items():
        mean_cosine, same = means[f"{form}: QNN, CPU"]
        figures += [
            lacking(f"{_CLASSIFIER}:{form}: nodes on QNN", placed(npu), _MIN_PLACED),
            lacking(
                f"{_CLASSIFIER}:{form}: cosine of logits to the CPU's, mean", 100 * float(mean_cosine), _MIN_COSINE
            ),
            lacking(f"{_CLASSIFIER}:{form}: first class as the CPU's, {n} photographs", 100 * float(same), _MIN_SAME),
        ]
        npu.close()
        cpu.close()
    float_cpu.close()
    return figures, {"n": n, "cosine_and_same": {name: list(map(float, found)) for name, found in means.items()}}


def loads(forms: Forms, n: int) -> tuple[list[harness.Figure], dict[str, Any]]:
    """Time the stack's compiling and its loading of what that has kept; beside it all that a load is, in turns."""
    times: dict[str, list[float]] = {"compile": [], "load": [], "whole, compiling": [], "whole, from kept": []}
    for _ in range(n):
        with tempfile.TemporaryDirectory() as folder:
            for whole in ("whole, compiling", "whole, from kept"):
                begun_s = time.monotonic()
                forms.on_qnn(_CLASSIFIER, "npu-w8a8", kept=Path(folder) / "npu").close()
                times[whole].append(time.monotonic() - begun_s)
            (kept,) = artifacts(Path(folder) / "npu")
            target, driver = kept.description.target, Client("npu_qnn", STACK.driver, STACK.python())
            told = {"soc": target.soc, "device": forms.device.id, "options": {}, "rows": 1}
            driver.call("probe", {}, timeout_s=60)  # imports the stack, which is no part of either
            with tempfile.TemporaryDirectory() as into:
                path = str(forms.file(_CLASSIFIER, "npu-w8a8").path)
                *_, compile_s = driver.call("compile", {"model": path, "folder": into, **told}, timeout_s=600)
            facts = dict(kept.description.compiled.facts)
            *_, load_s = driver.call("load", {"folder": str(kept.folder), "facts": facts, **told}, timeout_s=600)
            driver.close()
        times["compile"].append(compile_s)
        times["load"].append(load_s)
    ratios = tuple(b / a for a, b in zip(times["compile"], times["load"], strict=True))
    whole = tuple(b / a for a, b in zip(times["whole, compiling"], times["whole, from kept"], strict=True))
    figures = [
        harness.Figure(
            name=f"loading what is kept / compiling, {where}", unit="×", samples=found, at_most=_MAX_LOAD_RATIO
        )
        for where, found in (("in the host", ratios), ("processes and all", whole))
    ]
    return figures, {"seconds": times}


def boxes(session: NpuSession, boards: Sequence[Board]) -> list[FoundBoxes]:
    found = []
    for i, board in enumerate(boards):
        answers = run(session, npu_inputs.board_feed(board))
        found.append(boxes_of(*(answers[name] for name in OUTPUTS)))
        if i % 10 == 9:
            print(f"{session.info.variant}: {i + 1} boards", flush=True)
    return found


def detector(forms: Forms, boards: Sequence[Board]) -> tuple[list[harness.Figure], dict[str, Any]]:
    points, shares = {}, {}
    for form in ("npu-w8a8", "npu-w4a16"):
        session = forms.on_qnn(_DETECTOR, form)
        shares[form] = placed(session)
        points[form] = 100 * mean_average_precision(boxes(session, boards), [board.marks for board in boards]).mean
        session.close()
    lost = points["npu-w8a8"] - points["npu-w4a16"]
    return [
        lacking(f"{_DETECTOR}:npu-w4a16: nodes on QNN", shares["npu-w4a16"], 100.0),
        harness.Figure(
            name=f"{_DETECTOR}:npu-w4a16: mAP lost to npu-w8a8, {len(boards)} boards",
            unit="points",
            samples=(lost,),
            at_most=_MAX_POINTS_LOST,
        ),
    ], {"map": points, "placed": shares}


def embedding(states: NDArray[Any], mask: NDArray[Any]) -> NDArray[Any]:
    weights = mask[..., None].astype(np.float64)
    return (states * weights).sum(axis=1) / weights.sum(axis=1)


def encoder(
    forms: Forms, n: int, sets: Mapping[str, Sequence[tuple[str, str]]]
) -> tuple[list[harness.Figure], dict[str, Any]]:
    """Compare W4A16 with W8A16 and with float: n texts by the NPU, all on the CPU, where a text takes no minute.

    Accuracy is how often the second text of a pair is the nearest to its first among those of all pairs of a set.
    """
    texts = npu_inputs.Texts(forms.tokenizer())
    facts: dict[str, Any] = {}
    figures = []
    session = forms.on_qnn(_ENCODER, "npu-w4a16")
    figures.append(lacking(f"{_ENCODER}:npu-w4a16: nodes on QNN", placed(session), 100.0))
    for name, pairs in sets.items():
        feeds = [npu_inputs.text_feed(texts.ids(text)) for pair in pairs for text in pair]
        found = {form: embeddings(forms, form, feeds) for form in ("static", "npu-w8a16", "npu-w4a16")}
        hits = {form: nearest(rows[::2], rows[1::2]) for form, rows in found.items()}
        to_float = [cosine(*rows) for rows in zip(found["npu-w4a16"], found["static"], strict=True)]
        lost = 100 * (hits["npu-w8a16"].astype(float) - hits["npu-w4a16"])
        facts[name] = {form: 100 * float(right.mean()) for form, right in hits.items()}
        facts[name] |= {"least_cosine_to_float": min(to_float), "error_points": float(lost.std() / len(lost) ** 0.5)}
        print(f"{name}: {facts[name]}", flush=True)
        figures += [
            lacking(
                f"{_ENCODER}:npu-w4a16: cosine to float, mean of {len(feeds)}, {name}, on the CPU",
                100 * np.mean(to_float).item(),
                _MIN_FLOAT_COSINE,
            ),
            harness.Figure(
                name=f"{_ENCODER}:npu-w4a16: found, lost to npu-w8a16, {len(pairs)} pairs, {name}, on the CPU",
                unit="points",
                samples=(float(lost.mean()),),
                at_most=_MAX_POINTS_LOST,
            ),
        ]
    cosines = []
    output = session.info.outputs[0].name
    for feed, right in zip(feeds[:n], found["npu-w4a16"], strict=False):
        cosines.append(cosine(embedding(run(session, feed)[output], feed["attention_mask"]), right))
        print(f"{_ENCODER}: cosine of the embedding to the CPU's {cosines[-1]:.5f}", flush=True)
    session.close()
    figures.append(
        lacking(
            f"{_ENCODER}:npu-w4a16: cosine of {n} embeddings to the CPU's, mean",
            100 * np.mean(cosines).item(),
            _MIN_COSINE,
        )
    )
    return figures, facts | {"cosines": cosines}


def embeddings(forms: Forms, form: str, feeds: Sequence[Arrays]) -> NDArray[Any]:
    cpu = forms.on_cpu(_ENCODER, form)
    name = cpu.outputs[0].name
    found = [embedding(cpu.run(feed)[name], feed["attention_mask"]) for feed in feeds]
    cpu.close()
    return np.concatenate(found)


def same_meaning(path: Path, n: int) -> list[tuple[str, str]]:
    """Give n pairs of a CSV file that mean the same, spread over all of it."""
    with path.open(newline="", encoding="utf-8") as file:
        pairs = [(row["text_a"], row["text_b"]) for row in csv.DictReader(file) if row["label"] == "1"]
    n = min(n, len(pairs))
    return [pairs[at * len(pairs) // n] for at in range(n)]


def nearest(firsts: NDArray[Any], seconds: NDArray[Any]) -> NDArray[np.bool_]:
    """Say of each pair whether its second is the nearest to its first."""
    a, b = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (firsts, seconds))
    return np.asarray((a @ b.T).argmax(axis=1) == np.arange(len(a)))


def lacking(name: str, value: float, at_least: float) -> harness.Figure:
    """Tell a share in percent as what is missing to 100, of which less is better."""
    return harness.Figure(name=f"{name}, missing", unit="%", samples=(100 - value,), at_most=100 - at_least)


def main() -> None:
    arguments = harness.parse(__doc__, add_options=add_options)
    quick = arguments.quick
    if arguments.own.data:
        with unpacked(arguments.own.data) as data:
            boards = read_boards(data, "test")
    else:
        boards = npu_inputs.judge_boards(50)
    n_pairs = 20 if quick else arguments.own.max_pairs
    sets = {"halves of paragraphs": npu_inputs.halves(npu_inputs.paragraphs()[1])[:n_pairs]}
    if arguments.own.pairs:
        sets["pairs of the file"] = same_meaning(arguments.own.pairs, n_pairs)
    with tempfile.TemporaryDirectory() as kept:
        forms = Forms(Path(kept) / "npu")
        print(f"{forms.device.detail}: {forms.device.evidence}", flush=True)
        measured = {
            "loads": loads(forms, 2 if quick else 5),
            "detector": detector(forms, boards[:4] if quick else boards),
            "encoder": encoder(forms, 1 if quick else 8, sets),
            "classifier": classifier(forms, 4 if quick else picture_set.MAX_PICTURES),
        }
    figures = [figure for found, _ in measured.values() for figure in found]
    facts = {name: told for name, (_, told) in measured.items()}
    harness.finish(arguments, extra={"evidence": forms.device.evidence, "facts": facts}, figures=figures)


if __name__ == "__main__":
    main()
