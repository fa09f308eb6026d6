"""A model on an NPU that is lost, hangs and comes back: real host processes, a fake clock, a driver that plays it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_rt.backends.base import Absent, NpuOptions, TensorOptions, TensorSession
from edge_rt.backends.npu.hosted import Limits
from edge_rt.backends.npu.session import NpuEvent, NpuSession
from edge_rt.errors import (
    AcceleratorLostError,
    AcceleratorMemoryError,
    BackendLoadError,
    BackendStepError,
    BackendUnavailableError,
    InvalidRequestError,
    NotOnAcceleratorError,
    VersionSkewError,
)
from edge_rt.tensor_types import ChipNeeds
from tests.fakes import FakeClock
from tests.npu.fake_npu import FakeNpu, double
from tests.patience import until

pytestmark = pytest.mark.stub
X = np.arange(8, dtype=np.float32).reshape(2, 4)
RETRY_S = 1.0
BACK_S = 10.0  # the longest that a chip that is back may be left alone, while requests come


@dataclass
class Rig:
    """A loaded session with what it was made of."""

    npu: FakeNpu
    session: NpuSession
    clock: FakeClock
    events: list[NpuEvent] = field(default_factory=list)

    def run(self) -> str:
        """Compute X, and name the place that has."""
        np.testing.assert_array_equal(self.session.run({"x": X})["y"], X * 2)
        return self.session.computed_on

    def kill(self) -> None:
        assert self.session.host_pid is not None
        os.kill(self.session.host_pid, signal.SIGKILL)


Make = Callable[..., Rig]


def _things() -> tuple[int, int]:
    """Count this process's open files and threads."""
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


@pytest.fixture
def npu(tmp_path: Path) -> FakeNpu:
    (tmp_path / "fake").mkdir()
    return FakeNpu(tmp_path / "fake")


@pytest.fixture
def load(npu: FakeNpu, tmp_path: Path) -> Iterator[Make]:
    loaded: list[NpuSession] = []

    def make(
        *,
        require: str = "prefer",
        rows: int = 2,
        limits: Limits | None = None,
        needs: ChipNeeds | None = None,
        **options: Any,
    ) -> Rig:
        if limits is not None:
            npu.limits = limits
        backend = npu.backend()
        clock = FakeClock()
        rig = Rig(npu, None, clock)  # type: ignore[arg-type]
        backend.session_parts = {"clock": clock, "start": lambda work: work(), "tell": rig.events.append}
        kept = NpuOptions(require=require, artifacts=tmp_path / "kept", retry_s=RETRY_S, needs=needs)  # type: ignore[arg-type]
        file = double(tmp_path / f"m{rows}.onnx", rows=rows)
        rig.session = backend.load_tensor(file, TensorOptions(n_threads=1, npu=kept, **options))
        loaded.append(rig.session)
        return rig

    yield make
    for session in loaded:
        session.close()


def test_a_model_runs_there_and_says_so(load: Make) -> None:
    rig = load()
    assert rig.run() == "npu_fake:fake0"
    info = rig.session.info
    assert (info.backend, info.device, info.evidence) == ("npu_fake", "fake0", "stub")
    assert [(part.provider, part.n_nodes, part.reason) for part in info.placement] == [("FAKE", 4, "")]
    assert rig.events == []
    told = rig.session.telemetry()
    assert (told.upload_s, told.power_w, told.power_source, told.temp_c, told.temp_source) == (
        0.001,
        1.5,
        "vendor",
        None,
        "none",
    )


def test_it_is_compiled_once_for_all_loads(load: Make, npu: FakeNpu) -> None:
    for _ in range(3):
        load().session.close()
    assert npu.calls().count("compile") == 1
    (npu.folder / "version").write_text("1.1")
    load()
    assert npu.calls().count("compile") == 2


def test_a_lost_chip_is_told_once_and_the_cpu_answers_the_very_request(load: Make) -> None:
    rig = load()
    rig.run()
    rig.kill()
    for _ in range(5):
        assert rig.run() == "onnx_cpu:cpu"
    assert rig.session.state() == "open"
    (event,) = rig.events
    assert (event.kind, event.backend, event.model, event.answers) == ("lost", "npu_fake", "tiny", "cpu")
    assert "SIGKILL" in event.reason
    counts = rig.session.device_counts()
    assert (counts.n_products, counts.n_fallbacks, counts.n_faults) == (1, 5, 1)
    assert "SIGKILL" in counts.last_fault


