from __future__ import annotations

from pathlib import Path

import pytest

from edge_rt.catalog.chains import Cascade, Ocr, load_chain, load_chains
from edge_rt.catalog.manifest import SHIPPED_DIR, load_manifests
from edge_rt.chains import task_of
from edge_rt.errors import ModelFormatError

CASCADE = 'kind = "cascade"\nid = "both"\nname = "Both"\nfirst = "small"\nthen = "large"\nmin_score = 0.8\n'


def write(directory: Path, name: str, text: str) -> Path:
    path = directory / "chains" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_chain_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, "a.toml", CASCADE + 'confidence = "least"\nstops_early = 0.7\ncost = 0.004\nn = 300\n')
    chain = Cascade(
        id="both", name="Both", first="small", then="large", min_score=0.8, confidence="least", stops_early=0.7,
        cost=0.004, n=300,
    )  # fmt: skip
    assert load_chain(path) == chain
    assert chain.parts == ("small", "large")


def test_earlier_directory_counts(tmp_path: Path) -> None:
    for name, title in (("a", "Mine"), ("b", "Theirs")):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "x.toml", f'kind = "ocr"\nid = "text"\nname = "{title}"\ndetect = "d"\nread = "r"\n')
    (chain,) = load_chains((tmp_path / "a", tmp_path / "b", tmp_path / "none"))
    assert chain == Ocr(id="text", name="Mine", detect="d", read="r")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (CASCADE.replace("0.8", "1.5"), "min_score: Expected `float` <= 1.0"),
        (CASCADE.replace('"cascade"', '"ladder"'), "kind: Invalid value 'ladder'"),
        (CASCADE.replace('"large"', '"small"'), "both its models are small"),
        (CASCADE.replace('"both"', '"../x"'), "id: "),
        (CASCADE + "wheels = 4\n", "unknown field `wheels`"),
        ("kind = ", "TOML: "),
        ("", "missing required field `kind`"),
    ],
)
def test_bad_chain_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ModelFormatError, match=problem):
        load_chain(write(tmp_path, "a.toml", text))


def test_shipped_chains_fit_the_shipped_models() -> None:
    manifests = {manifest.id: manifest for manifest in load_manifests((SHIPPED_DIR,))}
    chains = {chain.id: chain for chain in load_chains((SHIPPED_DIR,))}
    assert {chain: task_of(chain, manifests, chains) for chain in chains} == {
        "pcb-defect-cascade": "detect",
        "pp-ocrv4": "ocr",
    }


def test_a_bad_chain_is_left_out_and_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write(tmp_path / "a", "both.toml", CASCADE.replace("0.8", "8"))
    write(tmp_path / "a", "text.toml", 'kind = "ocr"\nid = "text"\nname = "T"\ndetect = "d"\nread = "r"\n')
    left_out: dict[str, ModelFormatError] = {}
    assert [chain.id for chain in load_chains((tmp_path / "a",), left_out=left_out)] == ["text"]
    assert left_out["both"].field == "min_score"
