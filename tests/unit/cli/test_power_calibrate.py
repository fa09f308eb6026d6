from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edge_rt.cli import main
from edge_rt.devices import cpu
from edge_rt.engine.threads import candidates
from edge_rt.power.calibration import read

CONFIG = """
[catalog]
default_model = "null"
store_dir = "{store}"
[models.null]
backend = "null"
n_ctx = 512
[power]
meter = "none"
model_file = "{file}"
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(CONFIG.format(store=tmp_path / "store", file=tmp_path / "power.json"))
    return file


def run(config_file: Path, *words: str) -> Result:
    return CliRunner().invoke(main, ["--config", str(config_file), "power", "calibrate", *words])


TYPED = ("--idle-w", "2.5", "--active-w", "6", "--seconds", "0.5", "--clock-hz", "1.5e9")


def test_watts_that_are_typed_in_make_a_file(config_file: Path, tmp_path: Path) -> None:
    done = run(config_file, *TYPED)
    assert done.exit_code == 0, done.output
    assert "1500 MHz" in done.stdout
    assert "the watts are typed in" in done.stderr
    found = read(tmp_path / "power.json")
    assert found is not None
    assert (found.idle_w, found.quality, found.boundary, found.meter) == (2.5, "derived", "board", "typed in")
    (domain,) = found.domains
    (point,) = domain.points
    assert (point.prefill_w, point.decode_w) == (6.0, 6.0)
    assert 0 < point.prefill_s_per_token < 1
    assert 0.01 <= found.utilisation <= 1


def test_fewer_threads_are_timed_and_their_watts_are_not_known(config_file: Path, tmp_path: Path) -> None:
    done = run(config_file, *TYPED)
    found = read(tmp_path / "power.json")
    assert found is not None
    n_cores = len(cpu.usable_cores())
    assert {point.n_threads for point in found.threads} == (set(candidates(n_cores)) if n_cores > 1 else set())
    assert {point.power_w for point in found.threads} <= {None}
    assert "takes about" in done.stderr
    assert "threads" in done.stdout
    assert run(config_file, *TYPED, "--no-threads").exit_code == 0
    found = read(tmp_path / "power.json")
    assert found is not None
    assert found.threads == ()


def test_another_file_and_boundary(config_file: Path, tmp_path: Path) -> None:
    assert run(config_file, *TYPED, "--boundary", "soc", "--output", str(tmp_path / "other.json")).exit_code == 0
    found = read(tmp_path / "other.json")
    assert found is not None
    assert found.boundary == "soc"
    assert not (tmp_path / "power.json").exists()


def test_without_a_meter_it_says_what_to_do(config_file: Path) -> None:
    done = run(config_file, "--seconds", "0.5")
    assert done.exit_code == 1
    assert "no meter: power.meter is none. Type in what an instrument shows" in done.stderr


def test_a_table_makes_no_other_table(config_file: Path, tmp_path: Path) -> None:
    assert run(config_file, *TYPED).exit_code == 0
    config_file.write_text(config_file.read_text().replace('meter = "none"', 'meter = "model"'))
    done = run(config_file, "--seconds", "0.5")
    assert done.exit_code == 1
    assert "is a table itself" in done.stderr


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--idle-w", "2"), "go together"),
        (("--idle-w", "5", "--active-w", "2"), "is less than"),
        (("--points", "0"), "not in the range"),
    ],
)
def test_what_does_not_fit_is_refused(config_file: Path, words: tuple[str, ...], problem: str) -> None:
    done = run(config_file, *words)
    assert done.exit_code == 2
    assert problem in done.stderr