def test_the_placement_says_where_the_model_is_now(load: Make) -> None:
    rig = load()
    before = rig.session.info = replace(rig.session.info, task="classify", max_batch=4, backend_reason="because")
    rig.run()
    rig.kill()
    rig.run()
    (part,) = rig.session.info.placement
    assert (part.provider, part.n_nodes, part.kinds, "SIGKILL" in part.reason) == ("CPU", 1, (("Mul", 1),), True)
    assert replace(rig.session.info, placement=before.placement) == before
    rig.clock.advance(RETRY_S)
    assert rig.run() == "npu_fake:fake0"
    assert rig.session.info == before


@contextmanager
def broken(npu: FakeNpu, call: str, how: str) -> Iterator[None]:
    npu.breaks(call, how)
    yield
    npu.works(call)


@pytest.mark.parametrize(
    ("call", "how", "away_s"),
    [
        ("import", "hang", 0.0),  # each try of these takes as long as a load may
        ("load", "hang", 0.0),
        *(
            (call, how, 12.0)
            for call, how in [("import", "die"), ("load", "memory"), ("load", "bad file"), ("run", "die")]
        ),
    ],
)
def test_it_comes_back_soon_after_the_chip_has(load: Make, npu: FakeNpu, call: str, how: str, away_s: float) -> None:
    rig = load(limits=Limits(load_s=4.0 if how == "hang" else 20.0))
    rig.run()
    rig.kill()
    with broken(npu, call, how):
        assert rig.run() == "onnx_cpu:cpu"
        gone_s = 0.0
        while gone_s < away_s:
            rig.clock.advance(1.0)
            gone_s += 1.0
            assert rig.run() == "onnx_cpu:cpu"
    waited_s = 0.0
    while rig.run() != "npu_fake:fake0":
        rig.clock.advance(0.5)
        waited_s += 0.5
        assert waited_s < BACK_S
    assert [event.kind for event in rig.events] == ["lost", "back"]
    assert rig.events[1].lost_s == pytest.approx(away_s + waited_s)
    assert rig.session.state() == "closed"
    assert rig.session._cpu is None  # its memory is given back


def test_no_thread_is_started_while_nobody_asks_or_the_pause_lasts(load: Make, npu: FakeNpu) -> None:
    rig = load()
    rig.kill()
    rig.run()
    n_loads = npu.calls().count("load")
    rig.clock.advance(RETRY_S / 2)
    rig.run()
    rig.clock.advance(1000.0)
    assert npu.calls().count("load") == n_loads
    rig.run()
    assert npu.calls().count("load") == n_loads + 1


def test_a_library_that_dies_when_it_is_imported_leaves_the_model_to_the_cpu(load: Make, npu: FakeNpu) -> None:
    with broken(npu, "import", "die"):
        rig = load()
        assert rig.run() == "onnx_cpu:cpu"
        (event,) = rig.events
        assert "SIGSEGV" in event.reason
        (part,) = rig.session.info.placement
        assert (part.provider, "SIGSEGV" in part.reason) == ("CPU", True)
    rig.clock.advance(RETRY_S)
    assert rig.run() == "npu_fake:fake0"
    assert [part.provider for part in rig.session.info.placement] == ["FAKE"]


def test_a_probe_that_hangs_leaves_the_model_to_the_cpu(load: Make, npu: FakeNpu) -> None:
    with broken(npu, "probe", "hang"):
        rig = load(limits=Limits(probe_s=0.5))
        assert rig.run() == "onnx_cpu:cpu"
    (event,) = rig.events
    assert "did not answer probe within 0.5 s" in event.reason


def test_a_library_that_is_slow_to_import_is_found_by_a_look_that_went_on(load: Make, npu: FakeNpu) -> None:
    with broken(npu, "import", "die"):
        # No host has answered within the later limit by then: Python alone takes longer to start.
        rig = load(limits=Limits(next_probe_s=0.01))
    with broken(npu, "import", "wait"):
        rig.clock.advance(5 * RETRY_S)
        assert rig.run() == "onnx_cpu:cpu"
        assert "did not answer probe within 0.01 s" in rig.session._reason

    def is_back() -> bool:
        rig.clock.advance(5 * RETRY_S)
        return rig.run() == "npu_fake:fake0"

    until(is_back)
    assert [event.kind for event in rig.events] == ["lost", "back"]


