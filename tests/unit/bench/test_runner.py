from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt.backends.base import LoadOptions, ModelFile, SeqRows
from edge_rt.backends.null import NullBackend, NullSession
from edge_rt.bench.runner import Plan, Result, Runner, Sensors, Target
from edge_rt.bench.workload import Case
from edge_rt.devices.base import Reading, known, unknown
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.errors import ModelTooLargeError

FILE = ModelFile(model="null", variant="", path=Path("null"), quant="none")


class ClockNs:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


class LoggedSession(NullSession):
    """Takes 10 ns a step and 1 ns a row on the shared clock, and keeps what was asked of it."""

    def __init__(self, file: ModelFile, options: LoadOptions, clock: ClockNs, log: list[str]) -> None:
        super().__init__(file, options)
        self._clock, self._log = clock, log

    def decode(self, batch: Sequence[SeqRows]) -> list[NDArray[np.float32]]:
        n_rows = sum(len(rows.token_ids) for rows in batch)
        self._clock.now += 10 + n_rows
        self._log.append(f"{n_rows}@{batch[0].start}")
        return super().decode(batch)

    def seq_trim(self, seq_id: int, n_tokens: int) -> None:
        self._log.append(f"trim{n_tokens}")
        super().seq_trim(seq_id, n_tokens)

    def set_threads(self, n_threads: int) -> None:
        self._log.append(f"threads{n_threads}")
        super().set_threads(n_threads)

    def close(self) -> None:
        self._log.append("close")
        super().close()


class LoggedBackend(NullBackend):
    def __init__(self, *, can_trim: bool = True) -> None:
        self.clock, self.log, self.can_trim = ClockNs(), list[str](), can_trim
        self.options: list[LoadOptions] = []

    def load(self, file: ModelFile, options: LoadOptions) -> NullSession:
        self.options.append(options)
        session = LoggedSession(file, options, self.clock, self.log)
        if not self.can_trim:
            object.__setattr__(session.caps, "can_trim", False)
        return session


class FakeSensors(Sensors):
    """Uses 2 J per pass; heats up by a degree each time it is asked."""

    def __init__(self, root: SysfsRoot, *, energy: bool = True) -> None:
        super().__init__(root)
        self._joules, self._celsius, self._energy = 0.0, 40.0, energy

    def energy_mark(self) -> float:
        return self._joules

    def energy_j(self, mark: float) -> Reading[float]:
        if not self._energy:
            return unknown("/sys/class/powercap", "no counter")
        self._joules += 2.0
        return known(self._joules - mark, "rapl")

    def temp_c(self) -> Reading[float]:
        self._celsius += 1.0
        return known(self._celsius, "zone0")


def _target(backend: LoggedBackend) -> Target:
    return Target(backend=backend, detail="for tests", file=FILE)


def _case(n_prompt: int = 0, n_gen: int = 0, n_depth: int = 0, n_batch: int = 64, n_threads: int = 1) -> Case:
    return Case(n_prompt=n_prompt, n_gen=n_gen, n_depth=n_depth, n_batch=n_batch, n_ubatch=n_batch, n_threads=n_threads)


def _run(backend: LoggedBackend, *cases: Case, plan: Plan, tmp_path: Path) -> list[Result]:
    runner = Runner(plan, sensors=FakeSensors(SysfsRoot(tmp_path)), clock_ns=backend.clock)
    return list(runner.run([_target(backend)], cases))


def test_a_prompt_is_prefilled_in_batches_and_timed_alone(tmp_path: Path) -> None:
    backend = LoggedBackend()
    (result,) = _run(backend, _case(n_prompt=100), plan=Plan(repetitions=2, warmup=False), tmp_path=tmp_path)
    assert backend.log == ["threads1", "trim0", "64@0", "36@64", "trim0", "64@0", "36@64", "close"]
    assert [r.elapsed_ns for r in result.repetitions] == [120, 120]
    assert [r.prompt_ns for r in result.repetitions] == [120, 120]
    assert result.repetitions[0].token_ns == ()


def test_tokens_are_decoded_one_by_one_and_each_is_timed(tmp_path: Path) -> None:
    backend = LoggedBackend()
    (result,) = _run(backend, _case(n_gen=3), plan=Plan(repetitions=1, warmup=False), tmp_path=tmp_path)
    assert backend.log == ["threads1", "trim0", "1@0", "1@1", "1@2", "close"]
    assert result.repetitions[0].token_ns == (11, 11, 11)
    assert result.repetitions[0].elapsed_ns == 33
    assert result.repetitions[0].prompt_ns is None


def test_the_depth_is_computed_once_and_never_timed(tmp_path: Path) -> None:
    backend = LoggedBackend()
    (result,) = _run(
        backend, _case(n_prompt=8, n_gen=2, n_depth=70), plan=Plan(repetitions=2, warmup=False), tmp_path=tmp_path
    )
    timed = ["8@70", "1@78", "1@79"]
    assert backend.log == ["threads1", "trim0", "64@0", "6@64", *timed, "trim70", *timed, "close"]
    assert [r.elapsed_ns for r in result.repetitions] == [40, 40]
    assert result.repetitions[0].prompt_ns == 18


