"""EfficientNet-Lite0 on Rockchip's NPU, in Rockchip's simulator: what 8 and 4 bit cost of its accuracy.

w8a8 for rk3588, and w4a16 for rk3576, which has 4-bit weights: a scale for 32 of an output's inputs, rounded first by
tools/round_weights.py, the first layer in 16 bit. Rounded to nearest, as the toolkit does it, 4 bit are the
end of this model (--nearest shows it). The float form on onnxruntime is what all are compared with.

The bars are the points of top-1 that are lost on 200 labelled views of 20 photographs: 1 for w8a8, 3 for w4a16. How
often both put the same class first on 200 photographs without a class is told beside. All of it ran in the simulator,
which runs what it has just built, never the exported file; it says nothing of speed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
import onnx
from numpy.typing import NDArray

from edge_rt import config
from edge_rt.backends.base import Absent, ModelFile, NpuOptions, TensorOptions, TensorSession
from edge_rt.backends.npu.rknn import NAME, RknnBackend
from edge_rt.backends.onnx_cpu import OnnxCpuBackend
from edge_rt.catalog.manifest import Manifest
from edge_rt.catalog.store import Store
from edge_rt.convert.round_weights import round_model
from tools.npu_inputs import calibration, picture_feed
from tools.picture_set import labelled_pictures, pictures

MODEL, VARIANT = "efficientnet-lite0", "fp32"
QUICK = 20
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edge_rt" / "rounded"
_GROUP = 32  # inputs that share a scale
_KEPT = ("stem",)  # in 16 bit, with the depthwise convolutions, which the toolkit itself keeps so
Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Case:
    soc: str
    dtype: str
    max_points_lost: float | None
    is_rounded: bool = False
    kept: tuple[str, ...] = ()
    method: str = ""

    @property
    def name(self) -> str:
        return f"{self.dtype} for {self.soc}" + (", rounded first" if self.is_rounded else "")


CASES = (
    Case("rk3588", "w8a8", 1.0),
    Case("rk3576", "w4a16", 3.0, is_rounded=True, kept=_KEPT, method=f"group{_GROUP}"),
)
NEAREST = Case("rk3576", "w4a16", None, kept=_KEPT, method=f"group{_GROUP}")


@dataclass(frozen=True, slots=True)
class Seen:
    """What a form of the model sees: in photographs without a class, and in views with one."""

    free: Logits
    labelled: Logits


def logits(session: TensorSession, feeds: list[Any]) -> Logits:
    return np.concatenate([session.run(feed)["logits"] for feed in feeds])


def rounded(file: ModelFile, feeds: list[Any], kept: tuple[str, ...]) -> ModelFile:
    """Give the model with its weights rounded to 4 bit, made once for these bytes and this calibration data."""
    digest = hashlib.blake2b(file.path.read_bytes() + repr((kept, _GROUP)).encode(), digest_size=8)
    for feed in feeds:
        for array in feed.values():
            digest.update(np.ascontiguousarray(array))
    path = _CACHE / f"{MODEL}-{digest.hexdigest()}.onnx"
    if not path.exists():
        print("rounding the weights, some minutes", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        made = round_model(onnx.load(str(file.path)), feeds, but=frozenset(kept), group=_GROUP)
        part = path.with_suffix(".part")
        part.write_bytes(made.SerializeToString(deterministic=True))
        part.replace(path)
    return ModelFile(model=MODEL, variant="rounded", path=path, quant="FP32")


def look(session: TensorSession, free: list[Any], labelled: list[Any]) -> Seen:
    try:
        return Seen(logits(session, free), logits(session, labelled))
    finally:
        session.close()


def report(case: Case, found: Seen, right: Seen, labels: NDArray[Any], n_bytes: int, placed: str) -> dict[str, Any]:
    cosines = (found.free * right.free).sum(axis=1) / np.prod(
        [np.linalg.norm(each, axis=1) for each in (found.free, right.free)], axis=0
    )
    hits = {name: float((seen.labelled.argmax(axis=1) == labels).mean()) for name, seen in (("f", found), ("r", right))}
    facts = {
        "case": case.name,
        "evidence": "simulator",
        "n_pictures": len(found.free),
        "n_labelled": len(labels),
        "top1": hits["f"],
        "top1_fp32": hits["r"],
        "points_lost": 100 * (hits["r"] - hits["f"]),
        "same_top1": float((found.free.argmax(axis=1) == right.free.argmax(axis=1)).mean()),
        "cosine_mean": float(cosines.mean()),
        "cosine_min": float(cosines.min()),
        "rknn_bytes": n_bytes,
        "placement": placed,
    }
    print(
        f"{case.name} (simulator): top-1 {hits['f']:.1%} of {len(labels)} labelled views, fp32 {hits['r']:.1%}; "
        f"the same class first on {facts['same_top1']:.1%} of {len(found.free)} photographs, cosine of the logits "
        f"{facts['cosine_mean']:.4f}, {facts['cosine_min']:.4f} at least; {n_bytes / 1e6:.2f} MB; {placed}",
        flush=True,
    )
    return facts


def measure(
    case: Case, manifest: Manifest, file: ModelFile, free: list[Any], labelled: list[Any]
) -> tuple[Seen, int, str]:
    """Compile a case, load it into the simulator and let it see the pictures."""
    feeds: list[Any] = calibration(manifest)
    model = rounded(file, feeds, case.kept) if case.is_rounded else file
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder, "ranges.npz"), **{name: np.concatenate([f[name] for f in feeds]) for name in feeds[0]})
        own = {"dtype": case.dtype, "dataset": str(Path(folder, "ranges.npz")), "float": ",".join(case.kept)}
        own |= {"method": case.method} if case.method else {}
        npu = NpuOptions(require="prefer", artifacts=Path(folder, "kept"), soc={NAME: case.soc}, options={NAME: own})
        # A back end of its own: one waits for a load as long as its earlier ones have let it expect.
        session = RknnBackend().load_tensor(model, TensorOptions(n_threads=1, max_batch=8, npu=npu))
        placed = ", ".join(f"{part.n_nodes} on {part.provider}" for part in session.info.placement)
        (compiled,) = Path(folder, "kept").rglob("*.rknn")
        n_bytes = compiled.stat().st_size
        seen = look(session, free, labelled)
        if n_fallbacks := session.device_counts().n_fallbacks:
            raise SystemExit(f"{n_fallbacks} runs were the CPU's: these are no figures of the simulator")
        return seen, n_bytes, placed


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nearest", action="store_true", help="show 4 bit rounded to nearest, too")


def main() -> None:
    arguments = harness.parse(__doc__, add_options=options)
    if isinstance(absent := RknnBackend().probe(), Absent):
        raise SystemExit(absent.reason)
    store = Store.open(config.load().config.catalog)
    manifest = store.get(MODEL)
    path = store.path(manifest, next(v for v in manifest.variants if v.id == VARIANT))
    if path is None:
        raise SystemExit(f"{MODEL}:{VARIANT} is not here: edge_rt models pull {MODEL}:{VARIANT}")
    file = ModelFile(model=MODEL, variant=VARIANT, path=path, quant="FP32")
    n = QUICK if arguments.quick else 200
    free: list[Any] = [picture_feed(manifest, each) for each in pictures(n)]
    views = list(labelled_pictures(n))
    labelled: list[Any] = [picture_feed(manifest, each) for each, _ in views]
    labels = np.array([label for _, label in views])
    right = look(OnnxCpuBackend().load_tensor(file, TensorOptions(n_threads=1)), free, labelled)
    told, figures = [], []
    for case in (*CASES, *([NEAREST] if arguments.own.nearest else [])):
        seen, n_bytes, placed = measure(case, manifest, file, free, labelled)
        facts = report(case, seen, right, labels, n_bytes, placed)
        told.append(facts)
        if case.max_points_lost is not None and not arguments.quick:
            lost = (facts["points_lost"],)
            figures.append(
                harness.Figure(
                    name=f"{case.name}: top-1 lost", unit="points", samples=lost, at_most=case.max_points_lost
                )
            )
    harness.finish(arguments, [], extra={"cases": told}, figures=figures)


if __name__ == "__main__":
    main()