def test_a_library_that_hangs_does_not_keep_the_one_that_is_back_from_being_found(load: Make, npu: FakeNpu) -> None:
    with broken(npu, "import", "die"):
        rig = load(limits=Limits(next_probe_s=2.0))
    with broken(npu, "import", "hang"):
        rig.clock.advance(5 * RETRY_S)
        assert rig.run() == "onnx_cpu:cpu"
    begun_s = time.monotonic()
    rig.clock.advance(5 * RETRY_S)
    assert rig.run() == "npu_fake:fake0"
    assert time.monotonic() - begun_s < Limits().probe_s, "it has waited for the one that hangs"


def test_a_run_that_fails_is_told_and_answered_by_the_cpu(load: Make, npu: FakeNpu) -> None:
    rig = load()
    with broken(npu, "run", "HTP graph execute error 6001"):
        assert rig.run() == "onnx_cpu:cpu"
    (event,) = rig.events
    assert "6001" in event.reason


def test_a_run_that_hangs_is_bounded(load: Make, npu: FakeNpu) -> None:
    rig = load(limits=Limits(run_s=4.0))
    with broken(npu, "run", "hang"):
        assert rig.run() == "onnx_cpu:cpu"
    (event,) = rig.events
    assert "did not answer run within" in event.reason


@pytest.mark.parametrize("rows", [2, 0])
@pytest.mark.parametrize("how", ["shape", "rows", "type"])
def test_arrays_that_are_none_of_the_models_are_no_answer(load: Make, npu: FakeNpu, rows: int, how: str) -> None:
    rig = load(rows=rows)
    npu.breaks("answers", how)
    assert rig.run() == "onnx_cpu:cpu"
    (event,) = rig.events
    assert (event.kind, event.reason[:11]) == ("lost", "its y is of")


@pytest.mark.parametrize("rows", [2, 0])
def test_arrays_that_nobody_has_asked_for_are_left_out(load: Make, npu: FakeNpu, rows: int) -> None:
    rig = load(rows=rows)
    npu.breaks("answers", "more")
    assert rig.run() == "npu_fake:fake0"
    assert rig.session.run({"x": X}).keys() == {"y"}
    assert rig.events == []


@pytest.mark.parametrize("damage", ["truncated", "gone"])
def test_what_was_damaged_since_it_was_loaded_is_never_given_to_the_loader_again(
    load: Make, npu: FakeNpu, tmp_path: Path, damage: str
) -> None:
    rig = load()
    (compiled,) = (tmp_path / "kept").glob("*/model.bin")
    compiled.write_text("fk1 but short") if damage == "truncated" else compiled.unlink()
    rig.kill()
    assert rig.run() == "onnx_cpu:cpu"
    rig.clock.advance(RETRY_S)
    assert rig.run() == "npu_fake:fake0"
    assert compiled.read_text() == "fk1 m2.onnx"
    assert npu.calls().count("compile") == 2


def test_losses_leave_nothing_behind(load: Make, npu: FakeNpu) -> None:
    rig = load()

    def lose() -> None:
        rig.kill()
        assert rig.run() == "onnx_cpu:cpu"
        rig.clock.advance(5 * RETRY_S)
        assert rig.run() == "npu_fake:fake0"

    lose()
    before = _things()
    for _ in range(20):
        lose()
    # Hosts that other tests have left hanging may end meanwhile.
    assert all(now <= then for now, then in zip(_things(), before, strict=True))
    assert [event.kind for event in rig.events] == ["lost", "back"] * 21


def test_a_request_that_is_wrong_does_not_blame_the_npu(load: Make, npu: FakeNpu) -> None:
    rig = load()
    with pytest.raises(InvalidRequestError):
        rig.session.run({"x": X[:1]})
    assert rig.session.state() == "closed"
    assert rig.run() == "npu_fake:fake0"


