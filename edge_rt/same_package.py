"""Run a module of this package in a process of its own: of this very package, wherever it was imported from.

`python -m` looks in the working directory first, which is no place to import from, and with -P it finds what is
installed, which may be another version than the one that asks. So the new process is told the file, and with it where
the package is.
"""

from __future__ import annotations

import os
import sys

_FILE = os.path.abspath(__file__)  # noqa: PTH100 - a worker's first module: pathlib takes longer than all of this

_PR_SET_PDEATHSIG = 1


def command(module: str, *arguments: str) -> list[str]:
    """Give the command line of `python -m module arguments` with this package; module is one of it, or its name."""
    return [sys.executable, "-P", _FILE, module, *arguments]


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, even if it is stopped or hangs."""
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Run as the new process."""
    import runpy
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    folder = os.path.dirname(_FILE)  # noqa: PTH120 - as above
    name = os.path.basename(folder)  # noqa: PTH119 - as above
    # Not by sys.path: what lies beside the package would be found before the standard library.
    spec = PathFinder.find_spec(name, [os.path.dirname(folder)])  # noqa: PTH120 - as above
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(package)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
