"""onnx_cpu against plain onnxruntime, and what it does beyond it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

from edge_rt.backends import onnx_facts  # noqa: E402
from edge_rt.backends.base import LoadOptions, ModelFile, TensorOptions  # noqa: E402
from edge_rt.backends.onnx_cpu import OnnxCpuBackend, OnnxCpuSession  # noqa: E402
from edge_rt.backends.onnx_open import known_model, lacks_copy, open_session  # noqa: E402
from edge_rt.backends.onnx_shapes import RecentShapes  # noqa: E402
from edge_rt.catalog.manifest import SHIPPED_DIR  # noqa: E402
from edge_rt.catalog.place import Place, Record  # noqa: E402
from edge_rt.errors import (  # noqa: E402
    BackendLoadError,
    BackendStepError,
    BackendUnavailableError,
    InvalidRequestError,
)
from tests.tensor_models import (  # noqa: E402
    conv,
    helper,
    identity,
    int4,
    int8,
    make,
    nested,
    rows,
    saved,
    with_external_data,
)

Feeds = dict[str, NDArray[Any]]


def load(file: ModelFile, **options: Any) -> OnnxCpuSession:
    return OnnxCpuBackend().load_tensor(file, TensorOptions(n_threads=1, **options))


def plain(file: ModelFile, feeds: Feeds) -> list[NDArray[Any]]:
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = 1
    session = ort.InferenceSession(str(file.path), settings, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def noise(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(1).standard_normal(shape, np.float32)


@pytest.mark.parametrize(
    ("model", "feeds"),
    [
        (conv(), {"x": noise(2, 3, 17, 9)}),
        (rows(), {"x": noise(5, 4)}),
        (int8(), {"x": noise(3, 16)}),
        (int4(4), {"x": noise(3, 64)}),
        (nested(3), {"x": noise(1)}),
    ],
    ids=["conv", "rows", "int8", "int4", "nested"],
)
@pytest.mark.parametrize("copied", [False, True])
def test_answers_are_onnxruntimes_bit_for_bit(model: Any, feeds: Feeds, copied: bool, tmp_path: Path) -> None:
    file = saved(model, tmp_path / "m.onnx")
    expected = plain(file, feeds)
    for _ in range(2 if copied else 1):  # the second load finds the copy that the first has made
        session = load(stored(file) if copied else file, graph_cache=Place(file.path).graph if copied else None)
        assert Place(file.path).graph.exists() == copied
        for name, wanted in zip(session.run(feeds), expected, strict=True):
            answer = session.run(feeds)[name]
            assert answer.tobytes() == wanted.tobytes()
        session.close()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[OnnxCpuSession, Any]:
    file = saved(conv(), tmp_path_factory.mktemp("conv") / "m.onnx")
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = 1
    return load(file, max_shapes=2), ort.InferenceSession(str(file.path), settings, providers=["CPUExecutionProvider"])


@given(n=st.integers(0, 3), height=st.integers(1, 40), width=st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_answers_do_not_depend_on_the_shapes_before(both: Any, n: int, height: int, width: int) -> None:
    ours, theirs = both
    feed = noise(n, 3, height, width)
    assert ours.run({"x": feed})["y"].tobytes() == theirs.run(None, {"x": feed})[0].tobytes()


ALONE = """
import sys
from pathlib import Path
import numpy as np
from edge_rt.backends.base import ModelFile, TensorOptions
from edge_rt.backends.onnx_cpu import OnnxCpuBackend
from edge_rt.devices.memory import process_rss_bytes
file = ModelFile(model="m", variant="", path=Path(sys.argv[1]), quant="")
session = OnnxCpuBackend().load_tensor(file, TensorOptions(n_threads=1, max_shapes=2, is_alone=sys.argv[2] == "alone"))
answers, sizes = [], []
for n in (64, 1, 1, 8, 1, 512, 8, 1, 2):
    x = np.random.default_rng(n).standard_normal((n, 3, 64, 64), np.float32)
    answers.append(float(session.run({"x": x})["y"].astype(np.float64).sum()))
    del x
    sizes.append(process_rss_bytes().value)
