"""The vendors' packages that cannot live beside edge_rt's: what is installed of each, where, and why apart.

Every package is pinned and named, those too that others need: nothing is resolved when an environment is made, so it
is the same one everywhere. environments.py makes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from edge_rt.errors import VendorSetupError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One vendor's packages.

    packages        pinned, all that are installed
    imports         modules that an environment must be able to import to be sound
    pythons         versions that all packages have wheels for, the preferred one first
    machines        as platform.machine() names them
    installed_bytes measured, on the disk; download_bytes of the wheels
    why             these packages are kept apart, for people
    stand_ins       import name → file put there instead of a package that is not installed
    """

    name: str
    packages: tuple[str, ...]
    imports: tuple[str, ...]
    pythons: tuple[tuple[int, int], ...]
    machines: tuple[str, ...]
    installed_bytes: int
    download_bytes: int
    why: str
    stand_ins: Mapping[str, Path] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def digest(self) -> str:
        """Name what is installed: an environment of another digest is out of date."""
        parts = [*self.packages, *(f"{name}={path.read_text()}" for name, path in sorted(self.stand_ins.items()))]
        return hashlib.blake2b("\0".join(parts).encode(), digest_size=4).hexdigest()


_BESIDE: Final = Path(__file__).parent

# torch <= 2.4 is what makes this stack 5.7 GB: its wheels for x86-64 bring CUDA. Of the toolkit only the quantiser
# "gdq" and the reader of PyTorch files compute with it, but every import of the toolkit imports it; the stand-in is
# for those. What comes out is the same (hw/npu/rknn/README.md).
_RKNN: Final = Stack(
    name="rknn",
    packages=(
        "rknn-toolkit2==2.5.0",
        "fast-histogram==0.14",
        "flatbuffers==25.12.19",
        "numpy==1.26.4",
        "onnx==1.18.0",
        "onnxruntime==1.26.0",
        "opencv-python-headless==4.11.0.86",
        "packaging==26.4",
        "protobuf==4.25.4",
        "psutil==7.2.2",
        "ruamel.yaml==0.19.1",
        "scipy==1.17.1",
        "setuptools==75.8.0",
        "tqdm==4.70.1",
        "typing_extensions==4.16.0",
    ),
    imports=("rknn.api",),
    pythons=((3, 11), (3, 12)),
    machines=("x86_64", "aarch64"),
    installed_bytes=560_000_000,
    download_bytes=180_000_000,
    why="it holds numpy below 2, onnx below 1.19 and protobuf 4",
    stand_ins=MappingProxyType({"torch": _BESIDE / "torch_stand_in.py"}),
)

_RKNN_LITE: Final = Stack(
    name="rknn-lite",
    packages=(
        "rknn-toolkit-lite2==2.5.0",
        "numpy==1.26.4",
        "psutil==7.2.2",
        "ruamel.yaml==0.19.1",
        "setuptools==75.8.0",
    ),
    imports=("rknnlite.api",),
    pythons=((3, 11), (3, 12)),
    machines=("aarch64",),
    installed_bytes=70_000_000,
    download_bytes=20_000_000,
    why="it has no packages for Python 3.13 and later, and runs in a process of its own anyway",
)

STACKS: Final[Mapping[str, Stack]] = MappingProxyType({stack.name: stack for stack in (_RKNN, _RKNN_LITE)})


def stack(name: str) -> Stack:
    """Give a vendor's stack. Raises VendorSetupError for a name that has none."""
    if (found := STACKS.get(name)) is None:
        raise VendorSetupError(
            vendor=name, problem="there is no such environment", remedy=f"there are: {', '.join(STACKS)}"
        )
    return found
