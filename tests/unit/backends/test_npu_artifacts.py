"""Compiled models on disk: found, verified, made again, bounded."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edge_rt.backends.base import ModelFile
from edge_rt.backends.npu.artifacts import DESCRIPTION, ArtifactCache, artifact_key, artifacts, is_whole, model_digest
from edge_rt.backends.npu.vendor import Compiled, Target, Versions
from edge_rt.errors import AcceleratorLostError, BackendLoadError
from edge_rt.tensor_types import NodePlacement

TARGET = Target(
    vendor="npu_fake",
    soc="fk1",
    versions=Versions(compiler="1", runtime="2", driver="3"),
    options={"vtcm_mb": "8"},
    calibration="c0",
)
PLACEMENT = (NodePlacement(provider="FAKE", n_nodes=3, kinds=(("Conv", 2), ("Relu", 1))),)


class Compiler:
    """Writes n_bytes and counts how often it was asked."""

    def __init__(self, n_bytes: int = 100) -> None:
        self.n_bytes, self.n_calls = n_bytes, 0

    def __call__(self, folder: Path) -> Compiled:
        self.n_calls += 1
        (folder / "model.bin").write_bytes(os.urandom(self.n_bytes))
        (folder / "notes").mkdir()
        return Compiled(files=("model.bin",), placement=PLACEMENT, facts={"n": self.n_calls})


@pytest.fixture
def file(tmp_path: Path) -> ModelFile:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"a model")
    return ModelFile(model="m", variant="int8", path=path, quant="INT8")


def cache(tmp_path: Path, max_bytes: int = 10_000) -> ArtifactCache:
    return ArtifactCache(tmp_path / ".m.onnx.npu", max_bytes=max_bytes)


def opened(kept: ArtifactCache, file: ModelFile, compiler: Callable[[Path], Compiled], target: Target = TARGET) -> Path:
    with kept.artifact(file, target, 0, compiler) as (artifact, _):
        assert artifact.compiled.placement == PLACEMENT
        assert artifact.target == target
        assert sorted(path.name for path in artifact.folder.iterdir()) == [DESCRIPTION, "model.bin"]
        return artifact.folder


def test_it_is_compiled_once_and_found_again(tmp_path: Path, file: ModelFile) -> None:
    compiler = Compiler()
    first = opened(cache(tmp_path), file, compiler)
    assert opened(cache(tmp_path), file, compiler) == first
    assert compiler.n_calls == 1
    (found,) = artifacts(tmp_path / ".m.onnx.npu")
    assert (found.description.model, found.description.variant, found.size_bytes) == ("m", "int8", 100)


@pytest.mark.parametrize(
    "other",
    [
        replace(TARGET, soc="fk2"),
        replace(TARGET, vendor="npu_other"),
        replace(TARGET, options={"vtcm_mb": "4"}),
        replace(TARGET, calibration="c1"),
        *(
            replace(TARGET, versions=replace(TARGET.versions, **{part: "9"}))
            for part in ("compiler", "runtime", "driver")
        ),
    ],
)
def test_all_that_it_depends_on_is_in_its_key(tmp_path: Path, file: ModelFile, other: Target) -> None:
    compiler = Compiler()
    assert opened(cache(tmp_path), file, compiler) != opened(cache(tmp_path), file, compiler, other)
    assert compiler.n_calls == 2


def test_the_model_and_its_external_files_and_rows_are_in_its_key(tmp_path: Path, file: ModelFile) -> None:
    beside = tmp_path / "weights.bin"
    beside.write_bytes(b"1")
    keys = {artifact_key(model_digest(file), TARGET, 0), artifact_key(model_digest(file), TARGET, 1)}
    keys.add(artifact_key(model_digest(file, (beside,)), TARGET, 0))
    beside.write_bytes(b"2")
    keys.add(artifact_key(model_digest(file, (beside,)), TARGET, 0))
    file.path.write_bytes(b"another model")
    keys.add(artifact_key(model_digest(file), TARGET, 0))
    assert len(keys) == 5


def _truncate(folder: Path) -> None:
    (folder / "model.bin").write_bytes(b"short")


def _flip(folder: Path) -> None:
    data = bytearray((folder / "model.bin").read_bytes())
    data[50] ^= 1
    (folder / "model.bin").write_bytes(data)


def _link(folder: Path) -> None:
    (folder / "model.bin").rename(folder / "other")
    (folder / "model.bin").symlink_to("/dev/zero")


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _flip,
        _link,
        lambda folder: (folder / "model.bin").unlink(),
        lambda folder: (folder / DESCRIPTION).write_text("{"),
        lambda folder: (folder / DESCRIPTION).unlink(),
    ],
)
def test_what_is_not_what_was_written_is_made_again(
    tmp_path: Path, file: ModelFile, damage: Callable[[Path], object]
) -> None:
    compiler = Compiler()
    damage(opened(cache(tmp_path), file, compiler))
    opened(cache(tmp_path), file, compiler)
    assert compiler.n_calls == 2
    opened(cache(tmp_path), file, compiler)
    assert compiler.n_calls == 2


def _replace(folder: Path, how: Callable[[Path], object]) -> None:
    elsewhere = folder.parent.parent / "elsewhere"
    folder.rename(elsewhere)
    (elsewhere / "model.bin").write_bytes(b"damaged")
    how(folder)


@pytest.mark.parametrize(
    "how",
    [
        lambda place: place.symlink_to(place.parent.parent / "elsewhere"),
        lambda place: place.symlink_to("/nowhere"),
        lambda place: place.write_bytes(b"a file"),
    ],
)
def test_what_stands_in_its_place_is_removed_and_what_a_link_leads_to_is_not(
    tmp_path: Path, file: ModelFile, how: Callable[[Path], object]
) -> None:
    compiler = Compiler()
    _replace(opened(cache(tmp_path), file, compiler), how)
    assert not opened(cache(tmp_path), file, compiler).is_symlink()
    assert compiler.n_calls == 2
    opened(cache(tmp_path), file, compiler)
    assert compiler.n_calls == 2
    assert (tmp_path / "elsewhere" / "model.bin").read_bytes() == b"damaged"


def test_of_two_that_compile_at_once_the_second_takes_what_the_first_has_kept(tmp_path: Path, file: ModelFile) -> None:
    first, second = Compiler(), Compiler()

    def overtaken(folder: Path) -> Compiled:
        opened(cache(tmp_path), file, first)
        return second(folder)

    folder = opened(cache(tmp_path), file, overtaken)
    with cache(tmp_path).artifact(file, TARGET, 0, first) as (artifact, _):
        assert artifact.folder == folder
        assert artifact.compiled.facts == {"n": 1}
        written = (folder / "model.bin").stat().st_ino
    again = opened(cache(tmp_path), file, first)
    assert (again / "model.bin").stat().st_ino == written
    assert (first.n_calls, second.n_calls) == (1, 1)
    assert [path.name for path in (tmp_path / ".m.onnx.npu").iterdir()] == [folder.name]


def test_a_disk_that_takes_nothing_is_an_error_of_the_load(tmp_path: Path, file: ModelFile) -> None:
    def full(folder: Path) -> Compiled:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    with pytest.raises(BackendLoadError, match="No space left"), cache(tmp_path).artifact(file, TARGET, 0, full):
        pass
    gone = ArtifactCache(tmp_path / ".m.onnx.npu", max_bytes=1, passing=tmp_path / "nowhere")
    with pytest.raises(BackendLoadError, match="cannot be written"), gone.artifact(file, TARGET, 0, Compiler()):
        pass


@pytest.mark.parametrize("fails", ["before", "at once", "in the compiler", "crash", "when written"])
def test_a_full_disk_of_the_store_costs_the_form_and_not_the_load(
    tmp_path: Path, file: ModelFile, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    compiler, (kept, passing) = Compiler(), (tmp_path / "kept", tmp_path / "passing")
    passing.mkdir()

    def compile_to(folder: Path) -> Compiled:
        is_full = folder.is_relative_to(kept)
        if is_full and fails == "at once":
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))
        if is_full and fails == "in the compiler":
            raise BackendLoadError(model="m", reason="Protobuf serialization failed")
        if is_full and fails == "crash":
            raise AcceleratorLostError(backend="npu_fake", reason="its process ended with SIGBUS")
        made = compiler(folder)
        if is_full and fails == "when written":  # the description's place is taken
            (folder / DESCRIPTION).mkdir()
        return made

    def free_bytes(folder: Path) -> int:
        n_asked.append(folder)
        return 10**9 if folder != kept or (fails != "before" and len(n_asked) == 1) else 4096

    n_asked: list[Path] = []
    cached = ArtifactCache(kept, max_bytes=10_000, passing=passing, free_bytes=free_bytes)
    with cached.artifact(file, TARGET, 0, compile_to) as (artifact, again):
        assert artifact.folder.is_relative_to(passing)
        assert is_whole(artifact, file)
        (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
        for words in ("m: its compiled form cannot be kept in", str(kept), "each load will compile it anew"):
            assert words in warning.getMessage()
        assert again().folder.is_relative_to(passing)
    assert not list(passing.iterdir())
    assert not list(kept.iterdir())


@pytest.mark.parametrize("free_bytes", [4096, 10**9])
def test_a_compiler_that_fails_where_the_disk_is_full_is_told_with_that(
    tmp_path: Path, file: ModelFile, free_bytes: int
) -> None:
    def failing(_: Path) -> Compiled:
        raise BackendLoadError(model="m", reason="Protobuf serialization failed")

    kept = ArtifactCache(tmp_path / "kept", max_bytes=1, free_bytes=lambda _: free_bytes)
    with pytest.raises(BackendLoadError) as told, kept.artifact(file, TARGET, 0, failing):
        pass
    assert ("4096 bytes free" in told.value.reason) == (free_bytes == 4096)
    assert "Protobuf" in told.value.reason


def test_what_another_user_may_have_written_is_not_loaded(tmp_path: Path, file: ModelFile) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to somebody else")
    compiler = Compiler()
    os.chown(opened(cache(tmp_path), file, compiler) / "model.bin", 12345, -1)
    opened(cache(tmp_path), file, compiler)
    assert compiler.n_calls == 2


def test_it_is_made_anew_when_it_will_not_load(tmp_path: Path, file: ModelFile) -> None:
    compiler = Compiler()
    with cache(tmp_path).artifact(file, TARGET, 0, compiler) as (artifact, again):
        before = (artifact.folder / "model.bin").read_bytes()
        anew = again()
        assert anew.folder == artifact.folder
        assert (anew.folder / "model.bin").read_bytes() != before


def test_those_used_least_recently_make_room(tmp_path: Path, file: ModelFile) -> None:
    compiler = Compiler(100)
    folders = []
    for i, soc in enumerate(("a", "b", "c")):
        folders.append(opened(cache(tmp_path, 250), file, compiler, replace(TARGET, soc=soc)))
        os.utime(folders[-1] / DESCRIPTION, (i, i))
        if soc == "b":
            os.utime(folders[0] / DESCRIPTION, (9, 9))  # used since
    assert [folder.exists() for folder in folders] == [True, False, True]


def test_one_that_is_larger_than_the_limit_is_kept_alone(tmp_path: Path, file: ModelFile) -> None:
    first = opened(cache(tmp_path, 50), file, Compiler(100))
    second = opened(cache(tmp_path, 50), file, Compiler(100), replace(TARGET, soc="b"))
    assert (first.exists(), second.exists()) == (False, True)


@pytest.mark.parametrize("folder", [None, Path("/proc/nowhere")])
def test_where_nothing_can_be_kept_it_lasts_as_long_as_it_is_used(file: ModelFile, folder: Path | None) -> None:
    with ArtifactCache(folder, max_bytes=10_000).artifact(file, TARGET, 0, Compiler()) as (artifact, again):
        assert (artifact.folder / "model.bin").exists()
        assert (again().folder / "model.bin").exists()
    assert not artifact.folder.exists()


def test_a_compiler_that_fails_leaves_nothing(tmp_path: Path, file: ModelFile) -> None:
    def failing(folder: Path) -> Compiled:
        (folder / "model.bin").write_bytes(b"half")
        raise BackendLoadError(model="m", reason="no such layer")

    def lying(_: Path) -> Compiled:
        return Compiled(files=("model.bin",), placement=PLACEMENT)

    for compiler in (failing, lying):
        with pytest.raises(BackendLoadError), cache(tmp_path).artifact(file, TARGET, 0, compiler):
            pass
    assert list((tmp_path / ".m.onnx.npu").iterdir()) == []