def test_where_the_npu_is_required_a_lost_chip_is_an_error(load: Make, npu: FakeNpu) -> None:
    rig = load(require="npu")
    rig.kill()
    for _ in range(2):
        with pytest.raises(AcceleratorLostError, match="SIGKILL"):
            rig.session.run({"x": X})
    assert rig.events[0].answers == "none"
    assert rig.session.device_counts().n_fallbacks == 0
    rig.clock.advance(RETRY_S)
    assert rig.run() == "npu_fake:fake0"


def test_where_the_npu_is_required_a_request_that_it_fails_costs_no_other_its_answer(load: Make, npu: FakeNpu) -> None:
    rig = load(require="npu")
    host = rig.session.host_pid
    npu.breaks("refuses", "7")
    with pytest.raises(BackendStepError, match="graph execute error 1100"):
        rig.session.run({"x": np.full((2, 4), 7, np.float32)})
    assert (rig.session.state(), rig.events, rig.session.host_pid) == ("closed", [], host)
    assert rig.run() == "npu_fake:fake0"
    with broken(npu, "run", "HTP graph execute error 6001"), pytest.raises(BackendStepError, match="6001"):
        rig.session.run({"x": X})
    assert [event.kind for event in rig.events] == ["lost"], "one that fails what is right too is the chip's fault"


def test_a_model_that_the_cpu_has_not_says_so_and_stays_on_its_npu(load: Make, npu: FakeNpu) -> None:
    def open_cpu() -> TensorSession:
        raise BackendLoadError(model="tiny", reason="onnxruntime has no such operator")

    rig = load()
    rig.session._open_cpu = open_cpu
    npu.breaks("refuses", "7")
    with pytest.raises(BackendStepError, match="graph execute error 1100"):
        rig.session.run({"x": np.full((2, 4), 7, np.float32)})
    assert (rig.session.state(), rig.run()) == ("closed", "npu_fake:fake0")
    rig.kill()
    with pytest.raises(AcceleratorLostError, match=r"SIGKILL; the CPU cannot take its place: .* no such operator"):
        rig.run()
    rig.clock.advance(RETRY_S)
    assert rig.run() == "npu_fake:fake0"


@pytest.mark.parametrize("how", ["die", "hang", "memory"])
def test_where_the_npu_is_required_a_load_that_fails_is_an_error(load: Make, npu: FakeNpu, how: str) -> None:
    with broken(npu, "load", how), pytest.raises((AcceleratorLostError, AcceleratorMemoryError)):
        load(require="npu", limits=Limits(load_s=0.5 if how == "hang" else 20.0))


def test_memory_that_does_not_suffice_is_told_as_that(load: Make, npu: FakeNpu) -> None:
    with broken(npu, "compile", "memory"), pytest.raises(AcceleratorMemoryError) as full:
        load(require="npu")
    assert (full.value.model, full.value.backend) == ("tiny", "npu_fake")
    assert "MEM_ALLOC" in full.value.reason


def test_nodes_on_the_cpu_are_told_and_refused_where_the_npu_is_required(load: Make, npu: FakeNpu) -> None:
    (npu.folder / "n_cpu").write_text("1")
    rig = load()
    assert [(part.provider, part.n_nodes, part.reason) for part in rig.session.info.placement] == [
        ("FAKE", 3, ""),
        ("CPU", 1, "the chip has no Erf"),
    ]
    with pytest.raises(NotOnAcceleratorError, match=r"1 of tiny's 4 nodes to the CPU: Erf \(the chip has no Erf\)"):
        load(require="npu")


def test_a_model_of_which_nothing_is_on_the_npu_is_refused(load: Make, npu: FakeNpu) -> None:
    (npu.folder / "n_cpu").write_text("4")
    with pytest.raises(NotOnAcceleratorError, match="would leave 4 of tiny's 4 nodes"):
        load()