def test_a_model_that_cannot_trim_gets_its_depth_anew(tmp_path: Path) -> None:
    backend = LoggedBackend(can_trim=False)
    _run(backend, _case(n_gen=1, n_depth=5), plan=Plan(repetitions=2, warmup=False), tmp_path=tmp_path)
    assert backend.log == ["threads1", "trim0", "5@0", "1@5", "trim0", "5@0", "1@5", "close"]


def test_the_warm_up_runs_the_prompt_and_one_token_outside_the_times(tmp_path: Path) -> None:
    backend = LoggedBackend()
    (result,) = _run(backend, _case(n_prompt=8, n_gen=4), plan=Plan(repetitions=1), tmp_path=tmp_path)
    assert backend.log[1:4] == ["trim0", "8@0", "1@8"]
    assert result.repetitions[0].elapsed_ns == 18 + 4 * 11
    assert len(result.repetitions) == 1


def test_cases_with_equal_batches_share_a_model_with_room_for_the_longest(tmp_path: Path) -> None:
    backend = LoggedBackend()
    cases = (_case(n_prompt=8), _case(n_gen=4, n_depth=30, n_threads=2), _case(n_prompt=8, n_batch=32))
    results = _run(backend, *cases, plan=Plan(repetitions=1), tmp_path=tmp_path)
    assert [(o.n_ctx, o.n_batch, o.n_seq_max) for o in backend.options] == [(34, 64, 1), (8, 32, 1)]
    assert [r.case for r in results] == list(cases)
    assert [line for line in backend.log if line.startswith(("threads", "close"))] == [
        "threads1",
        "threads2",
        "close",
        "threads1",
        "close",
    ]


def test_sensors_are_read_around_the_passes(tmp_path: Path) -> None:
    (result,) = _run(LoggedBackend(), _case(n_gen=2), plan=Plan(repetitions=3), tmp_path=tmp_path)
    assert [r.energy_j.value for r in result.repetitions] == [2.0, 2.0, 2.0]
    assert result.peak_temp_c.value == 44.0
    assert result.throttled.value is None
    assert "no throttle counter" in result.throttled.reason
    assert result.rss_bytes.reason.startswith("this kernel or container has no such file")


def test_a_missing_energy_counter_is_a_reason(tmp_path: Path) -> None:
    backend = LoggedBackend()
    sensors = FakeSensors(SysfsRoot(tmp_path), energy=False)
    runner = Runner(Plan(repetitions=1), sensors=sensors, clock_ns=backend.clock)
    (result,) = runner.run([_target(backend)], [_case(n_gen=1)])
    assert result.repetitions[0].energy_j.value is None
    assert result.repetitions[0].energy_j.reason == "no counter"


def test_the_device_cools_before_each_case_and_steps_are_announced(tmp_path: Path) -> None:
    backend, slept, lines = LoggedBackend(), list[float](), list[str]()
    runner = Runner(
        Plan(repetitions=1, delay_s=30.0),
        sensors=FakeSensors(SysfsRoot(tmp_path)),
        announce=lines.append,
        clock_ns=backend.clock,
        sleep=slept.append,
    )
    list(runner.run([_target(backend)], [_case(n_gen=1), _case(n_prompt=1)]))
    assert slept == [30.0, 30.0]
    assert lines == [
        "benchmark 1/2: loading null",
        "benchmark 1/2: tg1: cooling for 30 s",
        "benchmark 1/2: tg1: warm-up",
        "benchmark 1/2: tg1: run 1/1",
        "benchmark 2/2: pp1: cooling for 30 s",
        "benchmark 2/2: pp1: warm-up",
        "benchmark 2/2: pp1: run 1/1",
    ]


def test_a_model_that_is_not_admitted_is_not_loaded(tmp_path: Path) -> None:
    backend = LoggedBackend()

    def admit(target: Target, options: LoadOptions) -> None:
        raise ModelTooLargeError(model=target.file.model, need_bytes=options.n_ctx, have_bytes=0)

    runner = Runner(Plan(), sensors=FakeSensors(SysfsRoot(tmp_path)), admit=admit)
    with pytest.raises(ModelTooLargeError):
        list(runner.run([_target(backend)], [_case(n_gen=1)]))
    assert backend.options == []


def test_the_model_is_closed_when_the_reader_stops_early(tmp_path: Path) -> None:
    backend = LoggedBackend()
    runner = Runner(Plan(repetitions=1), sensors=FakeSensors(SysfsRoot(tmp_path)), clock_ns=backend.clock)
    results = runner.run([_target(backend)], [_case(n_gen=1), _case(n_gen=2)])
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert backend.log[-1] == "close"


def test_faults_of_the_null_model_are_never_drawn(tmp_path: Path) -> None:
    """A uniform draw would hit its abort token and end the process."""
    (result,) = _run(LoggedBackend(), _case(n_prompt=3000), plan=Plan(repetitions=1), tmp_path=tmp_path)
    assert len(result.repetitions) == 1
