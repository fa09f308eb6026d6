"""Load damaged ONNX files and run what loads: `python -m tests.onnx_fuzz SEED N [fpga]`, a process of its own.

fpga cuts them for the FPGA's engine, whose golden model computes their products.

Prints what it is about to load, then how it ended: if onnxruntime ends the process, the last line says at what.
"""

from __future__ import annotations

import random
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from onnx import ModelProto

from edge_rt.backends.base import DTYPES, ModelFile, TensorBackend, TensorOptions
from edge_rt.backends.onnx_cpu import OnnxCpuBackend
from edge_rt.errors import BackendLoadError, BackendStepError, InvalidRequestError, ModelFormatError
from tests import tensor_models

MAX_ADDRESS_BYTES = 4 * 2**30
MODELS: tuple[Callable[[], ModelProto], ...] = (
    tensor_models.conv,
    tensor_models.rows,
    tensor_models.int8,
    lambda: tensor_models.int4(4),
    lambda: tensor_models.int4(None),
    lambda: tensor_models.nested(3),
)
WITH_PRODUCTS: tuple[Callable[[], ModelProto], ...] = (
    tensor_models.int8,
    lambda: tensor_models.int4(None),
    tensor_models.rows_with_product,
    lambda: tensor_models.identity_beside_product(1),
    lambda: tensor_models.quantised_conv(
        np.random.default_rng(0), np.full((4, 8, 3, 3), 9, np.int8), shape=(1, 8, 6, 6), pads=[1, 1, 1, 1]
    ),
)
_NUMBERS = (-1, 0, 1, 2, 3, 7, 127, 255, 2**15, 2**31 - 1, 2**31, 2**40, 2**63 - 1)


def flip(data: bytes, rng: random.Random) -> bytes:
    """Change up to three bits."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def cut(data: bytes, rng: random.Random) -> bytes:
    """Leave out a piece, at the end or in the middle."""
    at = rng.randrange(len(data))
    return data[:at] + (data[at + rng.randint(1, 40) :] if rng.random() < 0.5 else b"")


def edit(data: bytes, rng: random.Random) -> bytes:
    """Change one field of the structure into something that is still protobuf."""
    model = ModelProto.FromString(data)
    graph = model.graph
    node = rng.choice(graph.node)
    edits: list[Callable[[], object]] = [
        lambda: node.input.append(rng.choice(node.output or ["x"])),
        lambda: node.ClearField("input"),
        lambda: node.output.extend(list(node.output)),
        lambda: setattr(node, "op_type", rng.choice(["Conv", "Loop", "Scan", "If", "MatMul", "Reshape", "Gather"])),
        lambda: setattr(node, "domain", rng.choice(["", "com.microsoft", "ai.onnx.ml"])),
        lambda: node.ClearField("attribute"),
        lambda: setattr(graph.output[0], "name", rng.choice(["x", "nowhere"])),
        lambda: graph.node.reverse(),
        lambda: graph.node.append(node),
        lambda: setattr(model.opset_import[0], "version", rng.choice([7, 9, 11, 13, 21, 22])),
        lambda: setattr(graph.input[0].type.tensor_type, "elem_type", rng.choice([1, 2, 7, 8, 9, 10, 16])),
    ]
    if node.attribute:
        attribute = rng.choice(node.attribute)
        edits += [
            lambda: setattr(attribute, "i", rng.choice(_NUMBERS)),
            lambda: attribute.ints.append(rng.choice(_NUMBERS)),
            lambda: setattr(attribute, "name", "pads"),
            lambda: setattr(attribute, "type", rng.randint(0, 14)),
        ]
    if graph.initializer:
        tensor = rng.choice(graph.initializer)
        edits += [
            lambda: tensor.dims.append(rng.choice(_NUMBERS)),
            lambda: tensor.dims.reverse(),
            lambda: tensor.ClearField("dims"),
            lambda: setattr(tensor, "data_type", rng.randint(0, 25)),
            lambda: setattr(tensor, "raw_data", rng.randbytes(len(tensor.raw_data))),
            lambda: setattr(tensor, "name", rng.choice(["x", "y"])),
            lambda: setattr(tensor, "data_location", 1),
        ]
    for change in rng.sample(edits, rng.randint(1, 2)):
        change()
    return model.SerializeToString()


def outcome(path: Path, backend: TensorBackend) -> str:
    """Load, run once with ones, and name how it ended; what is not ours leaves the process."""
    file = ModelFile(model="m", variant="", path=path, quant="")
    try:
        backend.estimate_tensor(file, TensorOptions())
        session = backend.load_tensor(file, TensorOptions(n_threads=1))
    except (ModelFormatError, BackendLoadError) as exc:
        return type(exc).__name__
    feeds = {}
    for spec in session.inputs:
        shape = tuple(2 if size < 0 else size for size in spec.shape)
        if np.prod(shape) > 10**6:
            return "too large to run"
        feeds[spec.name] = np.full(shape, b"a" if spec.datatype == "BYTES" else 1, DTYPES[spec.datatype])
    try:
        session.run(feeds)
    except (BackendStepError, InvalidRequestError) as exc:
        return type(exc).__name__
    return "answered"


def main() -> None:
    seed, n_files = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_BYTES, MAX_ADDRESS_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    rng = random.Random(seed)
    backend: TensorBackend = OnnxCpuBackend()
    models = MODELS
    if sys.argv[3:] == ["fpga"]:
        from tests.fpga_engines import SimulatedFpga

        backend, models = SimulatedFpga(), WITH_PRODUCTS
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        for i in range(n_files):
            damage = rng.choice([flip, cut, edit, edit])
            data = damage(rng.choice(models)().SerializeToString(), rng)
            path.write_bytes(data)
            print(f"{i} {damage.__name__}", end=" ", flush=True)
            print(outcome(path, backend), flush=True)


if __name__ == "__main__":
    main()
