"""Boot a stock Debian kernel on an emulated board and run edge_rt's power code on its real drivers: `make test-kernel`.

QEMU (software emulation) runs Debian's kernel with one more ACPI table, made from board.asl: acpi-cpufreq with five
P-states, an ACPI power meter, a thermal zone and a battery. The guest has no disk: all of it is in its first file
system, made of Debian's packages (apt fetches and checks them; nothing is installed on this machine from them), a few
kernel modules, and the part of edge_rt that powerd and the sensors are. guest.py is its only program.

Drivers and files are the kernel's own; power, heat and clock behind them are modelled, and nothing here says how fast
anything is. Everything is made in a temporary directory, which is removed. Where something cannot be had, the reason is
printed and nothing is run; with --check that is a failure.
"""

from __future__ import annotations

import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.emulate_x86 import Archive, CannotEmulateError, install_programs

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SUITE = "bookworm"
PROGRAMS = {"qemu-system-x86_64": "qemu-system-x86", "iasl": "acpica-tools", "dpkg-deb": "dpkg", "cpio": "cpio"}
# What Python needs to run powerd, in this suite.
PACKAGES = (
    "libc6",
    "libgcc-s1",
    "zlib1g",
    "libexpat1",
    "libffi8",
    "libssl3",
    "libbz2-1.0",
    "liblzma5",
    "libuuid1",
    "python3.11-minimal",
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
)
MODULES = (
    "acpi-cpufreq",
    "cpufreq_userspace",
    "cpufreq_ondemand",
    "cpufreq_conservative",
    "cpufreq_powersave",
    "acpi_power_meter",
    "battery",
    "ac",
    "thermal",
)
UNUSED = ("usr/share", "usr/lib/x86_64-linux-gnu/gconv", "usr/lib/locale", "etc")
BOOT_TIMEOUT_S = 420.0
VERDICT = re.compile(r"^verdict: (\d+) checks, (\d+) failed\s*$", re.MULTILINE)


def build_system(folder: Path) -> tuple[Path, Path]:
    """Make the guest's kernel and first file system below folder. Raises CannotEmulateError."""
    archive = Archive(folder / "apt", SUITE)
    archive.update()
    root = folder / "root"
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for package in PACKAGES:
        archive.unpack(package, root)
    for name in UNUSED:
        shutil.rmtree(root / name, ignore_errors=True)
    for name in ("proc", "sys", "dev", "run", "tmp", "etc", "var/lib/edge_rt", "srv/tests/plants"):
        (root / name).mkdir(parents=True, exist_ok=True)
    archive.unpack(archive.dependency_of("linux-image-amd64"), folder / "kernel")
    names = copy_modules(next((folder / "kernel/lib/modules").iterdir()), root / "lib/modules")
    (root / "lib/modules/order").write_text("".join(f"{name}\n" for name in names), encoding="ascii")
    for part in (*(ROOT / "edge_rt").glob("*.py"), ROOT / "edge_rt/devices", ROOT / "edge_rt/power"):
        copy_source(part, root / "srv/edge_rt" / part.name)
    for name in ("facts.py", "powerd_process.py"):
        copy_source(ROOT / "tests/plants" / name, root / "srv/tests/plants" / name)
    copy_source(HERE / "guest.py", root / "srv/guest.py")
    (root / "init").symlink_to("usr/bin/python3.11")
    initrd = folder / "initrd.gz"
    pack = (
        f"cd {shlex.quote(str(root))} && find . | cpio --quiet -o -H newc -R 0:0 | gzip -1 > {shlex.quote(str(initrd))}"
    )
    subprocess.run(["sh", "-c", pack], check=True)
    return next(folder.glob("kernel/boot/vmlinuz-*")), initrd


def copy_source(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    else:
        shutil.copy(source, target)


def copy_modules(source: Path, target: Path) -> list[str]:
    """Copy the modules and what they depend on; gives their files' names in the order of loading."""
    target.mkdir(parents=True)
    files = {path.name.partition(".")[0].replace("-", "_"): path for path in source.rglob("*.ko")}
    order: list[str] = []

    def add(name: str) -> None:
        name = name.replace("-", "_")
        # A driver that is built in has no file, and one that needs it does not say so.
        if name not in files or files[name].name in order:
            return
        depends = re.search(rb"\0depends=([^\0]*)\0", files[name].read_bytes())
        for other in filter(None, (depends[1] if depends else b"").decode().split(",")):
            add(other)
        order.append(files[name].name)
        shutil.copy(files[name], target)

    for name in MODULES:
        add(name)
    return order


def build_table(folder: Path) -> Path:
    """Compile the ACPI table. Raises CalledProcessError."""
    command = ["iasl", "-p", str(folder / "board"), str(HERE / "board.asl")]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder / "board.aml"


def boot(kernel: Path, initrd: Path, table: Path, serial: Path) -> str:
    """Run the guest until it powers off; gives what it wrote to its serial line."""
    command = [
        "qemu-system-x86_64",
        *("-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "Nehalem,+rdrand", "-smp", "2", "-m", "1024"),
        *("-nic", "none", "-display", "none", "-monitor", "none", "-no-reboot", "-serial", f"file:{serial}"),
        *("-kernel", str(kernel), "-initrd", str(initrd), "-acpitable", f"file={table}"),
        *("-append", "console=ttyS0 quiet panic=-1 random.trust_cpu=on rdinit=/init -- /srv/guest.py"),
    ]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    deadline_s = time.monotonic() + BOOT_TIMEOUT_S
    n_shown = 0
    try:
        while process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.5)
            n_shown = show(serial, n_shown)
    finally:
        process.kill()
        process.wait()
    show(serial, n_shown)
    return serial.read_text(errors="replace") if serial.exists() else ""


def show(serial: Path, n_shown: int) -> int:
    """Print the whole lines that have come since n_shown characters."""
    text = serial.read_text(errors="replace") if serial.exists() else ""
    new = text[n_shown : text.rfind("\n") + 1]
    print(new, end="", flush=True)
    return n_shown + len(new)


def main() -> int:
    if platform.machine() != "x86_64":
        print(f"skipped: this is {platform.machine()}; the guest is x86-64 and has ACPI")
        return int("--check" in sys.argv)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="edge_rt-kernel-") as name:
        folder = Path(name)
        try:
            install_programs(PROGRAMS)
            kernel, initrd = build_system(folder)
        except CannotEmulateError as exc:
            print(f"skipped: {exc}")
            return int("--check" in sys.argv)
        table = build_table(folder)
        built_s = time.monotonic()
        print(
            f"built in {built_s - started_s:.0f} s: {kernel.name}, {initrd.stat().st_size / 2**20:.0f} MiB", flush=True
        )
        output = boot(kernel, initrd, table, folder / "serial")
        print(f"ran for {time.monotonic() - built_s:.0f} s, emulated by QEMU")
    verdict = VERDICT.search(output)
    if verdict is None:
        print("FAILED: the guest ended without a verdict")
        return 1
    return 0 if int(verdict[1]) and not int(verdict[2]) else 1


if __name__ == "__main__":
    sys.exit(main())