@pytest.mark.parametrize(
    ("needs", "soc", "words"),
    [
        (ChipNeeds(weight_bits=8, activation_bits=8), "fk1", ""),
        (ChipNeeds(weight_bits=8, activation_bits=8, granularity="channel"), "fk1", ""),
        (
            ChipNeeds(weight_bits=8, activation_bits=8, granularity="block"),
            "fk1",
            "8-bit weights with a scale for each b",
        ),
        (
            ChipNeeds(weight_bits=4, activation_bits=16),
            "fk1",
            "it wants 4-bit weights and 16-bit activations, and fk1 was",
        ),
        (
            ChipNeeds(weight_bits=8, activation_bits=8, socs=("fk2", "fk3")),
            "fk1",
            "it is for fk2, fk3, and the chip is fk1",
        ),
    ],
)
def test_a_form_that_the_chip_has_not_is_refused_before_it_is_compiled(
    load: Make, npu: FakeNpu, needs: ChipNeeds, soc: str, words: str
) -> None:
    if not words:
        assert load(needs=needs).run() == "npu_fake:fake0"
        assert npu.calls().count("capabilities") == 1
        load(needs=needs)
        assert npu.calls().count("capabilities") == 1, "what is kept was taken by the compiler"
        return
    with pytest.raises(BackendLoadError) as refused:
        load(needs=needs)
    for said in (words, "npu_fake: its form", "`edge_rt models show tiny` lists other forms", "npu.soc.npu_fake"):
        assert said in str(refused.value)
    assert "compile" not in npu.calls()


def test_what_a_chip_computes_in_is_no_reason_where_it_cannot_be_tried(load: Make, npu: FakeNpu) -> None:
    with broken(npu, "capabilities", "no such call"):
        assert load(needs=ChipNeeds(weight_bits=4, activation_bits=16)).run() == "npu_fake:fake0"


def test_what_will_not_load_is_compiled_once_more(load: Make, npu: FakeNpu, tmp_path: Path) -> None:
    load().session.close()
    (made,) = (tmp_path / "kept").glob("*/model.bin")
    made.write_text("of another chip")
    rig = load()  # what was written is not what is there: it is not even tried
    assert rig.run() == "npu_fake:fake0"
    assert npu.calls().count("compile") == 2
    with broken(npu, "load", "bad file"), pytest.raises(BackendLoadError, match="bad file"):
        load()
    assert npu.calls().count("compile") == 3


def test_a_form_by_other_versions_is_told_where_it_cannot_be_made_anew(load: Make, npu: FakeNpu) -> None:
    load().session.close()
    (npu.folder / "version").write_text("1.1")
    with broken(npu, "compile", "absent"), pytest.raises(VersionSkewError) as skew:
        load()
    assert (skew.value.made_with, skew.value.have) == ("1.0, 1.0", "1.1, 1.1")
    assert "must be compiled anew where FAKE's compiler is" in str(skew.value)
    load()  # with a compiler it just is


def test_without_a_compiler_and_anything_kept_the_stack_is_not_there(load: Make, npu: FakeNpu) -> None:
    with broken(npu, "compile", "absent"), pytest.raises(BackendUnavailableError, match=r"libFake\.so"):
        load()


def test_any_number_of_rows_is_computed_part_by_part(load: Make) -> None:
    rig = load(rows=0)
    for n in (0, 1, 2, 5):
        x = np.arange(4 * n, dtype=np.float32).reshape(n, 4)
        answer = rig.session.run({"x": x})["y"]
        np.testing.assert_array_equal(answer, x * 2)
        assert answer.dtype == np.float32
    assert rig.session.inputs[0].shape == (-1, 4)


def test_a_closed_session_says_so_and_its_host_is_gone(load: Make) -> None:
    rig = load()
    rig.session.close()
    rig.session.close()
    with pytest.raises(BackendStepError, match="closed"):
        rig.session.run({"x": X})


def test_a_stack_that_is_not_installed_is_absent(npu: FakeNpu) -> None:
    absent = Absent(reason="onnxruntime-fake is not installed", extra="npu-fake")
    assert npu.backend(installed=lambda: absent).probe() == absent
    assert npu.calls() == []


def test_a_stack_whose_library_is_missing_is_here_and_says_what_fails(npu: FakeNpu) -> None:
    with broken(npu, "import", "absent"):
        (device,) = npu.backend().probe()  # type: ignore[misc]
    assert "libFake.so" in device.fault


def test_an_event_is_one_line_of_names_and_values() -> None:
    event = NpuEvent(kind="lost", backend="npu_fake", model="m", reason="it's gone", answers="cpu")
    assert str(event) == 'event=npu_lost backend=npu_fake model=m answers=cpu reason="it\'s gone"'
    assert str(replace(event, kind="back", lost_s=3.21)) == "event=npu_back backend=npu_fake model=m lost_s=3.2"
