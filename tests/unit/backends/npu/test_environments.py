"""How vendors' environments are made, found and removed. Python and its packages are real, what is installed is not:
a stand-in for pip puts one module there."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from edge_rt.backends.npu import environments
from edge_rt.backends.npu.installing import Tools, choose_tools, set_up
from edge_rt.backends.npu.stacks import STACKS, Stack, stack
from edge_rt.errors import VendorSetupError

MACHINE = "x86_64"
ACME = Stack(
    name="acme",
    packages=("acme==1.0", "acme-core==2.0"),
    imports=("acme",),
    pythons=((3, 11), (3, 12)),
    machines=(MACHINE,),
    installed_bytes=1000,
    download_bytes=1000,
    why="of a test",
)


class FakeTools(Tools):
    """venv as it is; instead of pip, a line of shell, SITE being where packages go."""

    def __init__(self, script: str) -> None:
        super().__init__(sys.executable)
        object.__setattr__(self, "script", script)

    def install(self, folder: Path, packages: Sequence[str]) -> list[str]:
        (site,) = (folder / "lib").glob("python3*/site-packages")
        said = "".join(f"echo 'Collecting {package}'; " for package in packages)
        return ["sh", "-c", f"{said}SITE={site}; {self.script}"]  # type: ignore[attr-defined]


GOOD = FakeTools('echo "VERSION = 1" > "$SITE/acme.py"')


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "STATE_DIRECTORY": str(tmp_path / "state")}


@pytest.fixture
def root(environ: dict[str, str]) -> Path:
    return environments.usual_dir(environ)


def make(
    environ: dict[str, str],
    tmp_path: Path,
    *,
    wanted: Stack = ACME,
    tools: Tools = GOOD,
    where: Path | None = None,
    is_anew: bool = False,
    machine: str = MACHINE,
) -> environments.Environment:
    said: list[str] = []
    return set_up(
        wanted,
        said.append,
        where=where,
        environ=environ,
        tools=tools,
        machine=machine,
        system_dir=tmp_path / "none",
        is_anew=is_anew,
    )


def left(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_one_is_made_once_and_found_after_that(environ: dict[str, str], root: Path, tmp_path: Path) -> None:
    assert environments.find(ACME, environ, tmp_path) is None
    assert environments.missing(ACME, environ, tmp_path) == (
        "its packages are not installed; `edge_rt npu setup acme` makes an environment for them"
    )
    made = make(environ, tmp_path)
    assert made.is_current
    assert made.record.packages == ACME.packages
    assert made.record.size_bytes > 0
    assert made.record.python.split(".")[:2] == [str(n) for n in sys.version_info[:2]]
    assert made == environments.find(ACME, environ, tmp_path)
    assert environments.missing(ACME, environ, tmp_path) is None
    assert make(environ, tmp_path, tools=FakeTools("exit 1")) == made
    assert left(root) == [".acme.lock", "acme", f"acme-{ACME.digest}"]


def test_what_happens_is_told(environ: dict[str, str], tmp_path: Path) -> None:
    said: list[str] = []
    set_up(ACME, said.append, environ=environ, tools=GOOD, machine=MACHINE, system_dir=tmp_path)
    assert said == [
        "making the environment",
        "fetching acme, 1 of 2",
        "fetching acme-core, 2 of 2",
        "trying to import it",
    ]


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo 'no matching distribution'; exit 1", "could not be installed: .*no matching distribution"),
        ("true", "do not import: .*No module named 'acme'"),
        ('echo "import os; os.abort()" > "$SITE/acme.py"', "do not import"),
    ],
)
def test_one_that_cannot_be_made_leaves_nothing(
    environ: dict[str, str], root: Path, tmp_path: Path, script: str, problem: str
) -> None:
    with pytest.raises(VendorSetupError, match=problem):
        make(environ, tmp_path, tools=FakeTools(script))
    assert left(root) == [".acme.lock"]
    assert make(environ, tmp_path).is_current


def test_an_older_one_serves_until_the_new_one_has_been_tried(
    environ: dict[str, str], root: Path, tmp_path: Path
) -> None:
    made = make(environ, tmp_path)
    newer = replace(ACME, packages=("acme==1.1",))
    found = environments.find(newer, environ, tmp_path)
    assert found is not None
    assert not found.is_current
    assert "other versions" in str(environments.missing(newer, environ, tmp_path))
    with pytest.raises(VendorSetupError):
        make(environ, tmp_path, wanted=newer, tools=FakeTools("exit 1"))
    assert environments.find(ACME, environ, tmp_path) == made
    assert make(environ, tmp_path, wanted=newer).is_current
    assert left(root) == [".acme.lock", "acme", f"acme-{newer.digest}"]


def test_a_current_one_is_made_again_when_that_is_asked(environ: dict[str, str], root: Path, tmp_path: Path) -> None:
    first = make(environ, tmp_path)
    with pytest.raises(VendorSetupError):
        make(environ, tmp_path, tools=FakeTools("exit 1"), is_anew=True)
    assert environments.find(ACME, environ, tmp_path) == first
    second = make(environ, tmp_path, is_anew=True)
    assert second.folder != first.folder
    assert not first.folder.exists()
    assert make(environ, tmp_path, is_anew=True).folder == first.folder
    assert len(left(root)) == 3


def test_it_can_stand_elsewhere_and_the_usual_place_links_to_it(
    environ: dict[str, str], root: Path, tmp_path: Path
) -> None:
    made = make(environ, tmp_path, where=tmp_path / "disk")
    assert made.folder == tmp_path / "disk" / f"acme-{ACME.digest}"
    assert left(root) == [".acme.lock", "acme"]
    assert environments.remove(ACME, environ) == made.record.size_bytes
    assert left(root) == [".acme.lock"]
    assert left(tmp_path / "disk") == []
    assert environments.remove(ACME, environ) == 0


def test_what_a_killed_run_left_is_not_used_and_made_again(environ: dict[str, str], root: Path, tmp_path: Path) -> None:
    made = make(environ, tmp_path)
    (made.folder / environments.RECORD).unlink()
    assert environments.find(ACME, environ, tmp_path) is None
    assert make(environ, tmp_path).is_current


def test_removing_touches_nothing_that_is_no_environment(environ: dict[str, str], root: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    root.mkdir(parents=True)
    (root / "acme").symlink_to(precious)
    assert environments.remove(ACME, environ) == 0
    assert precious.is_dir()


def test_what_is_no_record_of_ours_is_not_run(environ: dict[str, str], tmp_path: Path) -> None:
    made = make(environ, tmp_path)
    file = made.folder / environments.RECORD
    file.write_text(json.dumps({"vendor": "other"}))
    assert environments.find(ACME, environ, tmp_path) is None
    file.write_bytes(b"{" * 100_000)
    assert environments.find(ACME, environ, tmp_path) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_an_environment_of_somebody_else_is_not_run(environ: dict[str, str], tmp_path: Path) -> None:
    made = make(environ, tmp_path)
    os.chown(made.folder / environments.RECORD, 65534, 65534)
    assert environments.find(ACME, environ, tmp_path) is None


def test_the_machine_s_environment_serves_who_has_none(environ: dict[str, str], tmp_path: Path) -> None:
    made = make(environ, tmp_path)
    other = {"STATE_DIRECTORY": str(tmp_path / "other")}
    assert environments.find(ACME, other, tmp_path / "state") == made


def test_two_do_not_make_one_at_a_time(environ: dict[str, str], root: Path, tmp_path: Path) -> None:
    with environments.locked(ACME, root), pytest.raises(VendorSetupError, match="another process"):
        make(environ, tmp_path)


def test_it_says_what_is_in_the_way(environ: dict[str, str], root: Path, tmp_path: Path) -> None:
    with pytest.raises(VendorSetupError, match="none for riscv64"):
        make(environ, tmp_path, machine="riscv64")
    with pytest.raises(VendorSetupError, match="MB free"):
        make(environ, tmp_path, wanted=replace(ACME, installed_bytes=10**18))
    with pytest.raises(VendorSetupError, match="there are: rknn"):
        stack("none")
    with pytest.raises(VendorSetupError, match=r"they are there for Python 2\.6, this is 3\.11"):
        choose_tools(replace(ACME, pythons=((2, 6),)), environ, (3, 11))


def test_a_python_that_leads_nowhere_is_not_taken(environ: dict[str, str], tmp_path: Path) -> None:
    for name, status in (("python3.11", 127), ("python3.12", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    chosen = choose_tools(ACME, {"PATH": str(tmp_path)}, (3, 14))
    assert chosen == Tools(str(tmp_path / "python3.12"))


def test_uv_is_preferred_and_installs_the_same(tmp_path: Path) -> None:
    (tmp_path / "uv").write_text("#!/bin/sh\n")
    (tmp_path / "uv").chmod(0o755)
    tools = choose_tools(ACME, {"PATH": str(tmp_path)}, (3, 11))
    assert tools.uv == str(tmp_path / "uv")
    by_pip = Tools(sys.executable)
    for each in (tools, by_pip):
        command = each.install(tmp_path / "env", ACME.packages)
        assert command[-5:] == ["--no-deps", "--only-binary", ":all:", *ACME.packages]
        assert str(tmp_path / "env/bin/python") in command


@pytest.mark.parametrize("wanted", STACKS.values(), ids=STACKS)
def test_every_stack_is_pinned_wholly(wanted: Stack) -> None:
    assert all(package.count("==") == 1 for package in wanted.packages)
    assert len({package.partition("==")[0] for package in wanted.packages}) == len(wanted.packages)
    assert all(path.is_file() for path in wanted.stand_ins.values())
    assert wanted.digest != replace(wanted, packages=wanted.packages[1:]).digest


def test_a_stand_in_lets_itself_be_imported_and_says_what_is_missing(environ: dict[str, str], tmp_path: Path) -> None:
    module = """
import torch
import torch.nn.functional as F
class Layer(torch.nn.Module):
    @torch.no_grad()
    def forward(self): return 1
assert not isinstance(1, torch.Tensor)
assert not hasattr(torch, "__array__")
try:
    F.relu(1)
except RuntimeError as exc:
    assert "torch.nn.functional.relu was called, and PyTorch is not installed" in str(exc), exc
else:
    raise AssertionError
"""
    (tmp_path / "module").write_text(module)
    wanted = replace(ACME, stand_ins=STACKS["rknn"].stand_ins)
    assert make(
        environ, tmp_path, wanted=wanted, tools=FakeTools(f'cp {tmp_path / "module"} "$SITE/acme.py"')
    ).is_current
