from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_rt.catalog.manifest import Variant
from edge_rt.errors import StoreError
from edge_rt.scheduler import profile
from edge_rt.scheduler.placement import Measured
from edge_rt.scheduler.profile import Entry, Profile, file_key, read, save, versions_now

VERSIONS = {"edge_rt": "0.1.0", "onnxruntime": "1.32.0"}


def entry(**fields: object) -> Entry:
    return Entry(
        **{  # type: ignore[arg-type]
            "model": "m",
            "variant": "int8",
            "file": "abc",
            "backend": "onnx_cpu",
            "device": "cpu",
            "cpu": "A CPU",
            "versions": VERSIONS,
            "measured_at": "2026-11-30T00:00:00Z",
            "n_runs": 20,
            "latency_s": 0.004,
            "latency_p95_s": 0.006,
            "memory_bytes": 2**27,
        }
        | fields
    )


def versions(names: Iterable[str]) -> dict[str, str]:
    return {name: VERSIONS.get(name, "") for name in names}


def open_profile(path: Path) -> Profile:
    found = Profile(path, cpu_model=lambda: "A CPU", versions=versions)
    found.refresh()
    return found


def test_what_is_saved_is_read_and_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.json"
    save(path, [entry(), entry(variant="fp32", latency_s=0.02)])
    save(path, [entry(latency_s=0.003)])
    entries, problems = read(path)
    assert problems == ()
    assert [(e.variant, e.latency_s) for e in entries] == [("int8", 0.003), ("fp32", 0.02)]
    assert [name.name for name in path.parent.iterdir()] == ["profile.json"], "no temporary file is left"
    known, note = open_profile(path).measured("m", "int8", "onnx_cpu", "cpu", file="abc")
    assert (known, note) == (Measured(latency_s=0.003, memory_bytes=2**27), "")


def test_a_profile_that_is_not_there_has_nothing_and_one_that_changes_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    found = open_profile(path)
    assert found.measured("m", "int8", "onnx_cpu", "cpu", file="abc") == (None, "")
    save(path, [entry()])
    found.refresh()
    assert found.measured("m", "int8", "onnx_cpu", "cpu", file="abc")[0] is not None
    path.unlink()
    found.refresh()
    assert found.measured("m", "int8", "onnx_cpu", "cpu", file="abc") == (None, "")
    none = Profile(None)
    none.refresh()
    assert none.measured("m", "int8", "onnx_cpu", "cpu", file="abc") == (None, "")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"file": "other"}, "another file"),
        ({"cpu": "Another CPU"}, "measured on Another CPU"),
        ({"versions": {"onnxruntime": "1.20.0"}}, "onnxruntime 1.20.0, now 1.32.0"),
        ({"versions": {"gone": "1"}}, "gone 1, now absent"),
    ],
)
def test_a_stale_entry_is_left_out_and_says_why(tmp_path: Path, fields: dict[str, object], why: str) -> None:
    path = tmp_path / "profile.json"
    save(path, [entry(**fields)])
    known, note = open_profile(path).measured("m", "int8", "onnx_cpu", "cpu", file="abc")
    assert known is None
    assert note.startswith("its profile is stale")
    assert why in note


def test_damaged_entries_are_left_out_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    good = msgspec.to_builtins(entry())
    bad = [good | {"latency_s": value} for value in (0, -1, 1e9, "fast", None)]
    bad += [
        good | {"extra": 1},
        {},
        7,
        good | {"model": "m" * 1000},
        good | {"versions": {str(i): "" for i in range(99)}},
    ]
    path.write_bytes(msgspec.json.encode({"format": 1, "entries": [*bad, good]}))
    found = open_profile(path)
    assert len(found.problems) == len(bad)
    assert found.measured("m", "int8", "onnx_cpu", "cpu", file="abc")[0] is not None


def test_damaged_files_are_ignored_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for raw, word in (
        (b"", "damaged"),
        (b"[" * 100_000, "damaged"),
        (b'{"format": 2, "entries": []}', "format 2"),
        (b'{"format": 1, "entries": [' + b"1," * profile.MAX_ENTRIES + b"1]}", "damaged"),
        (b" " * (profile.MAX_PROFILE_BYTES + 1), "longer"),
    ):
        path.write_bytes(raw)
        entries, problems = read(path)
        assert entries == ()
        assert word in problems[0]
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in read(path)[1][0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.data())
def test_no_damage_makes_it_believe_numbers_out_of_range(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "profile.json"
    path.unlink(missing_ok=True)
    save(path, [entry(), entry(variant="fp32")])
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    path.write_bytes(bytes(raw))
    for found in read(path)[0]:
        assert 0 < found.latency_s <= 3600
        assert found.memory_bytes is None or 0 < found.memory_bytes <= 2**45


def test_a_place_that_cannot_be_written_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        save(tmp_path / "file" / "profile.json", [entry()])


def test_the_key_of_a_file_is_its_hash_or_its_size_and_time(tmp_path: Path) -> None:
    fetched = Variant(id="fp32", quant="FP32", file="a.onnx", source="https://x/a", size_bytes=1, sha256="a" * 64)
    made = Variant(id="int8", quant="INT8", file="b.onnx", derived_from="fp32")
    path = tmp_path / "b.onnx"
    path.write_bytes(b"one")
    assert file_key(fetched, path) == "a" * 64
    before = file_key(made, path)
    assert before.startswith("INT8, 3 bytes, ")
    os.utime(path, ns=(1, 1))
    assert file_key(made, path) != before
    assert file_key(made, None) == ""


def test_versions_are_those_installed() -> None:
    assert versions_now(["msgspec", "no-such-package"])["msgspec"]
    assert versions_now(["no-such-package"]) == {"no-such-package": ""}


def test_what_is_wrong_with_a_file_is_told_once_each_time_it_changes(tmp_path: Path) -> None:
    path, told = tmp_path / "p.json", []
    profile = Profile(path, warn=told.append)
    profile.refresh()
    assert told == []
    path.write_text("garbage")
    profile.refresh()
    profile.refresh()
    assert [problem.partition(":")[0] for problem in told] == [f"{path} is damaged and is ignored"]
    path.write_text("other garbage")
    profile.refresh()
    assert len(told) == 2