print(answers, "|", max(sizes[5:]) - sizes[-1])
"""


def test_alone_in_its_process_a_model_answers_the_same_and_gives_its_memory_back(tmp_path: Path) -> None:
    file = saved(conv(), tmp_path / "m.onnx")
    said = {}
    for how in ("alone", "beside others"):
        done = subprocess.run(
            [sys.executable, "-c", ALONE, str(file.path), how], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        said[how], _, freed = done.stdout.partition("|")
        assert int(freed) > 64 * 2**20  # of 512 rows, whose values take 64 MiB for each of two operators
    assert said["alone"] == said["beside others"]


def stored(file: ModelFile) -> ModelFile:
    """Give the file the record that makes it one of the store's."""
    data = file.path.read_bytes()
    if Place(file.path).read_record() is None:
        Place(file.path).write_record(Record(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data)))
        file.path.write_bytes(data)
    return file


def test_matmulnbits_always_computes_with_8_bit_activations(tmp_path: Path) -> None:
    feeds = {"x": noise(2, 64)}
    (expected,) = plain(saved(int4(4), tmp_path / "fast.onnx"), feeds)
    for level in (None, 0, 1):
        file = saved(int4(level), tmp_path / "m.onnx")
        assert plain(file, feeds)[0].tobytes() != expected.tobytes()
        assert load(file).run(feeds)["y"].tobytes() == expected.tobytes()


def test_a_rewritten_graph_still_finds_its_weights_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feeds, folder = {"x": noise(2, 64)}, tmp_path / "model"
    folder.mkdir()
    (expected,) = plain(saved(int4(4), tmp_path / "fast.onnx"), feeds)
    file = saved(with_external_data(int4(0), folder), folder / "m.onnx")
    monkeypatch.chdir(tmp_path)
    assert load(file).run(feeds)["y"].tobytes() == expected.tobytes()


def test_a_damaged_copy_is_made_anew(tmp_path: Path) -> None:
    file = stored(saved(conv(), tmp_path / "m.onnx"))
    copy, feeds = Place(file.path).graph, {"x": noise(1, 3, 8, 8)}
    load(file, graph_cache=copy)
    whole = copy.read_bytes()
    for damaged in (whole[:-1], b"\xff" * len(whole), whole[:50] + b"\xff" + whole[51:]):
        copy.write_bytes(damaged)
        session = load(file, graph_cache=copy)
        assert session.run(feeds)["y"].tobytes() == plain(file, feeds)[0].tobytes()
        assert copy.read_bytes() != damaged
        made = copy.stat()
        load(file, graph_cache=copy)  # takes it as it is; onnxruntime does not write the same bytes each time
        assert (copy.stat().st_ino, copy.stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns)


@pytest.mark.parametrize("model", [conv(), rows(), int8(), int4(4), nested(3)])
def test_what_the_checks_found_is_kept_with_the_copy(model: Any, tmp_path: Path) -> None:
    file = stored(saved(model, tmp_path / "m.onnx"))
    options = TensorOptions(n_threads=1, graph_cache=Place(file.path).graph)
    backend, again = OnnxCpuBackend(), fresh(file)
    first = backend.load_tensor(file, options)
    assert backend.supports_tensor(again, options) is None
    assert backend.estimate_tensor(again, options) == backend.estimate_tensor(file, options)
    assert backend.load_tensor(again, options).info == first.info
    assert "onnx" not in vars(again)  # what the property keeps: the file has not been read again
    assert known_model(ort, again, options) == file.onnx


def test_a_model_too_large_to_be_copied_is_prepared_only_once(tmp_path: Path) -> None:
    file = stored(saved(rows(), tmp_path / "m.onnx"))
    options = TensorOptions(n_threads=1, graph_cache=Place(file.path).graph)
    assert lacks_copy(ort, file, options)
    for _ in range(2):
        _, model = open_session(ort, file, options, 1, max_copy_bytes=10)
        assert model == file.onnx
        assert not lacks_copy(ort, file, options)
    assert known_model(ort, file, options) is None


