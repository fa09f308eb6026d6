"""Stand in for PyTorch where a package imports it and does not use it: all its names are there, to call one raises.

environments.py puts this file into a vendor's environment as `torch`. Standard library only. A class may derive from
torch.nn.Module and a function be decorated with torch.no_grad(), as happens at import; everything else raises.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0+stand.in"
_DECORATORS = frozenset({"torch.no_grad", "torch.inference_mode", "torch.enable_grad"})


def _undecorated(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class _Names(type):
    """What a name of torch is: a class that can be derived from, has attributes of its kind and makes no objects."""

    full_name = ""

    def __getattr__(cls, name: str) -> _Names:
        return _attribute(cls.full_name, name)

    def __call__(cls, *_: Any, **__: Any) -> Any:
        if cls.full_name in _DECORATORS:
            return _undecorated
        raise RuntimeError(
            f"{cls.full_name} was called, and PyTorch is not installed in this environment: it takes 5 GB. "
            "Convert the model to ONNX first, and choose another quantising algorithm than gdq"
        )


def _attribute(owner: str, name: str) -> _Names:
    if name.startswith("__"):
        raise AttributeError(f"{owner} has no {name}: it stands in for a package that is not installed")
    return _Names(name, (), {"full_name": f"{owner}.{name}"})


class _Module(ModuleType):
    def __getattr__(self, name: str) -> _Names:
        found = _attribute(self.__name__, name)
        setattr(self, name, found)  # the same class each time
        return found


class _Submodules(MetaPathFinder, Loader):
    """Makes torch.nn, torch.nn.functional and whatever else is imported of it."""

    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(self._prefix) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


if __name__ == "torch":  # and nothing where it is only read
    sys.modules[__name__].__class__ = _Module
    sys.meta_path.append(_Submodules(__name__))
