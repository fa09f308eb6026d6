"""Processes of our own run the package that starts them."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

import edge_rt
from edge_rt import same_package
from tests.patience import until
from tests.process_signals import has_ended

_TELL = """
import sys
import edge_rt, edge_rt.told
print(edge_rt.__file__, edge_rt.told.__file__, __name__, sys.argv[1:])
"""
_ASK = """
import subprocess
from edge_rt.same_package import command
print(subprocess.check_output(command("edge_rt.tell", "a", "-b"), text=True), end="")
"""


def test_a_process_has_the_package_of_who_starts_it_and_nothing_else_of_where_it_is(tmp_path: Path) -> None:
    package, own = tmp_path / "edge_rt", Path(edge_rt.__file__).parent
    package.mkdir()
    for name in ("__init__.py", "same_package.py"):
        shutil.copy(own / name, package)
    (package / "told.py").write_text("")
    (package / "tell.py").write_text(_TELL)
    (package / "ask.py").write_text(_ASK)
    (tmp_path / "runpy.py").write_text("raise SystemExit('imported from beside the package')")
    # As a daemon that was started beside the package, which another one is installed for.
    asked = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import edge_rt.ask"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.stderr == ""
    assert asked.stdout == f"{package}/__init__.py {package}/told.py __main__ ['a', '-b']\n"


def test_a_package_is_run_by_its_name_and_its_exit_status_is_told() -> None:
    done = subprocess.run(same_package.command("edge_rt", "--version"), capture_output=True, text=True, check=True)
    assert edge_rt.__version__ in done.stdout
    assert subprocess.run(same_package.command("edge_rt", "no-such"), capture_output=True, check=False).returncode == 2


def test_a_process_may_end_with_the_one_that_started_it() -> None:
    """Although it hears nothing: it is stopped. What starts it hands it its own stdout, and waits for its word."""
    ask = (
        "import subprocess, sys; from edge_rt import same_package\n"
        "tell = 'import os, signal; from edge_rt.same_package import end_with_parent; end_with_parent(); "
        "print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGSTOP)'\n"
        "child = subprocess.Popen([sys.executable, '-c', tell], stdout=subprocess.PIPE, text=True)\n"
        "print(child.stdout.readline(), flush=True); child.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        try:
            parent.kill()
            until(lambda: has_ended(child))
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
