"""Make .venv and install edge_rt into it with everything its commands and tests need; quick when nothing changed.

Standard library only. What the installation was made from is kept in .venv/edge_rt.stamp: pyproject.toml, these tools,
the C sources, the Python and the CPU. While that holds nothing is done, and no network or compiler is needed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.build_llama import ROOT, BuildError, cpu_features, ensure_wheel
from tools.progress import CommandError, pip_stage, run

VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "edge_rt.stamp"
LOG = VENV / "install.log"
EXTRAS = "llama,cli,dev"

NO_VENV = """this Python cannot make a virtual environment (no ensurepip).
Debian, Ubuntu: apt install python3-venv, or name another Python: make PYTHON=/path/to/python3"""


def inputs(python_version: str) -> str:
    """Hash what the installation depends on."""
    made_from = hashlib.blake2b(digest_size=16)
    for name in ("pyproject.toml", "setup.py", "tools/build_llama.py", "tools/install.py"):
        made_from.update((ROOT / name).read_bytes())
    for path in sorted((ROOT / "native").glob("*/*.[ch]")):
        made_from.update(path.read_bytes())
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    for text in (str(ROOT), python_version, cpu_features(cpuinfo), os.environ.get("CMAKE_ARGS", "")):
        made_from.update(text.encode() + b"\0")
    return made_from.hexdigest()


def main() -> None:
    made_from, built = STAMP.read_text(encoding="utf-8").split("\n")[:2] if STAMP.exists() else ("", "")
    version = _version()
    if version and made_from == inputs(version):
        return
    version = version or _make_venv()
    wheel = ensure_wheel(PYTHON)
    pip = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    if built != str(wheel) or not STAMP.exists():
        # The same version compiled for another CPU may be there: --force-reinstall. Its dependencies come with ours.
        run("installing llama.cpp", [*pip, "--force-reinstall", "--no-deps", str(wheel)], stage=pip_stage, log=LOG)
    # A plain path entry: behind setuptools' finder, a script beside the clone would import the clone's directory.
    editable = ["--config-settings", "editable_mode=compat", "--editable", f"{ROOT}[{EXTRAS}]"]
    run("installing edge_rt", [*pip, *editable], stage=pip_stage, log=LOG)
    _check()
    STAMP.write_text(f"{inputs(version)}\n{wheel}\n", encoding="utf-8")


def _version() -> str:
    """Give the version of the venv's Python, "" where there is none or its packages belong to an older Python."""
    if not PYTHON.exists():
        return ""
    asked = [str(PYTHON), "-c", "import importlib.util as u, sys; print(sys.version if u.find_spec('pip') else '')"]
    return subprocess.run(asked, check=False, capture_output=True, text=True).stdout.strip()


def _make_venv() -> str:
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(VENV)], check=False, capture_output=True, text=True
    )
    if made.returncode:
        shutil.rmtree(VENV, ignore_errors=True)
        raise BuildError(NO_VENV if _lacks_ensurepip() else made.stdout + made.stderr)
    return _version()


def _lacks_ensurepip() -> bool:
    return subprocess.run([sys.executable, "-c", "import ensurepip"], check=False, capture_output=True).returncode != 0


def _check() -> None:
    """Load the libraries once: a build for another CPU dies here, not in the first request."""
    answer = subprocess.run([str(PYTHON), "-c", "import llama_cpp"], check=False, capture_output=True, text=True)
    if answer.returncode:
        died = f"signal {-answer.returncode}" if answer.returncode < 0 else answer.stderr.strip()
        raise BuildError(f"llama.cpp was built but cannot be loaded: {died}")
    script = "from edge_rt.backends.native_library import load_native; load_native()"
    if subprocess.run([str(PYTHON), "-c", script], check=False, capture_output=True).returncode:
        print(f"the native engine was not compiled, see {LOG}; models will run on llama.cpp, slower", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except BuildError as exc:
        sys.exit(f"edge_rt: {exc}")
    except CommandError as exc:
        sys.exit(f"{exc.tail}\nedge_rt: {exc}. The whole output is in {exc.log}")
    except KeyboardInterrupt:
        sys.exit(130)
