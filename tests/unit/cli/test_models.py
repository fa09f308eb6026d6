from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edge_rt.backends.dispatch import PREFERENCE
from edge_rt.cli import main
from tests.gguf_files import tiny_llama

CONTENT = tiny_llama(linear="Q8_0").encode()
MANIFEST = """
id = "tiny"
name = "Tiny"
license = "Apache-2.0"
kind = "text"
arch = "llama"
n_ctx = 64
n_ctx_train = 128
n_params = 1000

[[variants]]
id = "q8_0"
quant = "Q8_0"
file = "tiny.Q8_0.gguf"
source = "file:{source}"
size_bytes = {size}
sha256 = "{sha256}"

[[variants]]
id = "q4_0"
quant = "Q4_0"
file = "tiny.Q4_0.gguf"
derived_from = "q8_0"
"""


@dataclass
class Models:
    """`edge_rt models` with a store, a manifest and a configuration of its own."""

    config: Path
    root: Path
    source: Path

    def __call__(self, *args: str) -> Result:
        return CliRunner().invoke(main, ["--config", str(self.config), "models", *args])

    def rows(self) -> dict[str, dict[str, object]]:
        """What `list --json` says of the tiny model, by variant."""
        rows = json.loads(self("list", "--json").stdout)
        return {row["variant"]: row for row in rows if row["model"] == "tiny"}


@pytest.fixture
def models(tmp_path: Path) -> Models:
    source, manifests, config = tmp_path / "source.gguf", tmp_path / "manifests", tmp_path / "config.toml"
    source.write_bytes(CONTENT)
    manifests.mkdir()
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    (manifests / "tiny.toml").write_text(MANIFEST.format(source=source, size=len(CONTENT), sha256=sha256))
    config.write_text(
        f"""
        [catalog]
        store_dir = "{tmp_path}/store"
        manifest_dirs = ["{manifests}"]
        default_model = "tiny"
        [models.tiny]
        variant = "q8_0"
        """
    )
    return Models(config, tmp_path / "store" / "models" / "tiny", source)


def test_a_file_of_ones_own_comes_and_goes(models: Models, tmp_path: Path) -> None:
    own = tmp_path / "Own.gguf"
    own.write_bytes(tiny_llama().encode())
    result = models("import", str(own))
    assert (result.exit_code, result.stdout) == (0, "own\n")
    assert "own: checking" in result.stderr
    assert "--license says what it is" in result.stderr
    listed = {row["model"]: row for row in json.loads(models("list", "--json").stdout)}
    assert (listed["own"]["state"], listed["own"]["license"]) == ("pulled", "LicenseRef-unknown")
    assert models("verify", "own").exit_code == 0
    again = models("import", str(own))
    assert again.exit_code == 1
    assert "models rm own" in again.stderr
    assert models("rm", "own").exit_code == 0
    assert "own" not in models("list").stdout
    assert models("import", str(own), "--license", "MIT").exit_code == 0
    assert "--vocab" in models("import", str(tmp_path), "--id", "x").stderr


def test_list_shows_what_there_is_and_what_is_here(models: Models) -> None:
    result = models("list")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0].split() == ["MODEL", "KIND", "VARIANT", "QUANT", "SIZE", "STATE", "LICENSE"]
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("tiny")]
    assert rows == [
        ["tiny", "text", "q8_0*", "Q8_0", str(len(CONTENT)), "B", "absent", "Apache-2.0"],
        ["tiny", "text", "q4_0", "Q4_0", "?", "absent", "Apache-2.0"],
    ]
    assert f"store: {models.root.parent.parent}" in result.stderr


def test_list_for_scripts(models: Models) -> None:
    models("pull", "tiny:q8_0")
    row = models.rows()["q8_0"]
    assert row == {
        "model": "tiny",
        "kind": "text",
        "variant": "q8_0",
        "quant": "Q8_0",
        "size_bytes": len(CONTENT),
        "state": "pulled",
        "have_bytes": len(CONTENT),
        "license": "Apache-2.0",
        "picked": True,
        "default": True,
        "path": str(models.root / "tiny.Q8_0.gguf"),
    }
    assert models.rows()["q4_0"]["path"] is None


def test_pull_without_a_name_takes_the_default_model_as_configured(models: Models) -> None:
    result = models("pull")
    assert result.exit_code == 0
    assert result.stdout == f"{models.root / 'tiny.Q8_0.gguf'}\n"
    assert "tiny:q8_0: fetching" in result.stderr
    assert "tiny:q8_0: ready" in result.stderr
    assert (models.root / "tiny.Q8_0.gguf").read_bytes() == CONTENT


def test_pull_derives_with_the_real_quantiser(models: Models) -> None:
    pytest.importorskip("llama_cpp", reason="the back end llama_cpu is not installed")
    result = models("pull", "tiny:q4_0", "--json")
    assert result.exit_code == 0, result.stderr
    assert [row["path"] for row in json.loads(result.stdout)] == [str(models.root / "tiny.Q4_0.gguf")]
    rows = models.rows()
    assert {row["state"] for row in rows.values()} == {"pulled"}
    assert rows["q4_0"]["size_bytes"] == (models.root / "tiny.Q4_0.gguf").stat().st_size
    shown = json.loads(models("show", "tiny:q4_0", "--json").stdout)
    (variant,) = shown["variants"]
    assert variant["made_by"].startswith("llama-cpp-python")
    assert variant["sha256"] == hashlib.sha256((models.root / "tiny.Q4_0.gguf").read_bytes()).hexdigest()


