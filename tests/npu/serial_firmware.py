"""The serial NPU's firmware as a library of this machine, and as a program in QEMU; built once a process."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

FIRMWARE = Path(__file__).resolve().parents[2] / "hw" / "npu" / "serial"
MACHINES = {"an547": "mps3-an547", "an500": "mps2-an500"}
MEMORY_SIZES = {"an547": "2G", "an500": "16M"}

_MAX_FRAME = 8192


@cache
def build_folder() -> Path:
    """Give a folder for what is built, which goes with the process."""
    folder = tempfile.TemporaryDirectory(prefix="edge_rt-serial-npu-")
    build_folder.keep = folder  # type: ignore[attr-defined]
    return Path(folder.name)


@cache
def library() -> Any:
    """Build the firmware for this machine and open it."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    assert compiler, "make test needs a C compiler"
    built = build_folder() / "firmware.so"
    sources = sorted(str(path) for path in (FIRMWARE / "src").glob("*.c"))
    command = [compiler, "-std=c17", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(
        [*command, f"-I{FIRMWARE / 'src'}", str(FIRMWARE / "tests" / "host.c"), *sources, "-o", str(built)], check=True
    )
    opened = ctypes.CDLL(str(built))
    for name, result in {
        "host_new": ctypes.c_void_p,
        "host_transmit": ctypes.c_size_t,
        "host_wake_at_us": ctypes.c_int64,
        "lone_new": ctypes.c_void_p,
        "lone_receive": ctypes.POINTER(ctypes.c_uint8),
        "lone_transmit": ctypes.c_size_t,
        "lone_wake_at_us": ctypes.c_int64,
        "lone_room": ctypes.c_size_t,
        "lone_sessions": ctypes.c_uint32,
    }.items():
        getattr(opened, name).restype = result
    return opened


class FirmwareLink:
    """link.c as an end of a line."""

    def __init__(self) -> None:
        self._library = library()
        self._self = ctypes.c_void_p(self._library.lone_new())
        self._out = ctypes.create_string_buffer(65_536 + _MAX_FRAME)

    def receive(self, data: bytes, now_us: int) -> bytes:
        n_stream = ctypes.c_size_t()
        stream = self._library.lone_receive(
            self._self, data, ctypes.c_size_t(len(data)), ctypes.c_int64(now_us), ctypes.byref(n_stream)
        )
        return ctypes.string_at(stream, n_stream.value)

    def transmit(self, now_us: int, max_bytes: int) -> bytes:
        n = self._library.lone_transmit(
            self._self, ctypes.c_int64(now_us), self._out, ctypes.c_size_t(min(max_bytes, 65_536))
        )
        return self._out.raw[:n]

    def wake_at_us(self) -> int | None:
        at: int = self._library.lone_wake_at_us(self._self)
        return at if at >= 0 else None

    @property
    def room(self) -> int:
        room: int = self._library.lone_room(self._self)
        return room

    def send(self, data: bytes) -> None:
        self._library.lone_send(self._self, data, ctypes.c_size_t(len(data)))

    @property
    def n_sessions(self) -> int:
        n: int = self._library.lone_sessions(self._self)
        return n

    def __del__(self) -> None:
        self._library.lone_free(self._self)


class FirmwareDevice:
    """The whole firmware as an end of a line; a run begins run_us after it was asked for, and takes no time."""

    def __init__(self, *, is_emulated: bool = True, run_us: int = 0) -> None:
        self._library = library()
        self._self = ctypes.c_void_p(self._library.host_new(int(is_emulated)))
        self._out = ctypes.create_string_buffer(65_536 + _MAX_FRAME)
        self._run_us, self._wanted_us = run_us, 0

    def receive(self, data: bytes, now_us: int) -> bytes:
        self._library.host_receive(self._self, data, ctypes.c_size_t(len(data)), ctypes.c_int64(now_us))
        if not self._library.host_is_wanted(self._self):
            self._wanted_us = now_us
        elif now_us - self._wanted_us >= self._run_us:
            self._library.host_work(self._self)
        return b""

    def transmit(self, now_us: int, max_bytes: int) -> bytes:
        n = self._library.host_transmit(
            self._self, ctypes.c_int64(now_us), self._out, ctypes.c_size_t(min(max_bytes, 65_536))
        )
        return self._out.raw[:n]

    def wake_at_us(self) -> int | None:
        at: int = self._library.host_wake_at_us(self._self)
        return at if at >= 0 else None

    def reset(self, *, spoil_at: int = -1) -> None:
        """Start anew; the memory for a model keeps what it holds, but for a byte."""
        if spoil_at >= 0:
            self.spoil(spoil_at)
        self._library.host_reset(self._self)

    def spoil(self, at: int) -> None:
        """Change a byte of the memory for a model."""
        self._library.host_spoil(self._self, ctypes.c_size_t(at))

    def __del__(self) -> None:
        self._library.host_free(self._self)


def missing_tools() -> str:
    """Say what is missing to build and run the firmware for a board; "" if nothing is."""
    missing = [tool for tool in ("arm-none-eabi-gcc", "qemu-system-arm") if shutil.which(tool) is None]
    return f"needs {' and '.join(missing)} (sh tools/system_packages.sh installs them)" if missing else ""


@cache
def images() -> Path:
    """Build both boards' images; give their folder."""
    subprocess.run(["make", "-s", "-C", str(FIRMWARE), f"BUILD={build_folder()}"], check=True)
    return build_folder()


@contextmanager
def emulated(board: str, memory: Path | None = None) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a board's image in QEMU; give the pseudo terminal that its UART is, and the process.

    memory  a file for the memory that model and activations are in: a board whose memory keeps what it holds, while its
            processor starts anew with each process
    """
    machine = MACHINES[board]
    command = ["qemu-system-arm", "-kernel", str(images() / f"{board}.elf")]
    if memory is not None:
        size = MEMORY_SIZES[board]
        command += ["-m", size, "-object", f"memory-backend-file,id=kept,size={size},mem-path={memory},share=on"]
        machine += ",memory-backend=kept"
    command += ["-M", machine]
    command += ["-display", "none", "-monitor", "none", "-serial", "pty"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            told = ""
            while (found := re.search(r"/dev/pts/\d+", told)) is None:
                line = process.stdout.readline()
                assert line, f"QEMU has ended: {told}"
                told += line
            # QEMU looks once a second whether anybody has opened its terminal; a board's UART is always there.
            held = os.open(found[0], os.O_RDWR | os.O_NOCTTY)
            try:
                yield found[0], process
            finally:
                os.close(held)
        finally:
            process.kill()
