"""Models of the catalog with their products on the FPGA's engine: its golden model, and one whole model on the RTL.

Simulated. In every test the engine's own count of jobs says that it did the work.
"""

import io
import os
import shutil

import numpy as np
import pytest

ort = pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")

from edge_rt import config  # noqa: E402
from edge_rt.backends import fpga_onnx  # noqa: E402
from edge_rt.backends.base import ModelFile, TensorOptions  # noqa: E402
from edge_rt.backends.fpga_engine import FpgaEngine  # noqa: E402
from edge_rt.backends.fpga_layout import Layout  # noqa: E402
from edge_rt.backends.fpga_onnx_plan import DEFAULT_RULE, Rule  # noqa: E402
from edge_rt.backends.fpga_products import place  # noqa: E402
from edge_rt.backends.onnx_cpu import OnnxCpuBackend  # noqa: E402
from edge_rt.catalog.manifest import SHIPPED_DIR  # noqa: E402
from edge_rt.catalog.store import Store  # noqa: E402
from edge_rt.engine.images import prepare  # noqa: E402
from hw.fpga.sim.build import CONFIGS, build  # noqa: E402
from hw.fpga.sim.engine import RtlEngine  # noqa: E402
from hw.fpga.sim.port import CheckedPort  # noqa: E402
from tests import samples  # noqa: E402
from tests.fpga_engines import golden_opener  # noqa: E402
from tools.pcb.average_precision import iou  # noqa: E402
from tools.pcb.detect import MIN_SHOWN, boxes_of  # noqa: E402
from tools.pcb.drawn import draw_boards  # noqa: E402

OPTIONS = TensorOptions(n_threads=1)
ALL = Rule(min_intensity=0)


def shipped(name):
    return ModelFile(model="pcb-defect", variant="", path=SHIPPED_DIR / name, quant="")


def check_engine(session, n_products):
    """The engine has computed so many products, and the CPU none in its place."""
    report = session.report()
    assert (report.n_products, report.n_on_cpu, report.n_faults) == (n_products, 0, 0)


@pytest.mark.parametrize("form", ["int4", "int8"])
@pytest.mark.parametrize(("rule", "n_products"), [(DEFAULT_RULE, 5), (ALL, 8)])
def test_the_detector_finds_the_flaws_that_it_finds_on_the_cpu(form, rule, n_products):
    file = shipped(f"pcb-defect.{form}.onnx")
    session = fpga_onnx.load(file, OPTIONS, golden_opener(), rule)
    on_engine = sum(
        n for part in session.info.placement for kind, n in part.kinds if kind == "Conv" and not part.reason
    )
    assert on_engine == len(session.plan.products) == n_products
    (board,) = draw_boards(1, 77_777)
    feeds = {"image": board.picture[None, None], "golden": board.golden[None, None]}
    found, wanted = (
        boxes_of(*(out[name] for name in ("heat", "offset", "size")))
        for out in (session.run(feeds), OnnxCpuBackend().load_tensor(file, OPTIONS).run(feeds))
    )
    check_engine(session, n_products)
    shown, on_cpu = (boxes[boxes[:, 4] >= MIN_SHOWN] for boxes in (found, wanted))
    assert len(shown) == len(on_cpu) > 3
    nearest = iou(shown, on_cpu).argmax(axis=1)
    assert sorted(nearest) == list(range(len(on_cpu)))
    np.testing.assert_array_equal(shown[:, 5], on_cpu[nearest, 5])
    np.testing.assert_allclose(shown[:, :4], on_cpu[nearest, :4], atol=1.0)
    np.testing.assert_allclose(shown[:, 4], on_cpu[nearest, 4], atol=0.03)


def stored(store, model, variant_id):
    manifest = store.get(model)
    path = store.path(manifest, manifest.variant(variant_id))
    if path is None:
        pytest.skip(f"{model}:{variant_id} is not in the local store")
    return ModelFile(model=model, variant=variant_id, path=path, quant="INT8"), manifest


@pytest.fixture(scope="module")
def store():
    """This machine's own, found before _clean_environment empties the environment."""
    return Store.open(config.load().config.catalog, os.environ)


@pytest.fixture(scope="module")
def efficientnet(store):
    """The file in the store, and the pictures as its pipeline prepares them."""
    file, manifest = stored(store, "efficientnet-lite0", "int8")
    image = pytest.importorskip("PIL.Image")
    pictures = [image.open(io.BytesIO(data)).convert("RGB") for data in samples.samples(*samples.IMAGENET).values()]
    return file, [prepare(picture, manifest.pipeline.image)[0][None] for picture in pictures]


