from __future__ import annotations

import os
from pathlib import Path

import pytest

from edge_rt.errors import InterpreterError
from edge_rt.service.installation import check_interpreter
from edge_rt.service.interpreter import hops, needed_paths, obstacles


def fake_stat(mode: int, uid: int = 0) -> os.stat_result:
    return os.stat_result((mode, 0, 0, 1, uid, 0, 0, 0, 0, 0))


DIR, FILE = 0o040755, 0o100755


def test_every_link_on_the_way_is_a_hop(tmp_path: Path) -> None:
    (tmp_path / "real" / "bin").mkdir(parents=True)
    (tmp_path / "real" / "bin" / "python3.11").write_text("")
    (tmp_path / "real" / "bin" / "python3").symlink_to("python3.11")
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "python").symlink_to("../real/bin/python3")
    found = [path for path in hops(tmp_path / "venv" / "python") if tmp_path in path.parents]
    names = [str(path.relative_to(tmp_path)) for path in found]
    steps = ["venv", "venv/python", "real", "real/bin", "real/bin/python3", "real", "real/bin", "real/bin/python3.11"]
    assert names == steps


def test_a_link_to_itself_ends(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("a")
    assert len(list(hops(tmp_path / "a"))) < 1000


@pytest.mark.parametrize("home", ["/home/me/venv", "/root/.pyenv", "/tmp/venv", "/run/user/1000/venv"])
def test_what_units_hide_is_in_the_way(home: str) -> None:
    (found,) = obstacles([Path(home, "bin/python")], stat_of=lambda path: fake_stat(DIR))
    assert found.why == "services do not see it"
    with pytest.raises(InterpreterError, match=r"python3 -m venv /opt/edge_rt"):
        check_interpreter(home, [found])


def test_a_link_into_a_home_is_in_the_way_and_says_who_leads_there(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to("/root/.pyenv/bin/python3")
    found = obstacles([tmp_path / "python"], stat_of=lambda path: fake_stat(DIR))
    # pytest's own directory is below /tmp, which units hide as well
    assert {str(one.path) for one in found} <= {"/root", "/tmp"}
    with pytest.raises(InterpreterError, match="leads there"):
        check_interpreter("x", found)


def test_a_closed_directory_and_a_closed_file_are_in_the_way() -> None:
    modes = {"/": DIR, "/opt": DIR, "/opt/a": 0o040750, "/opt/b": DIR, "/opt/b/python": 0o100750}
    found = obstacles([Path("/opt/a/python"), Path("/opt/b/python")], stat_of=lambda path: fake_stat(modes[str(path)]))
    assert [(str(one.path), one.why.partition(" (")[0]) for one in found] == [
        ("/opt/a", "only its owner and group may enter it"),
        ("/opt/b/python", "only its owner and group may read it"),
    ]


def test_what_is_missing_is_in_the_way(tmp_path: Path) -> None:
    (found,) = obstacles([tmp_path / "gone"], stat_of=lambda path: (tmp_path / "gone").stat())
    assert found.why == "No such file or directory"


def test_what_runs_as_root_must_be_roots() -> None:
    def stat_of(path: Path) -> os.stat_result:
        return fake_stat(DIR if path.suffix == "" else FILE, 1000 if path.name == "venv" else 0)

    assert obstacles([Path("/opt/venv/x.py")], stat_of=stat_of) == ()
    (found,) = obstacles([Path("/opt/venv/x.py")], stat_of=stat_of, root_only=True)
    assert "uid 1000" in found.why
    (found,) = obstacles(
        [Path("/opt/x.py")], stat_of=lambda path: fake_stat(0o100666 if path.suffix else DIR), root_only=True
    )
    assert "everybody may change it" in found.why


def test_an_interpreter_for_all_is_fine() -> None:
    assert obstacles([Path("/opt/edge_rt/bin/python")], stat_of=lambda path: fake_stat(DIR)) == ()
    check_interpreter("/opt/edge_rt/bin/python", [])


def test_this_interpreter_needs_itself_and_the_package() -> None:
    found = needed_paths()
    assert any(path.name.startswith("python") for path in found)
    assert any(path.match("edge_rt/__init__.py") for path in found)