@pytest.mark.parametrize("flag", [("--offline",), ()])
def test_pull_offline(flag: tuple[str, ...], models: Models) -> None:
    if not flag:
        models.config.write_text(models.config.read_text().replace("[catalog]", "[catalog]\noffline = true"))
    result = models("pull", *flag)
    assert result.exit_code == 1
    assert "--offline forbids fetching" in result.stderr
    assert result.stdout == ""


def test_errors_are_one_line_and_exit_code_1(models: Models) -> None:
    models.source.unlink()
    for args in (("pull",), ("pull", "big"), ("show", "big"), ("rm", "big"), ("verify", "tiny"), ("rm", "tiny:q2_k")):
        result = models(*args)
        assert result.exit_code == 1, args
        assert sum(line.startswith("edge_rt:") for line in result.stderr.splitlines()) == 1
        assert "Traceback" not in result.stderr


def test_show(models: Models) -> None:
    before = models("show", "tiny")
    assert before.exit_code == 0
    assert ["source", f"file:{models.source}"] in [line.split() for line in before.stdout.splitlines()]
    assert "layers" not in before.stdout
    models("pull")
    shown = json.loads(models("show", "tiny", "--json").stdout)
    assert [v["variant"] for v in shown["variants"]] == ["q8_0", "q4_0"]
    assert (shown["variants"][0]["layers"], shown["variants"][0]["vocabulary"]) == (2, 64)
    assert shown["variants"][0]["chat_template"] == "in the file"
    assert shown["license"] == "Apache-2.0"


@pytest.mark.parametrize(
    ("kind", "name", "shown"),
    [
        ("text", "tiny", ["q8_0", "q4_0", "poems", "prose"]),
        ("text", "tiny:q4_0", ["q4_0"]),
        ("text", "tiny:poems", ["poems"]),
        ("tensor", "tiny", ["q8_0", "q4_0", "labels", "ranges"]),
        ("tensor", "tiny:q4_0", ["q4_0", "labels", "ranges"]),
    ],
)
def test_show_tells_of_what_is_named(kind: str, name: str, shown: list[str], models: Models, tmp_path: Path) -> None:
    path = tmp_path / "manifests" / "tiny.toml"
    text = path.read_text()
    if kind == "tensor":
        text = re.sub(r"(arch|n_ctx|n_ctx_train) = .*\n", "", text).replace('"text"', '"tensor"')
    beside = {"tensor": {"labels": "assets", "ranges": "materials"}, "text": {"poems": "adapters", "prose": "adapters"}}
    for file_id, table in beside[kind].items():
        facts = f'source = "file:/x"\nsize_bytes = 1\nsha256 = "{"a" * 64}"\n'
        text += f'\n[[{table}]]\nid = "{file_id}"\nfile = "tiny.{file_id}"\n{facts}'
    path.write_text(text)
    told = json.loads(models("show", name, "--json").stdout)
    roles = ("variant", "asset", "material", "adapter")
    assert [row[role] for row in (*told["variants"], *told["assets"]) for role in roles if role in row] == shown


def test_show_says_which_back_end_would_run_a_file(models: Models) -> None:
    pytest.importorskip("llama_cpp", reason="the back end llama_cpu is not installed")
    models("pull")
    here, absent = json.loads(models("show", "tiny", "--json").stdout)["variants"]
    assert here["backend"] in PREFERENCE
    assert (here["backend"] == PREFERENCE[0]) == (here["backend_reason"] is None)
    assert (absent["backend"], absent["backend_reason"]) == (None, None)


def test_verify(models: Models) -> None:
    empty = models("verify")
    assert empty.exit_code == 0
    assert "nothing has been pulled" in empty.stderr
    models("pull")
    result = models("verify")
    assert (result.exit_code, result.stdout) == (0, f"ok {models.root / 'tiny.Q8_0.gguf'}\n")
    raw = bytearray(CONTENT)
    raw[-1] ^= 1
    (models.root / "tiny.Q8_0.gguf").write_bytes(raw)
    result = models("verify", "tiny")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "sha256 is" in result.stderr


def test_rm(models: Models) -> None:
    models("pull")
    result = models("rm", "tiny")
    assert result.exit_code == 0
    assert " freed" in result.stderr
    assert models.rows()["q8_0"]["state"] == "absent"
    result = models("rm", "tiny")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "was not here" in result.stderr


def test_rm_removes_nothing_when_one_name_is_unknown(models: Models) -> None:
    models("pull")
    assert models("rm", "tiny", "big").exit_code == 1
    assert models.rows()["q8_0"]["state"] == "pulled"


@pytest.mark.parametrize("name", ["list", "pull", "show", "verify", "rm"])
def test_help_has_an_answer(name: str, models: Models) -> None:
    result = models(name, "--help")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) > 6


def test_a_bad_manifest_is_named_and_stops_nothing(models: Models, tmp_path: Path) -> None:
    (tmp_path / "manifests" / "torn.toml").write_text('id = "torn"\nname = \n')
    listed = models("list")
    assert (listed.exit_code, "tiny" in listed.stdout, "torn" in listed.stdout) == (0, True, False)
    assert "torn.toml: TOML: Invalid value (at line 2, column 8)" in listed.stderr
    assert models("pull", "tiny:q8_0").exit_code == 0
    shown = models("show", "torn")
    assert shown.exit_code == 1
    assert shown.stderr.splitlines()[-1].startswith(f"edge_rt: {tmp_path}/manifests/torn.toml: TOML")