@pytest.mark.model
def test_efficientnet_sees_what_it_sees_on_the_cpu(efficientnet):
    file, pictures = efficientnet
    session = fpga_onnx.load(file, OPTIONS, golden_opener())
    kinds = {kind: n for part in session.info.placement if not part.reason for kind, n in part.kinds}
    assert (kinds["Conv"], kinds["Gemm"]) == (24, 1)
    assert sum(part.n_nodes for part in session.info.placement if "depthwise" in part.reason) == 16
    on_cpu = OnnxCpuBackend().load_tensor(file, OPTIONS)
    batch = np.concatenate(pictures[:6])
    found = session.run({"image": batch})["logits"]
    check_engine(session, 24 * len(batch) + 1)
    wanted = on_cpu.run({"image": batch})["logits"]
    np.testing.assert_array_equal(found.argmax(axis=1), wanted.argmax(axis=1))
    cosines = (found * wanted).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(wanted, axis=1)
    assert cosines.min() > 0.99


SENTENCES = (
    "The conveyor belt has stopped moving.",
    "The transport band stands still.",
    "Water boils at 100 degrees Celsius.",
    "At 212 Fahrenheit liquid water turns to steam.",
)


@pytest.mark.model
def test_minilm_embeds_as_on_the_cpu_with_all_its_weights_on_the_engine(store):
    """36 matrices of INT8, which the file multiplies with floats; the engine rounds those."""
    file, manifest = stored(store, "minilm-l6", "int8")
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(
        str(store.asset_path(manifest, manifest.assets[0]))
    )
    session, on_cpu = fpga_onnx.load(file, OPTIONS, golden_opener()), OnnxCpuBackend().load_tensor(file, OPTIONS)
    vectors = []
    for sentence in SENTENCES:
        ids = np.array([tokenizer.encode(sentence).ids], np.int64)
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        for each in (session, on_cpu):
            mean = each.run(feeds)["last_hidden_state"].mean(axis=1)[0]
            vectors.append(mean / np.linalg.norm(mean))
    check_engine(session, 36 * len(SENTENCES))
    found, wanted = np.array(vectors[::2]), np.array(vectors[1::2])
    assert (found * wanted).sum(axis=1).min() > 0.999
    likeness = found @ found.T - 2 * np.eye(len(found))
    assert likeness.argmax(axis=1).tolist() == [1, 0, 3, 2]


@pytest.mark.skipif(shutil.which("verilator") is None, reason="needs verilator: apt-get install verilator")
def test_the_whole_detector_runs_through_the_rtl_bit_for_bit(tmp_path):
    """A crop of 64 pixels, every quantised convolution: each sum and each output has the golden model's bits."""
    model = onnx.load(SHIPPED_DIR / "pcb-defect.int8.onnx")
    del model.graph.value_info[:]
    for value in (*model.graph.input, *model.graph.output):
        sizes = value.type.tensor_type.shape.dim
        for dim in sizes[2:]:
            dim.dim_value //= 10
    onnx.save(model, tmp_path / "crop.onnx")
    file = ModelFile(model="crop", variant="", path=tmp_path / "crop.onnx", quant="")
    name, ports = "kv260-gemm", []

    def rtl(matrices):
        placement = place(matrices, Layout(CONFIGS[name].beat_bits), CONFIGS[name].n_vectors)
        ports.append(CheckedPort(RtlEngine.open(build(CONFIGS[name]), placement.memory_bytes), layout=placement.layout))
        return FpgaEngine.load(ports[0], matrices, close=ports[0].engine.close)

    golden = golden_opener(name)
    (board,) = draw_boards(1, 77_777)
    feeds = {n: p[None, None, 100:164, 200:264].copy() for n, p in (("image", board.picture), ("golden", board.golden))}
    sessions = [fpga_onnx.load(file, OPTIONS, opener, ALL) for opener in (rtl, golden)]
    found, wanted = (session.run(feeds) for session in sessions)
    check_engine(sessions[0], 8)
    assert len(ports[0].jobs) > 100
    assert (ports[0].n_wrong, ports[0].n_sums > 10_000) == (0, True)
    for output in ("heat", "offset", "size"):
        np.testing.assert_array_equal(found[output].view(np.uint32), wanted[output].view(np.uint32))
    for session in sessions:
        session.close()
