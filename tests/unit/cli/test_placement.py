from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edge_rt.cli import main
from edge_rt.scheduler.profile import read

MANIFEST = """
id = "tiny"
name = "Tiny"
license = "MIT"
kind = "tensor"
n_params = 1

[[variants]]
id = "fp32"
quant = "FP32"
file = "tiny.onnx"
source = "{source}"
size_bytes = {size}
sha256 = "{sha256}"

[[variants]]
id = "int8"
quant = "INT8"
file = "tiny.int8.onnx"
source = "{source}8"
size_bytes = 7
sha256 = "{zeros}"
backends = ["no_such_npu"]
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A configuration whose catalog has one small model, of which one form has been pulled."""
    pytest.importorskip("onnxruntime")
    from tests.tensor_models import conv  # needs onnx

    raw = conv().SerializeToString()
    source = tmp_path / "source" / "tiny.onnx"
    source.parent.mkdir()
    source.write_bytes(raw)
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    text = MANIFEST.format(
        source=source.as_uri(), size=len(raw), sha256=hashlib.sha256(raw).hexdigest(), zeros="0" * 64
    )
    (manifests / "tiny.toml").write_text(text)
    path = tmp_path / "config.toml"
    path.write_text(
        f'[server]\nsocket_path = "{tmp_path / "none.sock"}"\n'
        f'[catalog]\nstore_dir = "{tmp_path / "store"}"\nmanifest_dirs = ["{manifests}"]\n'
        '[models.trio]\nbackend = "null"\nvariant = "run_s=0.05,power_w=8 | run_s=0.01,power_w=2"\n'
    )
    assert run(path, "models", "pull", "tiny:fp32").exit_code == 0
    return path


def run(config_file: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["--config", str(config_file), *arguments])


def test_measuring_a_model_replaces_the_guess_and_the_table_says_so(config_file: Path, tmp_path: Path) -> None:
    before = run(config_file, "placement", "tiny")
    assert before.exit_code == 0, before.output
    assert "1   fp32       onnx_cpu:cpu  ~20" in before.stdout
    assert "int8  not pulled; edge_rt models pull tiny:int8" in before.stdout
    bench = run(config_file, "bench", "-m", "tiny", "-r", "3", "-b", "1", "-o", "json", "--save-profile")
    assert bench.exit_code == 0, bench.output
    (row,) = json.loads(bench.stdout)
    assert (row["model"], row["variant"], row["batch_size"], row["n_runs"]) == ("tiny", "fp32", 1, 3)
    assert 0 < row["latency_min_s"] <= row["latency_p50_s"] <= row["latency_p95_s"]
    assert (row["energy_j"] is None) == bool(row["energy_reason"])
    ((entry,), problems) = read(tmp_path / "store" / "profile.json")
    assert problems == ()
    assert entry.latency_s == row["latency_p50_s"]
    assert "onnxruntime" in entry.versions
    after = json.loads(run(config_file, "placement", "tiny", "--json").stdout)
    assert after["candidates"][0]["is_profiled"]
    assert after["candidates"][0]["latency_s"] == entry.latency_s


def test_a_profile_that_is_damaged_is_said_to_be(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "store" / "profile.json").write_text("{}")
    shown = run(config_file, "placement", "tiny")
    assert shown.exit_code == 0
    assert "damaged" in shown.stderr
    assert "guessed" in shown.stdout


def test_scripts_of_null_devices_go_by_the_policy(config_file: Path) -> None:
    shown = json.loads(run(config_file, "placement", "trio", "--policy", "energy", "--json").stdout)
    assert [row["place"] for row in shown["candidates"]] == ["null:null1", "null:null0"]
    assert shown["policy"] == "energy"
    assert all("simulated" in row["reason"] for row in shown["candidates"])


def test_errors_are_told(config_file: Path) -> None:
    assert "not in the catalog" in run(config_file, "placement", "nope").stderr
    assert "tiny:int2" in run(config_file, "placement", "tiny:int2").stderr
    assert "a chain of models" in run(config_file, "placement", "pp-ocrv4").stderr
    assert run(config_file, "bench", "--save-profile").exit_code == 2


def test_a_language_models_forms_are_refused_until_they_are_pulled(config_file: Path) -> None:
    shown = run(config_file, "placement", "smollm2-135m-instruct")
    assert shown.exit_code == 0, shown.output
    assert "not pulled; edge_rt models pull smollm2-135m-instruct:q4_1" in shown.stdout