def test_facts_are_not_believed_of_other_checks_or_processors_or_once_changed(tmp_path: Path) -> None:
    file = stored(saved(rows(), tmp_path / "m.onnx"))
    copy, options = Place(file.path).graph, TensorOptions(n_threads=1, graph_cache=Place(file.path).graph)
    load(file, graph_cache=copy)
    assert known_model(ort, file, options) == file.onnx
    assert known_model(ort, file, options, features=lambda: frozenset({"abacus"})) is None
    assert known_model(ort, file, options, checks=lambda: "stricter") is None
    # Somebody widens an input in the facts: the copy is refused, and what the file says counts.
    whole = copy.read_bytes()
    at = whole.rindex(b'"shape":[-1,4]')
    copy.write_bytes(whole[:at] + b'"shape":[-1,8]' + whole[at + 14 :])
    assert known_model(ort, file, options) is None
    assert load(fresh(file), graph_cache=copy).inputs == file.onnx.inputs
    assert known_model(ort, file, options) == file.onnx


def test_any_change_of_the_checks_is_seen(tmp_path: Path) -> None:
    for path in Path(onnx_facts.__file__).parent.glob("onnx_*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert onnx_facts.checks_digest(tmp_path) == onnx_facts.checks_digest()
    with (tmp_path / "onnx_model.py").open("a") as file:
        file.write("#")
    assert onnx_facts.checks_digest(tmp_path) != onnx_facts.checks_digest()


def fresh(file: ModelFile) -> ModelFile:
    """Give the same file without what has been found of it."""
    return ModelFile(model=file.model, variant=file.variant, path=file.path, quant=file.quant)


def test_a_model_with_custom_operators_needs_a_library(tmp_path: Path) -> None:
    node = helper.make_node("Twice", ["x"], ["y"], domain="acme")
    model = make([node], [("x", 1, [2])], [("y", 1, [2])])
    model.opset_import.append(helper.make_opsetid("acme", 1))
    file = saved(model, tmp_path / "m.onnx")
    with pytest.raises(BackendLoadError, match=r"operators of acme.*tensor\.custom_op_libraries"):
        load(file)
    with pytest.raises(BackendLoadError, match="onnxruntime says"):
        load(file, custom_op_libraries=(tmp_path / "absent.so",))


def test_what_onnxruntime_refuses_is_a_load_error_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = make([helper.make_node("NoSuchOperator", ["x"], ["y"])], [("x", 1, [2])], [("y", 1, [2])])
    with pytest.raises(BackendLoadError, match=r"onnxruntime says: .*NoSuchOperator") as refused:
        load(saved(model, tmp_path / "m.onnx"))
    assert "\n" not in str(refused.value)
    assert capfd.readouterr() == ("", "")


def test_values_that_the_model_cannot_compute_are_the_requests_fault(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    node = helper.make_node("Reshape", ["x", "s"], ["y"])
    model = make([node], [("x", 1, ["n"]), ("s", 7, [2])], [("y", 1, [None, None])])
    session = load(saved(model, tmp_path / "m.onnx"))
    with pytest.raises(
        InvalidRequestError, match=r"inputs: cannot be computed by this model: onnxruntime says: .*Reshape"
    ):
        session.run({"x": noise(6), "s": np.array([4, 4])})
    assert session.run({"x": noise(6), "s": np.array([2, 3])})["y"].shape == (2, 3)
    assert capfd.readouterr() == ("", "")


def test_an_index_past_the_end_of_a_table_is_the_requests_fault(tmp_path: Path) -> None:
    model = make([helper.make_node("Gather", ["x", "i"], ["y"])], [("x", 1, ["n"]), ("i", 7, ["m"])], [("y", 1, ["m"])])
    session = load(saved(model, tmp_path / "m.onnx"))
    with pytest.raises(InvalidRequestError, match="idx=9 must be within"):
        session.run({"x": noise(6), "i": np.array([9])})


def test_memory_that_is_not_there_is_not_the_requests_fault(tmp_path: Path) -> None:
    node = helper.make_node("Expand", ["x", "s"], ["y"])
    session = load(saved(make([node], [("x", 1, [1]), ("s", 7, ["r"])], [("y", 1, [None])]), tmp_path / "m.onnx"))
    with pytest.raises(BackendStepError, match="onnxruntime says"):
        session.run({"x": noise(1), "s": np.array([2**46])})


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    session = load(saved(identity(8, ["n"]), tmp_path / "m.onnx"))
    with pytest.raises(InvalidRequestError, match="x: element 1 is not UTF-8"):
        session.run({"x": np.array([b"a", b"\xff"], object)})
    with pytest.raises(InvalidRequestError, match="x: element 0 is int, not bytes"):
        session.run({"x": np.array([1], object)})
    given = np.array(["é", b"b"], object)
    assert session.run({"x": given})["y"].tolist() == ["é".encode(), b"b"]


def test_the_placement_names_every_node(tmp_path: Path) -> None:
    (part,) = load(saved(conv(), tmp_path / "m.onnx")).info.placement
    assert part.provider == "CPUExecutionProvider"
    assert dict(part.kinds) == {"Conv": 2, "Relu": 1}
    assert part.n_nodes == 3


def test_a_language_model_is_refused() -> None:
    backend, options = OnnxCpuBackend(), LoadOptions(n_ctx=64)
    file = ModelFile(model="qwen", variant="", path=Path("m.gguf"), quant="")
    assert "qwen is a language model" in (backend.supports(file, options) or "")
    for call in (backend.load, backend.estimate):
        with pytest.raises(BackendLoadError, match="runs tensor models"):
            call(file, options)


def test_without_the_package_the_back_end_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    absent: Any = OnnxCpuBackend().probe()
    assert (absent.extra, "onnxruntime" in absent.reason) == ("onnx", True)
    with pytest.raises(BackendUnavailableError, match=r"edge_rt\[onnx\]"):
        OnnxCpuBackend().load_tensor(ModelFile(model="m", variant="", path=Path("m"), quant=""), TensorOptions())


def feed(n_rows: int) -> Feeds:
    return {"x": np.zeros((n_rows, 4), np.float32)}


def test_memory_is_given_back_once_no_recent_shape_needs_it() -> None:
    recent = RecentShapes(3)
    assert not any(recent.note(feed(n)) for n in (1, 2, 100, 1, 2))  # the large one is among the last three
    assert [recent.note(feed(n)) for n in (3, 1, 2)] == [True, False, False]
    assert not any(recent.note(feed(n)) for n in (4, 5, 6, 7, 8, 2, 3))


def test_ten_thousand_shapes_are_not_remembered() -> None:
    recent = RecentShapes(8)
    for n in range(10_000):
        recent.note({"x": np.empty((n, 0), np.float32)})
    assert len(recent._bytes) == 8


def test_a_copy_that_the_runtime_cannot_read_again_is_made_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # What onnxruntime 1.32 writes of convolutions in both the graph and a branch of an If.
    shipped = SHIPPED_DIR / "pcb-kind.fp32.onnx"
    (tmp_path / shipped.name).write_bytes(shipped.read_bytes())
    file = stored(ModelFile(model="m", variant="v", path=tmp_path / shipped.name, quant=""))
    copy = Place(file.path).graph
    feeds = {name: np.full((1, 1, 48, 48), 255, np.uint8) for name in ("image", "golden")}
    answers = [load(file, graph_cache=copy).run(feeds, ("logits", "stopped")) for _ in range(3)]
    assert caplog.text.count("cannot be used") <= 1
    assert all(np.array_equal(a["logits"], answers[0]["logits"]) for a in answers)
    assert copy.stat().st_size == 1024 or not caplog.text
