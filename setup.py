"""Build shim for the native engine; the metadata lives in pyproject.toml.

The engine is a plain shared library called through ctypes. Where it cannot be compiled the rest installs all the same,
and the back end says that it is absent.
"""

from pathlib import Path

from setuptools import Extension, setup

_FILES = sorted(p.as_posix() for p in Path("native").glob("*/*.[ch]") if p.parent.name != "tests")

setup(
    ext_modules=[
        Extension(
            "edge_rt.backends._native",
            sources=[name for name in _FILES if name.endswith(".c")],
            depends=[name for name in _FILES if name.endswith(".h")],
            include_dirs=["native/include", "native/kernels", "native/src"],
            define_macros=[("_GNU_SOURCE", "1")],
            # No contraction: what is one fused operation and what is two must not depend on the compiler.
            extra_compile_args=["-std=c17", "-O3", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"],
            libraries=["m", "pthread"],
            optional=True,
        )
    ]
)
